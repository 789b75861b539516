#!/usr/bin/env bash
# Makes the environment of an engine that cannot live in the trainer's: ./launchers/engine_env.sh vllm
# It is .venv-vllm, which uses torch and other fitting packages of .venv. A second call is instant.
# vLLM's build for CPUs asks for a torch that PyPI does not have, hence exact versions without resolving. On a machine
# with NVIDIA GPUs its own wheel is taken, with the pins of constraints-vllm-gpu.txt (resolved, not run on a GPU yet);
# where .venv has another torch than the one pinned there, the environment gets its own and shares nothing.
set -euo pipefail

if [[ "${1:-}" != vllm || $# != 1 ]]; then
    echo "usage: ${BASH_SOURCE[0]} vllm" >&2
    exit 2
fi
# shellcheck source=launchers/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ALIGNER_ROOT"

venv="$ALIGNER_ROOT/.venv-vllm"
pinned="$ALIGNER_ROOT/constraints-vllm.txt"
packages=(--no-deps -r "$pinned")
shared=yes
if command -v nvidia-smi >/dev/null; then
    pinned="$ALIGNER_ROOT/constraints-vllm-gpu.txt"
    packages=(-c "$pinned" "$(grep '^vllm==' "$pinned")" "$(grep '^torch==' "$pinned")")
    trainers="torch==$(python -c 'import importlib.metadata as m; print(m.version("torch").partition("+")[0])')"
    if ! grep -qx "$trainers" "$pinned"; then
        shared=no
        echo "vLLM asks for another torch than the trainer's $trainers: $venv gets its own"
    fi
fi
stamp="$venv/aligner.stamp"
wanted="$( (cat "$pinned" constraints.txt; echo "$venv" "$shared" "${packages[@]}") | sha256sum | cut -d' ' -f1)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    exit 0
fi
echo "installing vLLM into $venv (minutes, and 1.5 GB without a GPU)"
python -m venv --clear "$venv"
site="$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
if [[ "$shared" == yes ]]; then
    python -c 'import site; print(site.getsitepackages()[0])' >"$site/aligner-shared.pth"
fi
"$venv/bin/python" "${ALIGNER_PIP[@]}" -q "${packages[@]}"
echo "$wanted" >"$stamp"
