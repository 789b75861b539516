#!/usr/bin/env bash
# Functions that pipeline.sh and iterate.sh share: runs one after another. With Slurm jobs that wait for each other (afterok, and each
# checks its upstream's DONE file), without it here. Sourced with ALIGNER_ROOT set.

# shellcheck source=launchers/body.sh
source "$ALIGNER_ROOT/launchers/body.sh"

# A path as a quoted string of Hydra's grammar, as aligner.config.resolve.quoted makes it.
quoted() {
    printf '"%s"' "$(printf %s "$1" | sed -zE 's/\\+$/&&/; s/(\\*)"/\1\1\\"/g; s/(\\*)\$\{/\1\1\\${/g')"
}

# An override for several stages, some of which may not read it. Other words go to `submit` unchanged.
shared() {
    if [[ "$1" =~ ^\+{0,2}[A-Za-z_][A-Za-z0-9_./]*= ]]; then printf '?'; fi
    printf '%s' "$1"
}

# `chain EACH FOLDER`: EACH calls `$1 NAME STAGE [--upstream RUN]... OVERRIDE...` for every run, in FOLDER/NAME.
chain() {
    chain_folder="$2" chain_before=""
    aligner_python
    "$1" chain_check # a mistake in the last run shows before the first one starts
    if command -v sbatch >/dev/null; then
        "$1" chain_submit
        echo "watch them: slurm/watch $chain_folder"
    else
        "$1" chain_here
    fi
}

chain_check() {
    "$ALIGNER_PYTHON" -m aligner submit --dry-run "stage=$2" "${@:3}" >/dev/null
}

chain_here() {
    bash "$ALIGNER_ROOT/launchers/$2.sbatch" "${@:3}"
}

chain_submit() {
    chain_before="$("$ALIGNER_PYTHON" -m aligner submit --parsable ${chain_before:+--after "$chain_before"} "stage=$2" "${@:3}")"
    echo "$1: job $chain_before, $chain_folder/$1"
}
