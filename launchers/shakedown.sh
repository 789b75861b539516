#!/usr/bin/env bash
#SBATCH --job-name=aligner-shakedown
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --output=aligner-shakedown-%j.log
# Check the GPUs of one node, or with --nodes=2 those of two and their network:
#   sbatch --gpus-per-node=8 launchers/shakedown.sh [FOLDER] [KEY=VALUE ...]
set -euo pipefail
# In a job $0 is a copy in a spool folder, and Slurm knows where it came from.
script="$0"
[[ -n "${ALIGNER_ROOT:-}" || -f "$(dirname "$0")/body.sh" ]] \
    || script="$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(.*/launchers/shakedown\.sh\).*|\1|p' | head -n 1)"
# shellcheck source=launchers/body.sh
source "${ALIGNER_ROOT:-$(dirname "$script")/..}/launchers/body.sh"
aligner_python
exec "$ALIGNER_PYTHON" -m aligner shakedown "$@"
