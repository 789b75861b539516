#!/usr/bin/env bash
# On each node: is the copy FOLDER there, or can it be made of ARCHIVE, which has so many BYTES? It is there whole or not
# at all, whoever else unpacks it.
#   unpack.sh FOLDER [ARCHIVE BYTES]
set -euo pipefail
folder="$1" archive="${2:-}" bytes="${3:-}" home="${1%/*}"
(umask 077 && mkdir -p "$home")
if [[ ! -O "$home" ]]; then # who owns it could change what ranks execute
    echo "$(hostname): $home is another user's" >&2
    exit 1
fi
[[ -n "$archive" ]] || exec test -d "$folder"
part="$archive.$(hostname)"
trap 'rm -rf "$part" "$archive"' EXIT

unpack() {
    local found
    [[ ! -d "$folder" ]] || return 0
    found="$(stat -c %s "$archive")" # tar takes an archive that ends between two files for a whole one
    if [[ "$found" != "$bytes" ]]; then
        echo "$(hostname): $archive has $found of $bytes bytes: is there room?" >&2
        return 1
    fi
    mkdir "$part" && tar -xf "$archive" -C "$part" && mv -T "$part" "$folder"
}

unpack || [[ -d "$folder" ]] # another job, or a node that shares the folder, was first
