#!/usr/bin/env bash
# Gets packages for tests into folders where no run ever looks. A second call is instant.
#   .te-python        TransformerEngine's own Python, without its kernels, and flash-linear-attention: tests run them over
#                     a stand-in for those and in Triton's interpreter
#   .trackers-python  packages of trackers, which want other versions of what .venv has
set -euo pipefail

# shellcheck source=launchers/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ALIGNER_ROOT"

for name in te trackers; do
    folder="$ALIGNER_ROOT/.$name-python"
    stamp="$folder/aligner.stamp"
    wanted="$(sha256sum "constraints-$name.txt" | cut -d' ' -f1)"
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        continue
    fi
    rm -rf "$folder"
    python "${ALIGNER_PIP[@]}" -q --no-deps --target "$folder" -r "constraints-$name.txt"
    echo "$wanted" >"$stamp"
done
