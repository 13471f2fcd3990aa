#!/usr/bin/env bash
# Runs `copus accept` on a machine with one GPU, Python and a CUDA build of torch, and no network.
#
#   bash scripts/accept_on_device.sh pack          where there is a network: fills .accept (33 MB)
#   bash scripts/accept_on_device.sh run [OUTPUT]  on the device, with .accept beside the checkout
#
# pack takes wheels for one Python; run checks with each release of megatron-core that was packed,
# and writes OUTPUT/accept-RELEASE.jsonl (default: accept). Not run on a GPU yet.
#
#   ACCEPT_PYTHON   the device's release of Python   (default 3.12)
#   ACCEPT_CORES    releases of megatron-core        (default "0.16.1 0.19.2")
#   ACCEPT_MINUTES  for each release, in their order (default "5.5 2.5"); what they do not suffice
#                   for is left out: of the second release all but the checks that tell faults
#   ACCEPT_FLAGS    more flags of copus accept, such as "--device cpu --checks arithmetic"
set -euo pipefail
unset CDPATH

cd "$(dirname "${BASH_SOURCE[0]}")/.."
cores=${ACCEPT_CORES:-0.16.1 0.19.2}
minutes=${ACCEPT_MINUTES:-5.5 2.5}
packed=.accept

# Wheels of the device's Python, into a folder. What torch brings, numpy among it, is its own.
fetch() {
    local site=$packed/$1
    shift
    python3 -m pip install -q --no-deps --no-compile --ignore-requires-python \
        --only-binary=:all: --target "$site" --python-version "${ACCEPT_PYTHON:-3.12}" \
        --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
        --platform any "$@"
}

pack() {
    local release
    rm -rf "$packed"
    fetch common psutil pyyaml rich markdown-it-py mdurl pygments tqdm packaging
    for release in $cores; do fetch "$release" "megatron-core==$release"; done
    du -sh "$packed"
}

run() {
    local output=${1:-accept} release failed=0 left
    read -ra left <<<"$minutes"
    mkdir -p "$output"
    for release in $cores; do
        if [ ! -d "$packed/$release" ]; then
            echo "accept_on_device: $packed/$release is missing; run: bash $0 pack" >&2
            exit 2
        fi
        echo "== megatron-core $release"
        # shellcheck disable=SC2086
        PYTHONPATH=$PWD:$PWD/$packed/$release:$PWD/$packed/common${PYTHONPATH:+:$PYTHONPATH} \
            python3 -m copus_ext.commands.main accept --minutes "${left[0]}" \
            --output "$output/accept-$release.jsonl" ${ACCEPT_FLAGS:-} || failed=$?
        # The last number is that of all further releases.
        if [ ${#left[@]} -gt 1 ]; then left=("${left[@]:1}"); fi
    done
    return $failed
}

case ${1:-} in
    pack) pack ;;
    run) run "${2:-accept}" ;;
    *)
        echo "accept_on_device: give pack or run" >&2
        exit 2
        ;;
esac
