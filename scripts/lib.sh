# Shared by the scripts in this folder (sourced, not run): the project's own environment.
#
# FEEDER_VENV    where the environment lives; it belongs to these scripts, which make it anew
#                when pyproject.toml, the interpreter or the project's place changes (.venv)
# FEEDER_PYTHON  the interpreter to make it with (python3; with uv any Python from 3.11 on)
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$(realpath --canonicalize-missing -- "${FEEDER_VENV:-$ROOT/.venv}")

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# What the environment was made for. It is made anew when this differs.
purpose() {
    echo "$(cksum <"$ROOT/pyproject.toml") $ROOT ${FEEDER_PYTHON:-}"
}

is_made() {
    [[ -e $VENV/made-for && $(<"$VENV/made-for") == "$(purpose)" ]] && "$VENV/bin/python" -c "" 2>/dev/null
}

make_venv() {
    local python=${FEEDER_PYTHON:-python3}
    [[ ! -e $VENV || -e $VENV/pyvenv.cfg ]] || die "$VENV is not a virtual environment: move it away"
    echo "making $VENV" >&2
    rm -rf "$VENV"
    if command -v uv >/dev/null; then
        uv venv --quiet --python "${FEEDER_PYTHON:->=3.11}" "$VENV"
    else
        "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" ||
            die "$python is not Python 3.11 or newer: name one in FEEDER_PYTHON"
        "$python" -m venv "$VENV"
    fi
    purpose >"$VENV/made-for"
}

install() {
    local project=$ROOT${1:+[$1]}
    echo "installing $project into $VENV (once)" >&2
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$VENV/bin/python" --editable "$project"
    else
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$project"
    fi
    touch "$VENV/has-${1:-core}"
}

# environment EXTRA: see to it that the environment is there and holds the project with EXTRA
# ("" for none).
# Two scripts started at once take turns, where flock is there to see to it.
environment() {
    (
        if command -v flock >/dev/null; then flock 9; fi
        if ! is_made; then make_venv; fi
        if [[ ! -e $VENV/has-${1:-core} ]]; then install "$1"; fi
    ) 9>"$VENV.lock"
}

# gpu_environment: adds CuPy for the CUDA of the driver, where there is one. Without it there is
# nothing to be done on a GPU, which whoever wants one says.
gpu_environment() {
    local version
    version=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1) || true
    if [[ -n $version ]]; then environment "cuda$((version > 12 ? 13 : 12))"; fi
}
