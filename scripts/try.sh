#!/usr/bin/env bash
# Installs kvops into .venv and replays a trace of chat requests. Arguments go to `python -m kvops replay`.
source "$(dirname "$0")/setup.sh"
setup
exec "$python" -I -m kvops replay "$@"
