#!/usr/bin/env bash
# Trains on CPU ranks of this machine, and starts the ranks again when the run asks for another
# layout or a rank dies. Sets up the environment first.
#
#   bash scripts/local_cpu.sh [-n RANKS] FLAGS_OF_PRETRAIN_GPT
#
# RANKS (default 2) is what it starts with and the most it ever starts. Paths in flags are relative to
# the current folder. Without --save nothing can go on after a crash. SIGTERM and Ctrl-C save and
# stop; a second one kills. Exit code: 0 done, 1 given up, 2 wrong usage, 85 to be queued again,
# 128 + N after signal N, else that of the ranks.
#
#   COPUS_PROGRAM        program to run instead of pretrain_gpt.py
#   COPUS_RESTART_WAIT   seconds before starting again after a crash (5, then 15, then 45)
set -euo pipefail
unset CDPATH # with it cd may go elsewhere, and prints where

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ranks=2

usage() {
    echo "usage: bash scripts/local_cpu.sh [-n RANKS] FLAGS; for the flags see: python pretrain_gpt.py --help"
}
refuse() {
    echo "local_cpu: $*" >&2
    usage >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage; exit 0 ;;
    -n)
        [ $# -ge 2 ] || refuse "-n needs a number"
        ranks=$2
        shift 2
        ;;
    *) break ;;
    esac
done
[[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || refuse "-n $ranks must be a number of ranks"
[ $# -gt 0 ] || refuse "no flags given"

# CPU ranks need no CUDA.
python=$(COPUS_TORCH=${COPUS_TORCH:-cpu} bash "$root/scripts/setup_env.sh" run)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "$(uname)" = Linux ]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; fi
wait=()
[ -z "${COPUS_RESTART_WAIT:-}" ] || wait=(--restart-wait "$COPUS_RESTART_WAIT")
exec "$python" -m copus_ext.launch.supervisor --nproc-per-node "$ranks" --stop-margin-s 0 \
    ${wait[@]+"${wait[@]}"} --called "bash $0 -n $ranks" -- \
    "${COPUS_PROGRAM:-$root/pretrain_gpt.py}" "$@"
