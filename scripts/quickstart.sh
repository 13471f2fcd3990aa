#!/usr/bin/env bash
# From a bare machine with Python 3.10+ to a trained model in a few minutes: sets up, makes a
# data set of the Python standard library's sources, trains a GPT of about 1M parameters on two CPU
# ranks, the batch following the gradient noise scale, saves, goes on with the same run under
# pipeline parallelism, writes a report, and generates text.
#
#   bash scripts/quickstart.sh          a dense model
#   bash scripts/quickstart.sh --moe    a mixture of eight experts, then shared out over the ranks
#
#   QUICKSTART_STEPS   length of the run in steps of the first batch, 4 samples (default 720, with
#                      --moe 360); fewer steps where the batch grows
#   QUICKSTART_DIR     where everything goes     (default runs/quickstart; made anew each time)
set -euo pipefail
unset CDPATH # with it cd may go elsewhere, and prints where

cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "$*" in
    "") is_moe= ;;
    --moe) is_moe=1 ;;
    *)
        echo "quickstart: unknown argument $*; give --moe or nothing" >&2
        exit 2
        ;;
esac
steps=${QUICKSTART_STEPS:-${is_moe:+360}}
steps=${steps:-720}
batch=4
run=${QUICKSTART_DIR:-runs/quickstart}
run=${run%/}
if ! [ "$steps" -ge 6 ] 2>/dev/null; then
    echo "quickstart: QUICKSTART_STEPS=$steps must be a number of at least 6" >&2
    exit 2
fi
python=$(bash scripts/setup_env.sh run)
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

mark=$run/.quickstart
if [ -e "$run" ] && [ ! -e "$mark" ]; then
    echo "quickstart: $run exists and is not from an earlier quickstart; set QUICKSTART_DIR" >&2
    exit 2
fi
mkdir -p "$run"
exec 9>>"$mark"
if command -v flock >/dev/null && ! flock -n 9; then
    echo "quickstart: another quickstart is using $run; wait for it or set QUICKSTART_DIR" >&2
    exit 2
fi
find "$run" -mindepth 1 ! -path "$mark" -delete

echo "== 1. data: the standard library's sources, byte by byte"
"$python" tools/preprocess_data.py --python-stdlib --output-prefix "$run/data/stdlib" --append-eod

flags=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size $batch --train-iters $steps
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.08 --adam-beta2 0.95
    --use-distributed-optimizer --tokenizer-type ByteLevelTokenizer
    --data-path "$run/data/stdlib_text_document" --split 95,4,1
    --eval-interval $((steps / 6)) --eval-iters 8 --log-interval $((steps > 18 ? steps / 18 : 1))
    --copus --copus-mode act
    --save "$run/checkpoints" --run-dir "$run"
)
second=(--pipeline-model-parallel-size 2)
told="each rank holding half of the layers (pipeline parallelism)"
if [ -n "$is_moe" ]; then
    flags+=(
        --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128
        --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall
        # Several micro-batches: else one gradient of an expert holds the whole batch.
        --micro-batch-size 1
    )
    second=(--expert-model-parallel-size 2)
    told="each rank holding half of the experts (expert parallelism)"
fi
train() {
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
        "${flags[@]}" "$@" | grep -v '^  [a-z_0-9]* \.\.'
}

echo "== 2. train on two ranks, each with a copy of the model (data parallelism), and save"
train --exit-interval $((steps / 6))

echo "== 3. go on with the same run, $told"
train "${second[@]}" --load "$run/checkpoints"

echo "== 4. what happened"
"$python" - "$run" <<'PY'
import sys
from pathlib import Path

from megatron.trainer.common.program import other_command
from megatron.trainer.logging.metrics import read_metrics

run = Path(sys.argv[1])
records = read_metrics(run)
layouts = [r["layout"] for r in records if r["kind"] == "run.start"]
steps = [r for r in records if r["kind"] == "step"]
sizes = [s["global_batch_size"] for s in steps]
evaluations = [r for r in records if r["kind"] == "eval" and r["split"] == "valid"]
print("layouts:          ", " then ".join(layouts))
print("validation loss:  ", ", ".join(
    f"{r['losses']['lm loss']:.3f} at step {r['iteration']}" for r in evaluations))
path = [sizes[0]] + [b for a, b in zip(sizes, sizes[1:]) if a != b]
print("global batch:     ", " -> ".join(map(str, path)))
if "max_expert_load" in steps[-1]:
    loads = [s["max_expert_load"] for s in steps]
    print(f"busiest expert:    {loads[0]:.2f} times the mean load at first, {loads[-1]:.2f} at last")
tokens = 128 * sum(r["global_batch_size"] for r in steps)
seconds = sum(r["elapsed_per_iteration_ms"] for r in steps) / 1000
print(f"trained:           {len(steps)} steps, {tokens} tokens, {tokens / seconds:.0f} tokens/s")
print(f"files:             {run}/metrics.jsonl (every step), {run}/config.json, {run}/checkpoints")
print(f"why it changed:    {run}/journal.jsonl; decide it again: {other_command('replay.py')} {run}")
print("try next:          other flags of Megatron-LM on pretrain_gpt.py; see README.md")
losses = [r["losses"]["lm loss"] for r in evaluations]
sys.exit(0 if losses[-1] < losses[0] else "quickstart: the validation loss did not fall")
PY

"$python" tools/report.py "$run" -o "$run/report.html"

echo "== 5. what the model of the last checkpoint writes"
"$python" tools/generate.py --load "$run/checkpoints" --prompt "def " "class " "import " \
    --num-tokens-to-generate 60 --temperature 0.5 --one-line
