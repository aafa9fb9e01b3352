#!/usr/bin/env bash
# Installs kvops into .venv and runs its tests. Arguments go to pytest.
source "$(dirname "$0")/setup.sh"
setup '[test]'
cd "$root"
exec .venv/bin/pytest "$@"
