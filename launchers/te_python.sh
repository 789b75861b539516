#!/usr/bin/env bash
# Gets TransformerEngine's own Python, without its kernels, and flash-linear-attention into .te-python: tests run them over
# a stand-in for those and in Triton's interpreter. No run ever looks there. A second call is instant.
set -euo pipefail

# shellcheck source=launchers/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ALIGNER_ROOT"

folder="$ALIGNER_ROOT/.te-python"
stamp="$folder/aligner.stamp"
wanted="$(sha256sum constraints-te.txt | cut -d' ' -f1)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    exit 0
fi
rm -rf "$folder"
python "${ALIGNER_PIP[@]}" -q --no-deps --target "$folder" -r constraints-te.txt
echo "$wanted" >"$stamp"
