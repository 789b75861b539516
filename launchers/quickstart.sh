#!/usr/bin/env bash
# The main job, from nothing: installs into .venv, then trains SFT, a reward model, GRPO and PPO on a small task.
#   ./launchers/quickstart.sh [--ranks N] [KEY=VALUE ...]     e.g. seed=1, or --ranks 2 parallel.tensor=2
set -euo pipefail
# shellcheck source=launchers/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ALIGNER_ROOT"
exec python -m examples.quickstart "$@"
