#!/usr/bin/env bash
# Stands in for Python in the launchers: "trains" by counting to $STEPS, with the files and exit codes of a real run.
# Everything but `aligner run` and `aligner launch` goes to the real Python.
set -u
case "$*" in
    *"-m aligner run "*) rank="${SLURM_PROCID:-0}" ;;
    *"-m aligner launch "*) rank=0 ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
if [[ -z "${LISTENS:-}" ]]; then # bash cannot trap what was ignored when it began
    touch "$(dirname "${*: -1}")/started"
    sleep "${LISTEN_AFTER_S:-0}"
    LISTENS=1 exec env --default-signal=USR1,TERM,INT "$0" "$@"
fi
run="$(dirname "${*: -1}")"
echo "rank $rank of ${ALIGNER_RANKS:-} attempt ${ALIGNER_ATTEMPT:-} node ${SLURMD_NODENAME:-} master ${MASTER_ADDR:-}"
printf '%s\0' "$@" >"$run/argv.$rank"
stop=0
trap 'stop=1' USR1 TERM INT
step=0
[[ ! -f "$run/progress.json" ]] || step="$(sed 's/[^0-9]//g' "$run/progress.json")"
[[ "$rank" != 0 ]] || rm -f "$run/DONE"
first=$step
here="$run/pid.${SLURMD_NODENAME:-here}"
echo $$ >"$here.$rank" && mv "$here.$rank" "$here"
while ((step < ${STEPS:-3})); do
    sleep "${STEP_S:-0.1}"
    step=$((step + 1))
    if [[ "$rank" == 0 && -z "${STUCK:-}" ]]; then
        echo "{\"step\": $step}" >"$here.step" && mv "$here.step" "$run/progress.json"
    fi
    if [[ -n "${FAIL_ON:-}" && ("${SLURMD_NODENAME:-}" == "$FAIL_ON" || "rank$rank" == "$FAIL_ON") ]]; then
        echo "{\"time_s\": 1, \"text\": \"error: as asked\", \"exit_code\": ${CODE:-1}}" >"$ALIGNER_FAILURE_FILE"
        exit "${CODE:-1}"
    fi
    # as a collective does when a peer is gone; not in a restart, which may have no such peer
    if [[ -n "${PEER:-}" && "${ALIGNER_LOGS:-}" == *.0 && -f "$run/pid.$PEER" ]] && ! kill -0 "$(<"$run/pid.$PEER")" 2>/dev/null; then
        printf 'Traceback (most recent call last):\n  File "x"\nRuntimeError: [gloo/x] Connection closed by peer\n'
        exit 1
    fi
    [[ -z "${STOP_AFTER:-}" ]] || ((step - first < STOP_AFTER)) || stop=1
    if ((stop)); then
        [[ "$rank" != 0 ]] || touch "$run/STOPPED"
        exit 0
    fi
done
[[ -z "${CODE:-}" ]] || exit "$CODE"
[[ "$rank" != 0 ]] || touch "$run/DONE"
