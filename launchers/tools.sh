#!/usr/bin/env bash
# Tools: a small model learns to call its calculator. SFT on conversations that seldom do, then GRPO over trajectories.
#   ./launchers/tools.sh [KEY=VALUE ...]     for both stages, e.g. seed=1
set -euo pipefail
# shellcheck source=launchers/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ALIGNER_ROOT"
seed=0
for setting in "$@"; do [[ $setting == seed=* ]] && seed=${setting#seed=}; done
python -m examples.calculator runs/tools/data --seed "$seed"
python -m aligner run experiment=tools_sft run.resume=never "$@"
python -m aligner run experiment=tools_grpo run.resume=never "$@"
python -m aligner report runs/tools/sft runs/tools/grpo
