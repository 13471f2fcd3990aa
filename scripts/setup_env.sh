#!/usr/bin/env bash
# Makes the Python environment of this repository, once; later calls return at once.
#
#   python=$(bash scripts/setup_env.sh [run|dev])
#
# run: what training needs (default); dev: also what scripts/test.sh needs. Prints the path of the
# environment's python; everything else goes to standard error.
#
#   COPUS_VENV    where the environment is or shall be   (default: .venv in the repository)
#   COPUS_PYTHON  python to make it with                 (default: the first suitable one on PATH)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
profile=${1:-run}
venv=${COPUS_VENV:-$root/.venv}
requirements=$root/requirements

say() { echo "setup_env: $*" >&2; }
fail() { say "$*"; exit 2; }

case $profile in run | dev) ;; *) fail "unknown profile '$profile'; use run or dev" ;; esac

suitable() { # exit status 0 if "$1" starts and is Python 3.10 to 3.13
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${COPUS_PYTHON:-}" ]; then
        suitable "$COPUS_PYTHON" || fail "COPUS_PYTHON=$COPUS_PYTHON is not Python 3.10 to 3.13"
        echo "$COPUS_PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11 python3.13 python3.10 python; do
        if suitable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 to 3.13 on PATH ($(python3 --version 2>&1 || true)); install one or set COPUS_PYTHON"
}

make_venv() { # the venv module needs ensurepip, which Debian packs apart
    local base=$1 borrowed existed=false
    [ -e "$venv" ] && existed=true
    "$base" -m venv "$venv" >/dev/null 2>&1 && return
    "$base" -m virtualenv -q "$venv" >/dev/null 2>&1 && return
    borrowed=$(mktemp -d)
    if "$base" -m pip install -q --target "$borrowed" virtualenv >/dev/null 2>&1 &&
        PYTHONPATH=$borrowed "$base" -m virtualenv -q "$venv" >/dev/null 2>&1; then
        rm -rf "$borrowed"
        return
    fi
    rm -rf "$borrowed"
    # A half-made environment would look finished to the next call.
    [ "$existed" = true ] || rm -rf "$venv"
    fail "$base has no venv module; run: apt-get install python3-venv (or: $base -m pip install virtualenv)"
}

pip_install() {
    # Python compiles what is imported. To compile everything takes half of the time.
    "$python" -m pip install -q --disable-pip-version-check --no-input --no-compile "$@" >&2
}

install_torch() {
    local pinned index
    pinned=$(grep -v '^#' "$requirements/torch.txt")
    "$python" - "$pinned" <<'PY' && return
import importlib.metadata, sys
try:
    installed = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
sys.exit(installed.split("+")[0] != sys.argv[1].partition("==")[2])
PY
    say "installing $pinned"
    # On Linux the plain wheel brings gigabytes of CUDA; without a GPU the CPU wheel does.
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        index=https://download.pytorch.org/whl/cpu
        pip_install "$pinned+cpu" 2>/dev/null && return
        pip_install "$pinned+cpu" --extra-index-url "$index" && return
        say "no CPU wheel of torch within reach, taking the default one"
    fi
    pip_install "$pinned" || fail "pip could not install $pinned; its message is above"
}

python=$venv/bin/python
if [ ! -x "$python" ]; then
    base=$(find_python)
    say "making $venv with $("$base" --version)"
    make_venv "$base"
fi
suitable "$python" || fail "$python does not start or is not Python 3.10 to 3.13; remove $venv and try again"

stamp=$venv/.copus-$profile
wanted=$(cat "$requirements"/*.txt "${BASH_SOURCE[0]}" | cksum)
done_already() { [ "$(cat "$1" 2>/dev/null)" = "$wanted" ]; }
if ! done_already "$stamp" && ! done_already "$venv/.copus-dev"; then
    "$python" -m pip --version >/dev/null 2>&1 || fail "$venv has no pip; remove it and try again"
    install_torch
    say "installing requirements/$profile.txt"
    pip_install -r "$requirements/$profile.txt" || fail "pip could not install requirements/$profile.txt"
    # pyright runs on node; where there is none, PyPI has one.
    if [ "$profile" = dev ] && ! command -v node >/dev/null; then
        pip_install "pyright[nodejs]" -c "$requirements/constraints.txt" ||
            say "no node for pyright; it will try to fetch one"
    fi
    printf '%s\n' "$wanted" >"$stamp"
fi
echo "$python"
