#!/usr/bin/env bash
# A terminal: a small model learns to work in a shell. SFT on conversations that seldom do, then GRPO, with a sandbox
# for each trajectory.
#   ./launchers/agent.sh [KEY=VALUE ...]     for both stages, e.g. seed=1
set -euo pipefail
# shellcheck source=launchers/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ALIGNER_ROOT"
seed=0
for setting in "$@"; do [[ $setting == seed=* ]] && seed=${setting#seed=}; done
python -m examples.terminal_tasks runs/agent/data --seed "$seed"
python -m aligner run experiment=agent_sft run.resume=never "$@"
python -m aligner run experiment=agent_grpo run.resume=never "$@"
python -m aligner report runs/agent/sft runs/agent/grpo
