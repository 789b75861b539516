#!/usr/bin/env bash
# On each node: is the copy FOLDER there, or can it be made of ARCHIVE? It is there whole or not at all, whoever else
# unpacks it. Its name ends with the number of its files: what cleans /tmp takes those that were not opened for days.
#   unpack.sh FOLDER [ARCHIVE]
set -euo pipefail
folder="$1" archive="${2:-}" home="$(dirname "$1")"
(umask 077 && mkdir -p "$home")
# who may write there could change what ranks execute
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
    mkdir "$part"
    tar -xf "$archive" -C "$part" || return 1
    if ! whole "$part"; then # tar takes an archive that ends between two files for a whole one
        echo "$(hostname): $archive lacks files" >&2
        return 1
    fi
    whole "$folder" || [[ ! -e "$folder" ]] || mv -T "$folder" "$part.torn"
    mv -T "$part" "$folder"
}

if [[ -z "$archive" ]]; then
    whole "$folder"
    exit
fi
part="$archive.$(hostname).$$"
trap 'rm -rf "$part" "$part.torn" "$archive"' EXIT
unpack || whole "$folder" # another job, or a node that shares the folder, was first
