#!/usr/bin/env bash
# On each node: check that the copy FOLDER exists, or make it from ARCHIVE. It is complete or missing, also if others
# unpack it. Its name ends with the number of its files, as cleaners of /tmp remove those that were not opened for days.
#   unpack.sh FOLDER [ARCHIVE]
set -euo pipefail
folder="$1" archive="${2:-}" home="$(dirname "$1")"
(umask 077 && mkdir -p "$home")
# whoever may write there could change the code that ranks execute
if [[ ! -O "$home" || -L "$home" || -n "$(find "$home" -maxdepth 0 -perm -o+w)" ]]; then
    echo "$(hostname): $home is a link, another user's, or open to all" >&2
    exit 1
fi

whole() {
    local files=0
    [[ ! -d "$1" ]] || files="$(find "$1" -name __pycache__ -prune -o ! -type d -print | wc -l)"
    ((files >= ${folder##*-}))
}

unpack() {
    ! whole "$folder" || return 0
    mkdir "$fresh"
    tar -xf "$archive" -C "$fresh" || return 1
    if ! whole "$fresh"; then # tar accepts an archive that ends between two files
        echo "$(hostname): $archive lacks files" >&2
        return 1
    fi
    whole "$folder" || [[ ! -e "$folder" ]] || mv -T "$folder" "$fresh.torn"
    mv -T "$fresh" "$folder"
}

if [[ -z "$archive" ]]; then
    whole "$folder"
    exit
fi
fresh="$archive.$(hostname).$$"
trap 'rm -rf "$fresh" "$fresh.torn" "$archive"' EXIT
unpack || whole "$folder" # another job, or a node that shares the folder, was first
