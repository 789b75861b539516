#!/usr/bin/env bash
# The body that all launchers and all scripts of `aligner submit` share. A launcher starts its stage in three ways:
#   sbatch -N 2 --ntasks-per-node=8 launchers/grpo.sbatch KEY=VALUE ...    site: ALIGNER_SITE, or by the cluster's name
#   bash launchers/grpo.sbatch --ranks 2 KEY=VALUE ...                      no scheduler, on this machine
#   python -m aligner submit --nodes 2 stage=grpo KEY=VALUE ...             with the site's flags; see docs/how-to/slurm.md
# Functions that they call:
#   aligner_launcher STAGE [OPTION...] [KEY=VALUE...]   compose and freeze the config, then aligner_job
#   aligner_job                                         run what the ALIGNER_* variables describe (cluster/render.py)
# How a job ends (docs/reference/exit-codes.md): the run folder has DONE -> 0; STOPPED -> requeued, or 75 where nothing requeues;
# exit code 93 of the ranks -> dependants are cancelled; anything else -> triage, and that exit code.

ALIGNER_ROOT="${ALIGNER_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
export ALIGNER_ROOT
ALIGNER_NO_RESTART=93
ALIGNER_TRY_AGAIN=75
ALIGNER_INTERRUPTED=130 # by Ctrl-C
ALIGNER_PORT_TAKEN='EADDRINUSE\|[Aa]ddress already in use'
ALIGNER_PORT_TRIES=5
ALIGNER_SAME_STEP_LIMIT=3 # attempts in a row that may begin at one step

aligner_say() {
    echo "[$(date '+%F %T')] aligner: $*"
}

# An error that the body itself finds; slurm/triage shows the last one until the ranks start again.
aligner_error() {
    [[ ! -d "${ALIGNER_RUN:-}/logs" ]] || echo "$*" >"$ALIGNER_RUN/logs/refused"
    aligner_say "error: $*" >&2
}

aligner_die() {
    aligner_error "$@"
    exit 1
}

