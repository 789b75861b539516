#!/usr/bin/env bash
# Lint, format check and tests. Tests that need what this machine lacks are skipped and listed at the end.
#   --fast   leaves out the tests marked slow, and most cases of those marked few
#   --all    installs Slurm, MPI, Chromium, a C compiler, bubblewrap and squashfs-tools with apt-get, Muon, reasoning-gym,
#            lm-eval, Inspect, vLLM into .venv-vllm, the Python of kernels into .te-python and trackers into
#            .trackers-python if they are missing, and fails where a test is skipped for lack of them
#   ROOM     the tests of a folder of tests/: rollout, engines/native, ...
# Other arguments go to pytest. Without any, workers share the files: as many as there are cores, at most 4, and one more for
# the slow tests.
set -euo pipefail

install_packages() {
    local sudo=() folder program missing=0
    [[ "$(id -u)" == 0 ]] || sudo=(sudo -n)
    for program in slurmctld slurmd sbatch munged mpirun chromium cc bwrap mksquashfs; do
        command -v "$program" >/dev/null || missing=1
    done
    if ((missing)); then
        command -v apt-get >/dev/null || { echo "error: --all needs apt-get, or Slurm, MPI, Chromium, a C compiler, bubblewrap and squashfs-tools installed" >&2; exit 1; }
        "${sudo[@]}" apt-get update -qq
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            slurmctld slurmd slurm-client munge libpmix2 openmpi-bin chromium gcc libc6-dev bubblewrap squashfs-tools
    fi
    for folder in /usr/lib/*/pmix2/lib; do # the name that Slurm's plugin loads
        if [[ -e "$folder/libpmix.so.2" && ! -e "$folder/libpmix.so" ]]; then
            "${sudo[@]}" ln -s libpmix.so.2 "$folder/libpmix.so"
        fi
    done
}

export PATH="$PATH:/usr/sbin:/sbin"
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes, each of which would compile all modules again
# Large pages for what Python and C allocate. With small ones, importing torch takes two to three times as long on some
# virtual machines, and the tests import it in hundreds of processes.
export PYTHONMALLOC=malloc GLIBC_TUNABLES=glibc.malloc.hugetlb=1
export ALIGNER_EXTRAS=dev
if [[ " $* " == *" --all "* ]]; then
    trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
    install_packages & # beside pip, which takes one core
    packages=$!
    ALIGNER_EXTRAS=dev,muon,reasoning-gym,suites # all at once: vLLM's installation below reads what .venv holds
fi
threads="${OMP_NUM_THREADS:-}" # before env.sh gives a process all cores
# shellcheck source=launchers/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ALIGNER_ROOT"

arguments=()
cores=$(env -u OMP_NUM_THREADS nproc) # nproc would else count only OMP_NUM_THREADS
workers=$cores
((workers <= 4)) || workers=4
waiting=1
for argument in "$@"; do
    case "$argument" in
        --fast)
            arguments+=(-m "not slow")
            waiting=0
            ;;
        --all)
            "$ALIGNER_ROOT/launchers/engine_env.sh" vllm &
            engine=$!
            "$ALIGNER_ROOT/launchers/te_python.sh"
            wait "$engine"
            wait "$packages"
            export ALIGNER_TEST_ALL=1
            ;;
        *)
            [[ ! -d "tests/$argument" ]] || argument="tests/$argument"
            arguments+=("$argument")
            workers=1
            ;;
    esac
done

if ((workers > 1)); then
    workers=$((workers + waiting)) # slow tests spend half of their time waiting for other processes
    arguments+=(-n "$workers" --dist loadfile --no-loadscope-reorder)
    each=$((cores / workers))
    export OMP_NUM_THREADS="${threads:-$((each > 0 ? each : 1))}"
fi

# tests write many small files, which takes longer on a disk than the rest of their work
if [[ -z "${PYTEST_DEBUG_TEMPROOT:-}" && "$(df -m --output=avail /dev/shm 2>/dev/null | tail -n 1)" -ge 8192 ]]; then
    export PYTEST_DEBUG_TEMPROOT=/dev/shm
fi

ruff check .
ruff format --check .
python -m pytest --durations=40 -rs ${arguments[@]+"${arguments[@]}"}
