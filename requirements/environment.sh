#!/usr/bin/env bash
# Makes the virtual environments of the Makefile from exact files, and nothing twice.
#   environment.sh python 3.12                  prints an interpreter of that version that starts, or fails
#   environment.sh make FOLDER 3.12 PART...     makes FOLDER; a PART is a requirements file (a name ending in
#                                               -nodeps.txt is installed without dependencies) or the folder of
#                                               a project, installed editable
# Each part leaves a stamp with its checksum: a second call does nothing until the part changes.
set -euo pipefail

find_python() {
    local name="python$1" candidate
    for candidate in "$(command -v "$name" || true)" "$HOME"/.pyenv/versions/"$1".*/bin/"$name"; do
        # A pyenv shim stands on the path even where its version isn't active: only starting it tells.
        if [ -n "$candidate" ] && "$candidate" -c "" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

checksum() {
    if [ -d "$1" ]; then
        cat "$1/pyproject.toml" | sha256sum | cut -c1-16
    else
        sha256sum <"$1" | cut -c1-16
    fi
}

make_environment() {
    local folder="$1" version="$2" interpreter part name sum stamp
    shift 2
    if ! "$folder/bin/python" -c "" 2>/dev/null; then
        interpreter="$(find_python "$version")" || {
            echo "python$version isn't on the path; to mend: install Python $version" >&2
            exit 1
        }
        echo "making $folder with $interpreter"
        rm -rf "$folder"
        "$interpreter" -m venv "$folder"
    fi
    for part in "$@"; do
        name="$(basename "$(realpath "$part")" .txt)"
        sum="$(checksum "$part")"
        stamp="$folder/.stamp-$name"
        [ "$(cat "$stamp" 2>/dev/null || true)" = "$sum" ] && continue
        echo "installing $part into $folder"
        if [ -d "$part" ]; then
            "$folder/bin/pip" install -q --no-deps --no-build-isolation -e "$part"
        elif [[ "$part" == *-nodeps.txt ]]; then
            "$folder/bin/pip" install -q --no-deps -r "$part"
        else
            "$folder/bin/pip" install -q -r "$part"
        fi
        echo "$sum" >"$stamp"
    done
}

export PIP_DISABLE_PIP_VERSION_CHECK=1
case "${1:-}" in
python) find_python "$2" ;;
make) make_environment "${@:2}" ;;
*) sed -n '2,8p' "$0" >&2; exit 2 ;;
esac
