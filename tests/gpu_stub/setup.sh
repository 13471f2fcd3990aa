#!/usr/bin/env bash
# Makes what the tests of this folder need, once; later calls return at once.
#
#   python=$(bash tests/gpu_stub/setup.sh)
#
# An environment of its own gets the CUDA build of torch (5 GB; no GPU is needed) and, in its folder
# `stub`, libraries in the place of CUDA's, from the sources in cuda/. It needs Linux, gcc and nm.
# Prints the path of its python; everything else goes to standard error.
#
#   COPUS_GPU_STUB_VENV    where it is or shall be   (default: .venv-gpu-stub in the repository)
set -euo pipefail
unset CDPATH # with it cd may go elsewhere, and prints where

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${COPUS_GPU_STUB_VENV:-$root/.venv-gpu-stub}
out=$venv/stub
fail() { echo "gpu_stub/setup: $*" >&2; exit 2; }

for tool in gcc nm; do command -v $tool >/dev/null || fail "$tool is missing"; done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# pip takes a wheel of the CPU build for the newer of two, wherever it finds one. This names the one
# of PyPI, whose version has no suffix.
sed -n 's/^torch==/torch===/p' "$root/requirements/torch.txt" >"$work/constraints.txt"
PIP_CONSTRAINT=$work/constraints.txt COPUS_VENV=$venv COPUS_TORCH=cuda \
    bash "$root/scripts/setup_env.sh" run >"$work/python"
python=$(cat "$work/python")

# torch may have been made anew, too: the libraries of the old one would not load.
wanted=$(cat "$here"/cuda/* "${BASH_SOURCE[0]}" "$root/requirements/torch.txt" | cksum)
if [ "$(cat "$out/done" 2>/dev/null)" = "$wanted" ]; then
    echo "$python"
    exit
fi
nvidia=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])')
cuda=$nvidia/cu13
# The headers of the runtime include some that are in a package of their own.
if [ ! -e "$cuda/include/crt/host_defines.h" ]; then
    version=$("$python" -c 'from importlib.metadata import version as of; print(of("nvidia-cuda-runtime"))')
    "$python" -m pip install -q --no-input "nvidia-cuda-crt==${version%.*}.*" >&2
fi
mkdir -p "$out"

# Symbols that a library has: of the real file, or what the header declares where there is none.
symbols() {
    if [ -e "$1" ]; then
        nm -D --defined-only "$1" | awk '$2 == "T" || $2 == "W" { print $3 }' | sed 's/@.*//' |
            grep -E '^(cu|__cuda|nccl)'
    else
        grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' "$cuda/include/cuda.h" |
            grep -vE '^cu(da|[A-Z][a-z]*_t)|_st$|^CU'
    fi | sort -u
}

# One library: what its sources define, and for each other function of the real one `return 0`.
#   library NAME REAL VERSIONED SOURCE ...
library() {
    local name=$1 real=$2 versioned=$3 source objects=() flags=()
    shift 3
    for source in "$@"; do
        gcc -c -fPIC -O3 -std=gnu11 -I"$cuda/include" "$here/cuda/$source.c" -o "$work/$source.o"
        objects+=("$work/$source.o")
    done
    nm --defined-only -g "${objects[@]}" | awk 'NF == 3 { print $3 }' | sort -u >"$work/have"
    symbols "$real" >"$work/all"
    comm -13 "$work/have" "$work/all" | sed 's/.*/int &(void) { return 0; }/' >"$work/rest.c"
    gcc -c -fPIC -w "$work/rest.c" -o "$work/rest.o"
    if [ "$versioned" = versioned ]; then
        echo "$name { global: *; };" >"$work/map"
        flags=(-Wl,--version-script="$work/map")
    fi
    gcc -shared -o "$out/$name" "${objects[@]}" "$work/rest.o" -Wl,-soname,"$name" \
        ${flags[@]+"${flags[@]}"} -ldl -lpthread
}

library libcudart.so.13 "$cuda/lib/libcudart.so.13" versioned streams memory devices
library libcublas.so.13 "$cuda/lib/libcublas.so.13" versioned blas
library libcublasLt.so.13 "$cuda/lib/libcublasLt.so.13" versioned blas_lt
library libnccl.so.2 "$nvidia/nccl/lib/libnccl.so.2" plain nccl_numbers nccl_messages nccl_comms
library libcuda.so.1 "" plain driver virtual_memory
gcc -shared -fPIC -O3 "$here/cuda/management.c" -o "$out/libnvidia-ml.so.1" \
    -Wl,-soname,libnvidia-ml.so.1
echo "$wanted" >"$out/done"
echo "$python"
