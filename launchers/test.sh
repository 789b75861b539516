#!/usr/bin/env bash
# Lint, format check and tests. `--fast` leaves out the tests marked slow; other arguments go to pytest.
set -euo pipefail

# shellcheck source=launchers/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ALIGNER_ROOT"

arguments=()
for argument in "$@"; do
    case "$argument" in
        --fast) arguments+=(-m "not slow") ;;
        *) arguments+=("$argument") ;;
    esac
done

ruff check .
ruff format --check .
python -m pytest --durations=15 ${arguments[@]+"${arguments[@]}"}
