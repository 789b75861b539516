#!/usr/bin/env bash
# A chain of stages, each started when the one before has finished. With Slurm: jobs that wait for each other (afterok,
# and each checks its upstream's DONE file). Without: one after another, here.
#   launchers/pipeline.sh DIR [SUBMIT OPTION...] [KEY=VALUE...] @sft [KEY=VALUE...] @rm|@dpo|@kto|@distill [...] \
#       @online_dpo|@grpo|@ppo [...]
# Words before the first @stage are for all stages that read them. Runs go to DIR/sft, DIR/rm, ...; the others start from the
# weights of sft, or of the last of dpo, kto and distill; the last three take the reward model of rm, if there is one:
#   launchers/pipeline.sh runs/chain --nodes 2 @sft model.init=models/qwen3 data.train=chats.jsonl @rm data.train=pairs.jsonl \
#       @ppo data.train=prompts.jsonl
set -euo pipefail

ALIGNER_ROOT="${ALIGNER_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
export ALIGNER_ROOT
# shellcheck source=launchers/chain.sh
source "$ALIGNER_ROOT/launchers/chain.sh"

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

[[ $# -ge 2 && "$1" != -* && "$1" != @* ]] || usage
folder="$1"
shift
common=() stages=()
declare -A count # overrides per stage, kept in one list
own=()
for word in "$@"; do
    case "$word" in
        @sft | @rm | @dpo | @kto | @distill | @online_dpo | @grpo | @ppo)
            stages+=("${word#@}")
            count[${word#@}]=0
            ;;
        @*) usage ;;
        *)
            if ((${#stages[@]} == 0)); then
                common+=("$(shared "$word")")
            else
                own+=("$word")
                count[${stages[-1]}]=$((${count[${stages[-1]}]} + 1))
            fi
            ;;
    esac
done
((${#stages[@]})) || usage

# All stages, each by `$1 NAME STAGE UPSTREAM... OVERRIDE...`.
each_stage() {
    local first=0 weights="" rm="" stage run words upstream
    for stage in "${stages[@]}"; do
        run="$folder/$stage"
        words=(${common[@]+"${common[@]}"} "run.dir=$(quoted "$run")") upstream=()
        if [[ -n "$weights" ]]; then
            words+=("model.init=$(quoted "$weights")")
            upstream+=(--upstream "$weights")
        fi
        if [[ -n "$rm" && "$stage" == @(online_dpo|grpo|ppo) ]]; then
            words+=("reward.model=$(quoted "$rm")")
            upstream+=(--upstream "$rm")
            [[ "$stage" != ppo ]] || words+=("critic.init=$(quoted "$rm")")
        fi
        words+=(${own[@]+"${own[@]:first:${count[$stage]}}"})
        first=$((first + ${count[$stage]}))
        "$1" "$stage" "$stage" ${upstream[@]+"${upstream[@]}"} "${words[@]}"
        case "$stage" in
            sft | dpo | kto | distill) weights="$run" ;;
            rm) rm="$run" ;;
            *) ;;
        esac
    done
}

chain each_stage "$folder"
