#!/usr/bin/env bash
# Makes the Python environment of this repository, once; later calls return at once.
#
#   python=$(bash scripts/setup_env.sh [run|dev])
#
# run: what training needs (default); dev: also what scripts/test.sh needs. Prints the path of the
# environment's python; everything else goes to standard error. Beside it lies `copus`, which runs
# the commands of this repository from any folder.
#
#   COPUS_VENV    where the environment is or shall be   (default: .venv in the repository)
#   COPUS_PYTHON  python to make it with                 (default: the first suitable one on PATH)
#   COPUS_TORCH   build of torch, cpu or cuda            (default: cuda where nvidia-smi is)
#   COPUS_TE      1: Transformer Engine, too; pip compiles its part for torch with nvcc
set -euo pipefail
unset CDPATH # with it cd may go elsewhere, and prints where

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
profile=${1:-run}
venv=${COPUS_VENV:-$root/.venv}
requirements=$root/requirements

say() { echo "setup_env: $*" >&2; }
fail() { say "$*"; exit 2; }

case $profile in run | dev) ;; *) fail "unknown profile '$profile'; use run or dev" ;; esac

# On Linux the plain wheel brings gigabytes of CUDA; without a GPU the CPU wheel does.
build=${COPUS_TORCH:-}
if [ -z "$build" ]; then
    build=cpu
    if [ "$(uname -s)" = Linux ] && command -v nvidia-smi >/dev/null; then build=cuda; fi
fi
case $build in cpu | cuda) ;; *) fail "COPUS_TORCH=$build is unknown; use cpu or cuda" ;; esac

if [ "${COPUS_TE:-}" = 1 ] && [ "$build" != cuda ]; then
    fail "COPUS_TE=1 needs the CUDA build of torch; set COPUS_TORCH=cuda"
fi

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

torch_build() { # cpu or cuda, of a torch of the pinned version; nothing where there is none
    "$python" - "$pinned" <<'PY'
import importlib.metadata, runpy, sys
try:
    torch = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit()
if torch.version.split("+")[0] != sys.argv[1].partition("==")[2]:
    sys.exit()
try:
    cuda = runpy.run_path(str(torch.locate_file("torch/version.py")))["cuda"]
except Exception:  # somebody built it here: it stays
    cuda = True
print("cuda" if cuda else "cpu")
PY
}

install_torch() {
    local installed index
    installed=$(torch_build)
    # The build with CUDA serves CPU ranks as well.
    if [ "$installed" = cuda ] || [ "$installed" = "$build" ]; then return; fi
    say "installing $pinned ($build)"
    if [ "$build" = cuda ]; then
        install_cuda_torch "$installed"
        return
    fi
    if [ "$(uname -s)" = Linux ]; then
        index=https://download.pytorch.org/whl/cpu
        pip_install "$pinned+cpu" 2>/dev/null && return
        pip_install "$pinned+cpu" --extra-index-url "$index" && return
        say "no CPU wheel of torch within reach, taking the default one"
    fi
    pip_install "$pinned" || fail "pip could not install $pinned; its message is above"
}

install_cuda_torch() { # in the place of a CPU build, if "$1" says so
    local others="or set COPUS_TORCH=cpu if ranks shall run on CPUs"
    # For pip 2.13.0+cpu is 2.13.0, so that it must be forced; then come the libraries of CUDA.
    { [ -z "$1" ] || pip_install --force-reinstall --no-deps "$pinned"; } && pip_install "$pinned" ||
        fail "pip could not install $pinned with CUDA; its message is above." \
            "Run COPUS_TORCH=cuda bash scripts/setup_env.sh $profile where there is a network, $others"
    [ "$(torch_build)" = cuda ] ||
        fail "the $pinned of this package index has no CUDA; set PIP_INDEX_URL to another, $others"
}

set_up() {
    "$python" -m pip --version >/dev/null 2>&1 || fail "$venv has no pip; remove it and try again"
    install_torch
    say "installing requirements/$profile.txt"
    pip_install -r "$requirements/$profile.txt" || fail "pip could not install requirements/$profile.txt"
    if [ "${COPUS_TE:-}" = 1 ]; then
        say "installing requirements/te.txt"
        # Without isolation, so that it is compiled for the torch that is here. Not tried on a GPU yet.
        { pip_install setuptools wheel ninja pybind11 &&
            pip_install --no-build-isolation -r "$requirements/te.txt"; } ||
            fail "pip could not install Transformer Engine, which needs nvcc and cuDNN's headers;" \
                "its message is above. NVIDIA's container has it: see docs/gpus.md"
        : >"$venv/.copus-te"
    fi
    # pyright runs on node; where there is none, PyPI has one.
    if [ "$profile" = dev ] && ! command -v node >/dev/null; then
        pip_install "pyright[nodejs]" -c "$requirements/constraints.txt" ||
            say "no node for pyright; it will try to fetch one"
    fi
    printf '%s\n' "$wanted $(torch_build)" >"$stamp"
}

offer_copus() { # a launcher, and no installation: it costs nothing, and pip's own stays
    local launcher=$venv/bin/copus mark="# Made by scripts/setup_env.sh." text
    if [ -e "$launcher" ] && ! grep -qF "$mark" "$launcher"; then return; fi
    text=$(
        printf '#!/usr/bin/env bash\n%s\n' "$mark"
        printf 'export PYTHONPATH=%q${PYTHONPATH:+:$PYTHONPATH}\n' "$root"
        printf 'exec %q -m copus_ext.commands.main "$@"\n' "$(cd "$venv" && pwd)/bin/python"
    )
    [ "$text" = "$(cat "$launcher" 2>/dev/null)" ] && return
    # An environment that others own may be read only.
    { printf '%s\n' "$text" >"$launcher.$$" && chmod +x "$launcher.$$" &&
        mv "$launcher.$$" "$launcher"; } 2>/dev/null || say "no copus in $venv/bin, which cannot be written"
}

python=$venv/bin/python
if [ ! -x "$python" ]; then
    base=$(find_python)
    say "making $venv with $("$base" --version)"
    make_venv "$base"
fi
suitable "$python" || fail "$python does not start or is not Python 3.10 to 3.13; remove $venv and try again"

pinned=$(grep -v '^#' "$requirements/torch.txt")
stamp=$venv/.copus-$profile
wanted=$(cat "$requirements"/*.txt "${BASH_SOURCE[0]}" | cksum)
done_already() { # exit status 0 if "$1" is the stamp of these files, and of a torch that will do
    case $(cat "$1" 2>/dev/null) in
    "$wanted cuda") true ;;
    "$wanted cpu") [ "$build" = cpu ] ;;
    *) false ;;
    esac
}
has_engine() { [ "${COPUS_TE:-}" != 1 ] || [ -e "$venv/.copus-te" ]; }
is_ready() { has_engine && { done_already "$stamp" || done_already "$venv/.copus-dev"; }; }
if ! is_ready; then
    # Jobs that start at once must not replace torch at once.
    if command -v flock >/dev/null; then
        exec 8>>"$venv/.copus-lock"
        flock 8 || true # not every file system can
    fi
    if ! is_ready; then set_up; fi
fi
offer_copus
echo "$python"
