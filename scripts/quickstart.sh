#!/usr/bin/env bash
# From a bare machine with Python 3.10+ to the answer to one question: what does --copus change?
# It sets up, makes a data set of the Python standard library's sources, and trains a GPT of about 1M
# parameters twice on two CPU ranks, from a batch that is large for so short a run: first as the
# flags say, then with --copus on the same samples. Near its end the second run moves to another
# layout while it trains. The script compares both, writes a report and generates text.
#
#   bash scripts/quickstart.sh          a dense model
#   bash scripts/quickstart.sh --moe    a mixture of eight experts, which the move shares out
#
#   QUICKSTART_BATCH   the first batch, samples; a multiple of 4 (default 64)
#   QUICKSTART_STEPS   length of the run in steps of the first batch (default 40, with --moe 20)
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
steps=${QUICKSTART_STEPS:-${is_moe:+20}}
steps=${steps:-40}
batch=${QUICKSTART_BATCH:-64}
run=${QUICKSTART_DIR:-runs/quickstart}
run=${run%/}
if ! [ "$steps" -ge 6 ] 2>/dev/null; then
    echo "quickstart: QUICKSTART_STEPS=$steps must be a number of at least 6" >&2
    exit 2
fi
if ! [ "$batch" -ge 4 ] 2>/dev/null || [ $((batch % 4)) != 0 ]; then
    echo "quickstart: QUICKSTART_BATCH=$batch must be a multiple of 4" >&2
    exit 2
fi
python=$(bash scripts/setup_env.sh run)
lr=$("$python" -c "print(f'{1e-3 * ($batch / 4) ** 0.5:.2g}')")
min_lr=$("$python" -c "print(f'{1e-4 * ($batch / 4) ** 0.5:.2g}')")
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
log=$run/log.txt
: >"$log"

echo "This takes 90 s on two quiet cores, 2 minutes beside other work. What is left out here is in $log"
echo "== 1. data: the standard library's sources, byte by byte"
"$python" tools/preprocess_data.py --python-stdlib --output-prefix "$run/data/stdlib" --append-eod |
    tee -a "$log" | grep -F ' tokens, '

flags=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size "$batch" --train-samples $((batch * steps))
    # The rate grows with the square root of the batch: 4e-3 for 64 samples.
    --lr "$lr" --min-lr "$min_lr" --lr-decay-style cosine
    --lr-warmup-samples $((batch * steps / 20)) --adam-beta2 0.95
    --use-distributed-optimizer --tokenizer-type ByteLevelTokenizer
    --data-path "$run/data/stdlib_text_document" --data-cache-path "$run/data/cache" --split 95,4,1
    --eval-interval $(((steps + 9) / 10)) --eval-iters $(((127 + batch) / batch))
    --log-interval $(((steps + 3) / 4))
)
move="90%:tp1.pp2.dp1"
told="each rank takes half of the layers (pipeline parallelism)"
if [ -n "$is_moe" ]; then
    flags+=(
        --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128
        --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall
        # Several micro-batches: else one gradient of an expert holds the whole batch.
        --micro-batch-size 1
    )
    move="90%:tp1.pp1.ep2.dp2"
    told="each rank takes half of the experts (expert parallelism)"
fi
course() { # of what a run prints: held-out losses as they come, changes without reasons, alerts
    local line open= LC_ALL=C
    while IFS= read -r line; do
        case $line in
        *" on test set "*) ;;
        " validation loss at iteration "*)
            line=${line#*lm loss value: }
            [ -n "$open" ] || printf '   held-out loss:'
            printf ' %.2f' "${line%% *}"
            open=1
            ;;
        "copus: "*" -> "* | "copus: "[0-9]*" change"* | "copus: nothing was changed"* | \
            "copus: controller disabled"* | "the layout "* | ALERT*)
            [ -z "$open" ] || echo
            open=
            echo "   ${line%%;*}"
            ;;
        esac
    done
    [ -z "$open" ] || echo
}
train() {
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
        "${flags[@]}" "$@" | tee -a "$log" | course
}

note=
[ "$batch" != 64 ] || note=", far too large for so short a run"
echo "== 2. train on two ranks, each with a copy of the model, as the flags say: batch $batch$note"
train --run-dir "$run/plain"

echo "== 3. the same with --copus; after 90 % of its samples --layout-schedule moves it: $told"
train --copus --layout-schedule "$move" --save "$run/checkpoints" --run-dir "$run"

"$python" tools/report.py "$run" -o "$run/report.html" >>"$log"
echo "== 4. what the model of the last checkpoint writes"
"$python" tools/generate.py --load "$run/checkpoints" --prompt "def " "class " "import " \
    --num-tokens-to-generate 60 --temperature 0.5 --one-line | tee -a "$log"

echo "== 5. what --copus changed"
"$python" scripts/compare_runs.py "$run/plain" "$run" | tee -a "$log"
page=$(cd "$run" && pwd)/report.html
echo "each decision and why: file://$page in a browser, or: $(dirname "$python")/copus status $run"
echo "(the time saved that they name is an estimate of the run itself; the two losses above were measured)"
