#!/usr/bin/env bash
# The start of every rank of a batch job: its log, its caches, its failure note; then the command itself.
set -euo pipefail

rank="${SLURM_PROCID:-0}"
if [[ "${ALIGNER_MPI:-none}" == mpirun ]]; then # inside mpirun srun's number is the one of mpirun's daemon
    rank="${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}"
fi
name="$(printf 'rank-%04d' "$rank")"
exec >>"$ALIGNER_LOGS/$name.log" 2>&1
echo "[$name on ${SLURMD_NODENAME:-$(hostname)}, pid $$, $(date '+%F %T')]"
export ALIGNER_FAILURE_FILE="$ALIGNER_LOGS/failure-${name#rank-}.json"
if [[ -n "${ALIGNER_SCRATCH:-}" ]]; then # compilers lock their caches, which shared file systems are bad at
    export TRITON_CACHE_DIR="$ALIGNER_SCRATCH/triton" TORCHINDUCTOR_CACHE_DIR="$ALIGNER_SCRATCH/inductor"
    mkdir -p "$TRITON_CACHE_DIR" "$TORCHINDUCTOR_CACHE_DIR"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}" # the two components of a job may differ
trap '' USR1 USR2 # until Python listens (launchers/body.sh asks again); exec keeps ignored signals ignored
exec "$@"