# The Python of this shell; ranks may have another one, in a container.
aligner_python() {
    if [[ -z "${ALIGNER_PYTHON:-}" ]]; then
        local threads="${OMP_NUM_THREADS:-}"
        # shellcheck source=launchers/env.sh
        source "$ALIGNER_ROOT/launchers/env.sh"
        [[ -n "$threads" ]] || unset OMP_NUM_THREADS # of one process alone on this node; ranks have their own share
        ALIGNER_PYTHON="$ALIGNER_ROOT/.venv/bin/python"
    fi
    [[ "${PYTHONPATH:-}:" == "$ALIGNER_ROOT:"* ]] || export PYTHONPATH="$ALIGNER_ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

aligner_launcher() {
    local stage="$1" note lines
    shift
    note="${SLURM_SUBMIT_DIR:-$PWD}/runs/.jobs/${SLURM_CLUSTER_NAME:-cluster}-${SLURM_JOB_ID:-0}.sh"
    if [[ "${SLURM_RESTART_COUNT:-0}" == 0 || ! -f "$note" ]]; then
        aligner_python
        lines="$("$ALIGNER_PYTHON" -m aligner submit --shell "stage=$stage" "$@")" || exit $?
        if [[ -n "${SLURM_JOB_ID:-}" ]]; then # a requeued job reads this, not a conf/ that has changed
            mkdir -p "${note%/*}"
            printf '%s\n' "$lines" >"$note"
        fi
    else
        lines="$(<"$note")"
    fi
    eval "$lines"
    aligner_job
}

aligner_job() {
    [[ -z "${ALIGNER_RANK_PYTHON:-}" ]] || ALIGNER_PYTHON="${ALIGNER_PYTHON:-python3}" # ranks have another one
    aligner_python
    [[ -z "${SLURM_JOB_ID:-}" ]] || export SLURM_EXPORT_ENV=ALL # sbatch --export=NONE is about this script, not about srun
    local task="${SLURM_ARRAY_TASK_ID:-0}"
    # shellcheck disable=SC2153  # set by the lines of cluster/render.py
    ((${#ALIGNER_RUNS[@]} > 1)) || task=0 # the user's own array, whose tasks choose their runs themselves
    ALIGNER_RUN="${ALIGNER_RUNS[$task]-}"
    [[ -n "$ALIGNER_RUN" ]] || aligner_die "array task $task: there are ${#ALIGNER_RUNS[@]} runs"
    ALIGNER_JOB="${SLURM_JOB_ID:-local}"
    ALIGNER_ATTEMPT="${SLURM_RESTART_COUNT:-0}"
    ALIGNER_BAD_NODES=()
    mkdir -p "$ALIGNER_RUN/logs"
    aligner_check_upstream
    if [[ -n "${SLURM_JOB_ID:-}" ]]; then
        aligner_check_restarts
    fi
    ALIGNER_RESTARTS=0 # within this allocation
    local code
    while true; do
        ALIGNER_LOGS="$ALIGNER_RUN/logs/$ALIGNER_JOB.$ALIGNER_ATTEMPT"
        ((ALIGNER_RESTARTS == 0)) || ALIGNER_LOGS+="+$ALIGNER_RESTARTS"
        mkdir -p "$ALIGNER_LOGS"
        export ALIGNER_LOGS ALIGNER_ATTEMPT
        [[ -z "${SLURM_JOB_ID:-}" || "$ALIGNER_RESTARTS" != 0 ]] || aligner_check_health
        code=0
        [[ -z "${SLURM_JOB_ID:-}" || -z "${ALIGNER_NODE_LOCAL:-}" ]] || aligner_node_local
        aligner_ranks || code=$?
        aligner_outcome "$code" || code=$?
        # 254: the ranks can start again within this allocation
        ((code == 254)) || exit "$code"
        ALIGNER_RESTARTS=$((ALIGNER_RESTARTS + 1))
    done
}

aligner_check_upstream() {
    local folder
    for folder in ${ALIGNER_UPSTREAM[@]+"${ALIGNER_UPSTREAM[@]}"}; do
        [[ -f "$folder/DONE" ]] || aligner_die "upstream run $folder has not finished: it has no file DONE"
    done
}

# The newest step that a restart would begin from; 0 if there is none.
aligner_step() {
    local step="" name
    if [[ -f "$ALIGNER_RUN/progress.json" ]]; then
        for name in saved step; do
            [[ -n "$step" ]] || step="$(sed -n "s/.*\"$name\": *\([0-9][0-9]*\).*/\1/p" "$ALIGNER_RUN/progress.json" | head -n 1)"
        done
    fi
    if [[ -z "$step" && -d "$ALIGNER_RUN/checkpoints" ]]; then
        step="$(find "$ALIGNER_RUN/checkpoints" -mindepth 1 -maxdepth 1 -name 'step-*' -printf '%f\n' \
            | sed -n 's/^step-0*\([0-9][0-9]*\)$/\1/p' | sort -n | tail -n 1)"
    fi
    echo "${step:-0}"
}

# Append to logs/attempts.tsv, which restarts are checked by and slurm/watch reads.
aligner_record() {
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$ALIGNER_JOB" "$ALIGNER_ATTEMPT" "$(date +%s)" "$(aligner_step)" \
        "${2:--}" "$ALIGNER_RANKS" >>"$ALIGNER_RUN/logs/attempts.tsv"
}

aligner_check_restarts() {
    if ((ALIGNER_ATTEMPT > ALIGNER_MAX_REQUEUES)); then
        aligner_die "requeued $ALIGNER_ATTEMPT times, the limit is $ALIGNER_MAX_REQUEUES (--max-requeues)"
    fi
    local step same=0
    step="$(aligner_step)"
    if [[ -f "$ALIGNER_RUN/logs/attempts.tsv" ]]; then
        same="$(awk -F '\t' -v job="$ALIGNER_JOB" -v step="$step" \
            '$1 == "start" && $2 == job {n = ($5 == step) ? n + 1 : 0} END {print n + 0}' "$ALIGNER_RUN/logs/attempts.tsv")"
    fi
    if ((ALIGNER_ATTEMPT > 0 && same >= ALIGNER_SAME_STEP_LIMIT)); then
        aligner_die "$same attempts in a row began at step $step: no progress"
    fi
}

# In a job of several nodes, name unfit nodes, and continue without them if there are spare ones.
aligner_check_health() {
    local mode="${ALIGNER_HEALTH:-auto}" bad node
    local nodes=$((${SLURM_NNODES:-1} + ${ALIGNER_ENGINE_NODES:-0}))
    [[ "$mode" == 1 || ( "$mode" == auto && "$nodes" -gt 1 ) ]] || return 0
    bad="$(aligner_health)"
    for node in $bad; do
        ALIGNER_BAD_NODES+=("$node")
    done
    aligner_nodes >/dev/null
}

aligner_health() {
    local python="${ALIGNER_PYTHON:-python3}" folder="$ALIGNER_LOGS/health"
    local nodes="${SLURM_NNODES:-1}" engines="${ALIGNER_ENGINE_NODES:-0}"
    local check=(--ntasks-per-node=1 --mpi=none --overlap "$python" -m aligner.cluster.health --check "$folder")
    local start=(srun "--nodes=$nodes" "--ntasks=$nodes" "${check[@]}")
    ((engines == 0)) || start+=(: --het-group=1 "--nodes=$engines" "--ntasks=$engines" "${check[@]}")
    mkdir -p "$folder"
    date +%s >"$folder/token"
    timeout 120 "${start[@]}" >/dev/null 2>"$folder/srun.log" || true
    # shellcheck disable=SC2046  # one word per node
    "$python" -m aligner.cluster.health --collect "$folder" $(aligner_hosts)
}

# All nodes of the job, one per line; those of a heterogeneous job's second component, which has no spare ones, last.
aligner_hosts() {
    scontrol show hostnames "$SLURM_JOB_NODELIST"
    [[ -z "${SLURM_JOB_NODELIST_HET_GROUP_1:-}" ]] || scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1"
}

# The nodes to use, one per line, without those of the second component.
aligner_nodes() {
    local node left=() needed=$((ALIGNER_NODES + ${ALIGNER_ENGINE_NODES:-0}))
    for node in $(aligner_hosts); do
        [[ " ${ALIGNER_BAD_NODES[*]-} " == *" $node "* ]] || left+=("$node")
    done
    ((${#left[@]} >= needed)) || aligner_die "$needed nodes are needed, ${#left[@]} are fit" \
        "(bad: ${ALIGNER_BAD_NODES[*]-}). Submit again with --exclude=$(IFS=, && echo "${ALIGNER_BAD_NODES[*]-}")"
    printf '%s\n' "${left[@]:0:ALIGNER_NODES}"
}

# With the site's `node_local` ranks import from copies on their own node, of the checkout and of the virtual environment.
aligner_node_local() {
    local venv
    venv="$("$ALIGNER_PYTHON" -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")')"
    [[ -n "$venv" ]] || aligner_die "node_local: expected a Python in a virtual environment, got $ALIGNER_PYTHON"
    aligner_copy "$ALIGNER_ROOT" aligner conf slurm launchers
    ALIGNER_LOCAL_ROOT="$ALIGNER_COPY"
    aligner_copy "$venv" .
    ALIGNER_LOCAL_PYTHON="$ALIGNER_COPY/bin/python"
}

# ALIGNER_COPY: the copy of these subfolders on each node. One node reads them and Slurm distributes them. The name is a
# hash of the files' names, sizes and times, by which this and later jobs find an existing copy.
aligner_copy() {
    local from="$1" files nodes start archive
    shift
    files="$(cd "$from" && find "$@" -name __pycache__ -prune -o ! -type d -printf '%p %s %l %T@\n' | LC_ALL=C sort)"
    ALIGNER_COPY="$ALIGNER_NODE_LOCAL/$(sha256sum <<<"$from $files" | cut -c 1-16)-$(wc -l <<<"$files")"
    archive="$ALIGNER_COPY.$SLURM_JOB_ID.tar"
    nodes="$(aligner_nodes | paste -sd ,)"
    start=(srun "--nodes=$ALIGNER_NODES" "--ntasks=$ALIGNER_NODES" --ntasks-per-node=1 "--nodelist=$nodes" --mpi=none
        --overlap --mem=0 --wait=0)
    ! "${start[@]}" "$ALIGNER_ROOT/launchers/unpack.sh" "$ALIGNER_COPY" 2>/dev/null || return 0
    aligner_say "copying $from to $ALIGNER_COPY on $ALIGNER_NODES nodes"
    { "${start[@]}" "$ALIGNER_ROOT/launchers/pack.sh" "$archive" "$from" "$@" \
        && "${start[@]}" "$ALIGNER_ROOT/launchers/unpack.sh" "$ALIGNER_COPY" "$archive"; } \
        || aligner_die "node_local: could not copy $from to $ALIGNER_NODE_LOCAL of each node. Is there room?"
}

# Start the ranks, pass signals on, wait for them; returns their exit code.
aligner_ranks() {
    local frozen="$ALIGNER_RUN/${ALIGNER_CONFIG:-config.yaml}" code # the folder's own, for a job of an earlier version
    rm -f "$ALIGNER_RUN/STOPPED" "$ALIGNER_RUN/logs/refused"
    ALIGNER_STARTED_STEP="$(aligner_step)"
    touch "$ALIGNER_LOGS/started"
    aligner_record start
    aligner_say "$ALIGNER_STAGE in $ALIGNER_RUN: job $ALIGNER_JOB, attempt $ALIGNER_ATTEMPT, step $ALIGNER_STARTED_STEP," \
        "$ALIGNER_RANKS ranks; logs in $ALIGNER_LOGS"
    ALIGNER_CHILD=0 ALIGNER_ASKED="" ALIGNER_ASKING=0
    trap 'aligner_forward USR1' USR1
    trap 'aligner_forward USR2' USR2
    trap 'aligner_forward TERM' TERM
    trap 'ALIGNER_SIGNALLED=1' INT # a terminal sends it to the ranks as well: they save and stop
    if [[ -z "${SLURM_JOB_ID:-}" ]]; then
        aligner_start_here "$frozen"
    else
        aligner_start_slurm "$frozen"
    fi
    ALIGNER_CHILD=$!
    [[ -z "$ALIGNER_ASKED" ]] || aligner_ask
    local last=127
    while true; do
        ALIGNER_SIGNALLED=0
        code=0
        wait "$ALIGNER_CHILD" || code=$?
        ((code != 127)) || code=$last # it was waited for already, as a signal came at the very end
        last=$code
        ((ALIGNER_SIGNALLED)) || break
    done
    trap - USR1 USR2 TERM INT
    ((ALIGNER_ASKING == 0)) || kill "$ALIGNER_ASKING" 2>/dev/null || true
    return "$code"
}

# srun ends the step at once when it gets TERM, so ranks get USR1 instead: save, stop, write STOPPED.
aligner_forward() {
    ALIGNER_SIGNALLED=1
    ALIGNER_ASKED="${ALIGNER_SIGNAL:-USR1}"
    [[ -n "${SLURM_JOB_ID:-}" ]] || ALIGNER_ASKED="$1"
    aligner_say "got $1, asking the ranks to save and stop"
    ((ALIGNER_CHILD == 0)) || aligner_ask
}

# Asks until the child has ended: ranks that are still starting ignore it.
aligner_ask() {
    ((ALIGNER_ASKING == 0)) || return 0
    while kill -0 "$ALIGNER_CHILD"; do
        ! aligner_survives "$ALIGNER_CHILD" "$ALIGNER_ASKED" || kill "-$ALIGNER_ASKED" "$ALIGNER_CHILD"
        sleep "${ALIGNER_ASK_AGAIN_S:-5}"
    done >/dev/null 2>&1 &
    ALIGNER_ASKING=$!
}

# Return whether the process blocks, ignores or catches the signal: one that is still starting would end.
aligner_survives() {
    local number mask
    number="$(kill -l "$2")"
    while read -r mask; do
        ! (((16#$mask >> (number - 1)) & 1)) || return 0
    done < <(sed -n 's/^Sig\(Blk\|Ign\|Cgt\):\t//p' "/proc/$1/status")
    return 1
}

aligner_start_here() {
    (trap '' USR1 USR2 TERM && exec "$ALIGNER_PYTHON" -m aligner launch --ranks "$ALIGNER_RANKS" --frozen "$1") &
}

aligner_start_slurm() {
    local nodes command
    mapfile -t nodes < <(aligner_nodes)
    ((${#nodes[@]} == ALIGNER_NODES)) || exit 1
    aligner_rendezvous "${nodes[0]}"
    aligner_deadline
    export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK_HET_GROUP_0:-1}}"
    command=("${ALIGNER_RANK_PYTHON:-$ALIGNER_PYTHON}" -m aligner run --frozen "$1")
    local root="${ALIGNER_LOCAL_ROOT:-$ALIGNER_ROOT}" path="$PYTHONPATH"
    if [[ -n "${ALIGNER_LOCAL_PYTHON:-}" ]]; then # this folder, which may be the checkout, behind the copy
        command=("$ALIGNER_LOCAL_PYTHON" -P -m aligner run --frozen "$1")
        path="$root${PYTHONPATH#"$ALIGNER_ROOT"}:$PWD"
    fi
    # of both components, where there are two; some ranks wait for late engines and for their processes when others left
    local options=(--kill-on-bad-exit=1 --wait=180)
    ((ALIGNER_RESTARTS == 0)) || options+=(--overlap --mem=0) # Slurm still counts the dead step's cores and memory
    if [[ "${ALIGNER_CONTAINER[0]:-}" == apptainer ]]; then
        command=("${ALIGNER_CONTAINER[@]}" "${command[@]}")
    else
        options+=(${ALIGNER_CONTAINER[@]+"${ALIGNER_CONTAINER[@]}"})
    fi
    command=("$root/launchers/rank.sh" "${command[@]}")
    # shellcheck disable=SC2153  # set by the lines of cluster/render.py
    local start=(srun "--nodes=$ALIGNER_NODES" "--ntasks=$((ALIGNER_NODES * ALIGNER_RANKS_PER_NODE))"
        "--ntasks-per-node=$ALIGNER_RANKS_PER_NODE" ${ALIGNER_SRUN[@]+"${ALIGNER_SRUN[@]}"})
    ((ALIGNER_NODES == ${SLURM_NNODES:-1})) || start+=("--nodelist=$(IFS=, && echo "${nodes[*]}")")
    if [[ "$ALIGNER_MPI" == mpirun ]]; then
        aligner_mpirun "${nodes[@]}"
        start=("${ALIGNER_MPIRUN[@]}" "${command[@]}")
    elif ((${ALIGNER_ENGINE_NODES:-0})); then
        aligner_engines
        options+=(${ALIGNER_HET[@]+"${ALIGNER_HET[@]}"})
        start+=("${options[@]}" "${command[@]}" : "${ALIGNER_ENGINES[@]}" "${options[@]}" "${command[@]}")
    else
        start+=("${options[@]}" "${command[@]}")
    fi
    # by it ranks verify that they belong to this start; mpirun may not pass it on: then they share a file
    local secret="${ALIGNER_SECRET:-}"
    [[ -n "$secret" || "$ALIGNER_MPI" == mpirun ]] || secret="$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')"
    PYTHONPATH="$path" ALIGNER_SECRET="$secret" "${start[@]}" 2> >(tee "$ALIGNER_LOGS/srun.log" >&2) &
}

# Flags of srun for a heterogeneous job's second component: both are one step, whose ranks are numbered consecutively.
aligner_engines() {
    local tasks=$((ALIGNER_ENGINE_NODES * ALIGNER_ENGINE_RANKS_PER_NODE)) version
    echo $((ALIGNER_NODES * ALIGNER_RANKS_PER_NODE)) >"$ALIGNER_LOGS/trainers" # triage needs it to turn srun's tasks into ranks
    # SRUN_CPUS_PER_TASK is of the first component
    ALIGNER_ENGINES=(--het-group=1 "--nodes=$ALIGNER_ENGINE_NODES" "--ntasks=$tasks"
        "--ntasks-per-node=$ALIGNER_ENGINE_RANKS_PER_NODE" "--cpus-per-task=${SLURM_CPUS_PER_TASK_HET_GROUP_1:-1}"
        ${ALIGNER_ENGINE_SRUN[@]+"${ALIGNER_ENGINE_SRUN[@]}"})
    ALIGNER_HET=()
    version="$(srun --version)"
    if [[ "$ALIGNER_MPI" == pmix && "$(printf '24.11\n%s\n' "${version##* }" | sort -V | head -n 1)" != 24.11 ]]; then
        aligner_say "no MPI: srun's PMIx before Slurm 24.11 may wait for ever at the end of a heterogeneous step"
        export ALIGNER_MPI=none
        ALIGNER_HET=(--mpi=none)
    fi
}

aligner_mpirun() {
    ALIGNER_MPIRUN=(mpirun -n "$ALIGNER_RANKS")
    local hosts
    if mpirun --version 2>&1 | grep -q 'Open MPI'; then
        hosts="$(printf "%s:$ALIGNER_RANKS_PER_NODE," "$@")"
        ALIGNER_MPIRUN+=(--host "${hosts%,}" --map-by "ppr:$ALIGNER_RANKS_PER_NODE:node" --bind-to none)
    else # MPICH and its derivatives
        ALIGNER_MPIRUN+=(-ppn "$ALIGNER_RANKS_PER_NODE" -hosts "$(IFS=, && echo "$*")")
    fi
}

# The rendezvous address of the ranks. The port is below the ephemeral range. The hash of the attempt's folder gives other
# jobs and attempts on the host other ports.
aligner_rendezvous() {
    MASTER_ADDR="$1"
    if [[ "$ALIGNER_RENDEZVOUS" == address ]]; then
        MASTER_ADDR="$(scontrol show node -o "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')"
    fi
    MASTER_PORT=$((20000 + $(cksum <<<"$ALIGNER_LOGS" | cut -d ' ' -f 1) % 10000))
    export MASTER_ADDR MASTER_PORT
}

# Newer versions of Slurm set SLURM_JOB_END_TIME; the run plans its last checkpoint by it.
aligner_deadline() {
    [[ -z "${SLURM_JOB_END_TIME:-}" ]] || return 0
    local end
    end="$(squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null | sort | head -n 1)" || return 0 # a line for each component
    [[ "$end" == [0-9]* ]] || return 0
    SLURM_JOB_END_TIME="$(date -d "$end" +%s)"
    export SLURM_JOB_END_TIME
}

# Act on the ranks' exit code and files. Returns the script's exit code, or does not return.
aligner_outcome() {
    local code="$1"
    ((code == 0)) || code="$(aligner_meant "$code")"
    if ((code == 0)) && [[ "$ALIGNER_RUN/DONE" -nt "$ALIGNER_LOGS/started" ]]; then
        aligner_record end finished
        aligner_say "done: $ALIGNER_RUN"
        return 0
    fi
    if ((code == 0 || code == ALIGNER_INTERRUPTED)) && [[ -f "$ALIGNER_RUN/STOPPED" ]]; then
        aligner_record end stopped
        aligner_stopped
        return $?
    fi
    if ((code == ALIGNER_NO_RESTART)); then
        aligner_record end refused
        aligner_say "the run reports that a restart cannot help; cancelling the jobs that depend on this one" >&2
        aligner_cancel_dependants
        [[ -z "${SLURM_JOB_ID:-}" ]] || aligner_triage || true # the cause is the last line
        return "$code"
    fi
    if ((code == 0)); then
        aligner_error "the ranks ended well, but neither DONE nor STOPPED is in $ALIGNER_RUN"
        code=1
    fi
    aligner_failed "$code"
}

aligner_stopped() {
    local step
    step="$(aligner_step)"
    aligner_say "stopped at step $step"
    if [[ -z "${SLURM_JOB_ID:-}" ]]; then
        aligner_say "the same command resumes from there"
        return "$ALIGNER_TRY_AGAIN"
    fi
    if ((step <= ALIGNER_STARTED_STEP)); then
        aligner_error "no progress: the attempt began at step $ALIGNER_STARTED_STEP. Is the time limit long" \
            "enough for a step and a checkpoint?"
        return 1
    fi
    aligner_requeue
}

aligner_requeue() {
    local state
    if ((ALIGNER_ATTEMPT >= ALIGNER_MAX_REQUEUES)); then
        aligner_error "requeued $ALIGNER_ATTEMPT times, the limit is $ALIGNER_MAX_REQUEUES (--max-requeues)"
        return 1
    fi
    state="$(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null | sort -u | paste -sd +)" || state=unknown # of all components
    if [[ "$state" != RUNNING ]]; then # cancelled or preempted: not ours to decide
        aligner_say "the job is $state: leaving it to Slurm"
        return 0
    fi
    aligner_say "requeueing job $SLURM_JOB_ID"
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        aligner_say "this job may not be requeued; submit it again to resume" >&2
        return "$ALIGNER_TRY_AGAIN"
    fi
    sleep 120 & # Slurm ends this script
    wait $!
    return "$ALIGNER_TRY_AGAIN"
}

# Find why the ranks failed. If no rank knows, a node may be gone: Slurm would only notice after SlurmdTimeout.
aligner_failed() {
    local code="$1" dead
    if [[ -z "${SLURM_JOB_ID:-}" ]]; then
        aligner_record end failed
        return "$code"
    fi
    if ((ALIGNER_RESTARTS < ALIGNER_PORT_TRIES)) && grep -qs "$ALIGNER_PORT_TAKEN" "$ALIGNER_LOGS"/failure-*.json; then
        aligner_record end port
        aligner_say "port $MASTER_PORT of $MASTER_ADDR was taken: starting again with another one" >&2
        return 254
    fi
    if aligner_triage; then
        aligner_record end failed
        return "$code"
    fi
    dead="$(aligner_dead_nodes)"
    if [[ -z "$dead" ]] && grep -q 'launch failed\|aborted before step completely launched' "$ALIGNER_LOGS/srun.log"; then
        aligner_record end node
        aligner_say "Slurm could not start the ranks" >&2
        aligner_requeue
        return $?
    fi
    if [[ -z "$dead" ]]; then
        aligner_record end failed
        return "$code"
    fi
    aligner_record end node
    aligner_say "dead: $dead" >&2
    # shellcheck disable=SC2206  # one word per node
    ALIGNER_BAD_NODES+=($dead)
    if ((ALIGNER_SPARE >= ${#ALIGNER_BAD_NODES[@]})); then
        aligner_say "starting again on the nodes that are left, without ${ALIGNER_BAD_NODES[*]}"
        return 254
    fi
    aligner_requeue
}

# Print the own exit code of the rank that failed first. srun returns the largest code, and 143 for ranks that it ends.
aligner_meant() {
    if [[ -z "${SLURM_JOB_ID:-}" ]] \
        || ! "${ALIGNER_PYTHON:-python3}" -m aligner.cluster.triage --exit-code "$1" "$ALIGNER_LOGS" 2>/dev/null; then
        echo "$1"
    fi
}

# Exit code 0 if a cause was found in the logs.
aligner_triage() {
    "${ALIGNER_PYTHON:-python3}" -m aligner.cluster.triage "$ALIGNER_LOGS" >&2
}

# Print the node that srun reports as failed; if it reports none, the nodes that do not answer.
aligner_dead_nodes() {
    local node failed engines=" " group=()
    failed="$(sed -n 's/.*Node failure on \([^ ]*\).*/\1/p' "$ALIGNER_LOGS/srun.log" | sort -u | tr '\n' ' ')"
    if [[ -n "$failed" ]]; then
        echo "$failed"
        return 0
    fi
    [[ -z "${SLURM_JOB_NODELIST_HET_GROUP_1:-}" ]] \
        || engines=" $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1" | tr '\n' ' ')"
    for node in $(aligner_hosts); do
        [[ " ${ALIGNER_BAD_NODES[*]-} " != *" $node "* ]] || continue
        [[ "$engines" != *" $node "* ]] || group=(--het-group=1)
        (timeout 30 srun ${group[@]+"${group[@]}"} --overlap --mem=0 --mpi=none --nodes=1 --ntasks=1 "--nodelist=$node" true \
            >/dev/null 2>&1 || echo "$node") &
    done | tr '\n' ' '
    wait
}

# Cancel jobs that wait for this one to end well, and those that wait for them. --kill-on-invalid-dep would do so later.
aligner_cancel_dependants() {
    [[ -n "${SLURM_JOB_ID:-}" ]] || return 0
    local jobs=" $SLURM_JOB_ID ${SLURM_ARRAY_JOB_ID:-} " id after changed=1 parent
    while ((changed)); do
        changed=0
        while IFS='|' read -r id after; do
            [[ " $jobs " != *" $id "* ]] || continue
            for parent in $jobs; do
                if [[ "$after" =~ afterok:([^,?]*[:,])?${parent}([^0-9]|$) ]]; then
                    jobs+="$id "
                    changed=1
                    aligner_say "cancelling job $id"
                    scancel "$id" || true
                    break
                fi
            done
        done < <(squeue -h -t PENDING -o '%A|%E')
    done
}
