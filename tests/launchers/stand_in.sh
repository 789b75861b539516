#!/usr/bin/env bash
# Stands in for Python in the launchers: ranks "train" by counting (stand_in.py); all else goes to the real Python.
here="$(dirname "${BASH_SOURCE[0]}")"
python="${REAL_PYTHON:-$here/../../.venv/bin/python}" # a job without an environment has no other
case "$*" in
    *"-m aligner run "* | *"-m aligner launch "*) exec "$python" -S -E "$here/stand_in.py" "$@" ;;
    *) exec "$python" "$@" ;;
esac
