#!/usr/bin/env bash
# Sourced by the launchers: finds Python 3.12, makes .venv, installs the pinned set once, activates it.
# ALIGNER_EXTRAS=dev installs that extra as well. A second call is instant: .venv/aligner.stamp holds the hash of what was
# installed, and its extras.
set -euo pipefail

ALIGNER_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export ALIGNER_ROOT

_aligner_is_312() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

_aligner_find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        if _aligner_is_312 "$PYTHON"; then
            command -v "$PYTHON"
            return
        fi
        echo "error: PYTHON=$PYTHON: expected a Python 3.12 with the venv module" >&2
        return 1
    fi
    local candidate
    for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 /usr/local/bin/python3.12 python3; do
        if _aligner_is_312 "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    cat >&2 <<'TEXT'
error: no Python 3.12 found (looked for python3.12, pyenv's 3.12 versions and python3).
Install one of:  apt install python3.12 python3.12-venv  |  pyenv install 3.12  |  uv python install 3.12
or name it:      PYTHON=/path/to/python3.12
TEXT
    return 1
}

ALIGNER_PIP=(-m pip install --disable-pip-version-check)
# pip would compile all modules, a minute; Python compiles those that are imported, and keeps them where it may
[[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]] || ALIGNER_PIP+=(--no-compile)

_aligner_install() {
    local venv="$ALIGNER_ROOT/.venv" extras="${ALIGNER_EXTRAS:-}" stamp wanted has python
    stamp="$venv/aligner.stamp"
    # The place counts too: an editable installation points at this folder.
    wanted="$( (cat "$ALIGNER_ROOT/setup.py" "$ALIGNER_ROOT/constraints.txt"; echo "$ALIGNER_ROOT") | sha256sum | cut -d' ' -f1)"
    has="$(cat "$stamp" 2>/dev/null || true)"
    if [[ -x "$venv/bin/python" && ("$has" == "$wanted" || "$has" == "$wanted "*) ]]; then
        [[ -n "$extras" && " $has " != *" $extras "* ]] || return 0
        wanted="$has"
    fi
    if ! { [[ -x "$venv/bin/python" ]] && _aligner_is_312 "$venv/bin/python"; }; then
        python="$(_aligner_find_python)" || return 1
        echo "making $venv with $python"
        "$python" -m venv --clear "$venv"
    fi
    echo "installing aligner and its pinned dependencies into $venv (the first time takes minutes and about 6 GB)"
    "$venv/bin/python" "${ALIGNER_PIP[@]}" \
        -c "$ALIGNER_ROOT/constraints.txt" -e "$ALIGNER_ROOT${extras:+[$extras]}" || {
        echo "error: the installation failed; see the messages of pip above" >&2
        return 1
    }
    echo "$wanted${extras:+ $extras}" >"$stamp"
}

_aligner_install
export VIRTUAL_ENV="$ALIGNER_ROOT/.venv"
export PATH="$VIRTUAL_ENV/bin:$PATH"
# Ranks get their share from `aligner launch`; one process takes the cores it may use, up to the point where small
# models stop gaining.
if [[ -z "${OMP_NUM_THREADS:-}" ]]; then
    _aligner_cores="$(nproc)"
    export OMP_NUM_THREADS=$((_aligner_cores > 8 ? 8 : _aligner_cores))
fi
