#!/usr/bin/env bash
# Build the documentation into site/: open site/index.html in a browser, no server and no network needed.
# Writes the generated pages of docs/reference/ first. Other arguments go to `mkdocs build`.
set -euo pipefail

export ALIGNER_EXTRAS=docs
# shellcheck source=launchers/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ALIGNER_ROOT"

python -m tests.reference_pages
NO_MKDOCS_2_WARNING=1 mkdocs build --strict "$@"
