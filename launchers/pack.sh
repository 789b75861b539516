#!/usr/bin/env bash
# On the first node of a step: the ARCHIVE of these PARTS of FOLDER, handed to all nodes of the step.
#   pack.sh ARCHIVE FOLDER PART...
set -euo pipefail
((SLURM_PROCID == 0)) || exit 0
archive="$1" from="$2" own="$1.all"
shift 2
trap 'rm -f "$own"' EXIT
# u+w: copies of what is read-only here can be removed; 1: a file changed as it was read, as another job compiled it
tar --mode=u+w -cf "$own" -C "$from" "$@" || (($? == 1))
sbcast --force --jobid="$SLURM_JOB_ID.$SLURM_STEP_ID" "$own" "$archive" # not to the job's spare nodes, which may be unfit
