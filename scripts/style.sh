#!/usr/bin/env bash
# Checks the style of all sources; with --fix, mends what can be mended.
source "$(dirname "$0")/setup.sh"
setup '[dev]'
cd "$root"
export PATH=$root/.venv/bin:$PATH
mapfile -t cxx < <(find csrc tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu')
if [[ ${1:-} == --fix ]]; then
    clang-format -i "${cxx[@]}"
    ruff format
    ruff check --fix
else
    status=0
    clang-format --dry-run -Werror "${cxx[@]}" || status=1
    ruff format --check || status=1
    ruff check || status=1
    exit $status
fi
