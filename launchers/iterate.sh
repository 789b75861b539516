#!/usr/bin/env bash
# Rounds of sample -> train, each started from the weights of the one before: iterative DPO, RAFT, SPIN (docs/how-to/sample.md).
#   launchers/iterate.sh DIR ROUNDS [SUBMIT OPTION...] [KEY=VALUE...] @sample [KEY=VALUE...] @sft|@dpo|@kto [KEY=VALUE...]
# Words before @sample are for both stages; model.init is the first round's. Runs go to DIR/round-1/sample,
# DIR/round-1/dpo, ...; sft trains on best.jsonl, dpo and kto on pairs.jsonl of their round. {round} in a word is its number.
# With Slurm: jobs that wait for each other. Without: one after another, here. Started again it skips runs with DONE:
#   launchers/iterate.sh runs/spin 3 model.init=runs/sft data.train=chats.jsonl \
#       @sample stage.sample.pairs=answers batch.group=1 @dpo optim.lr=5e-7
set -euo pipefail

ALIGNER_ROOT="${ALIGNER_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
export ALIGNER_ROOT
# shellcheck source=launchers/chain.sh
source "$ALIGNER_ROOT/launchers/chain.sh"

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

[[ $# -ge 4 && "$1" != -* && "$1" != @* && "$2" =~ ^[1-9][0-9]*$ ]] || usage
folder="$1" rounds="$2"
shift 2
common=() sample=() train=() stage=""
for word in "$@"; do
    case "$stage:$word" in
        :@sample) stage=sample ;;
        sample:@sft | sample:@dpo | sample:@kto) stage="${word#@}" ;;
        *:@*) usage ;;
        :*) common+=("$(shared "$word")") ;;
        sample:*) sample+=("$word") ;;
        *) train+=("$word") ;;
    esac
done
[[ "$stage" == @(sft|dpo|kto) && -f "$ALIGNER_ROOT/launchers/$stage.sbatch" ]] || usage
file=pairs.jsonl
[[ "$stage" != sft ]] || file=best.jsonl

# All runs that are not done, each by `$1 NAME STAGE UPSTREAM... OVERRIDE...`.
each_run() {
    local round here words weights="" start=()
    for ((round = 1; round <= rounds; round++)); do
        here="$folder/round-$round"
        start=()
        [[ -z "$weights" ]] || start=(--upstream "$weights" "model.init=$(quoted "$weights")")
        words=(${common[@]+"${common[@]}"} ${start[@]+"${start[@]}"} "stage.sample.round=$round" ${sample[@]+"${sample[@]}"})
        each_one "$1" "round-$round/sample" sample "${words[@]//\{round\}/$round}"
        words=(${common[@]+"${common[@]}"} ${start[@]+"${start[@]}"} --upstream "$here/sample"
            "data.train=$(quoted "$here/sample/sampled/$file")" ${train[@]+"${train[@]}"})
        each_one "$1" "round-$round/$stage" "$stage" "${words[@]//\{round\}/$round}"
        weights="$here/$stage"
    done
}

each_one() {
    [[ ! -f "$folder/$2/DONE" ]] || return 0
    "$1" "$2" "$3" "run.dir=$(quoted "$folder/$2")" "${@:4}"
}

chain each_run "$folder"
