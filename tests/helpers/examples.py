"""Flag lists in the style of three well-known Megatron-LM examples, how tests scale them, and the
shortest one that resolves."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve

GPT3 = """
    --use-mcore-models --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024
    --max-position-embeddings 1024 --attention-backend auto --micro-batch-size 1
    --global-batch-size 64 --rampup-batch-size 16 16 1024 --train-iters 500 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5
    --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --data-path my_text_document
    --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 --log-interval 100
    --save-interval 100 --eval-interval 100 --save checkpoints --load checkpoints --eval-iters 10
    --tensorboard-dir tensorboard --distributed-backend nccl
"""

LLAMA3 = """
    --use-mcore-models --num-layers 8 --hidden-size 256 --ffn-hidden-size 896
    --num-attention-heads 8 --group-query-attention --num-query-groups 2 --kv-channels 32
    --seq-length 512 --max-position-embeddings 512 --position-embedding-type rope
    --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --init-method-std 0.0134 --attention-backend fused
    --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm
    --no-rope-fusion --no-masked-softmax-fusion --micro-batch-size 1 --global-batch-size 128
    --train-samples 8192 --lr-decay-samples 8000 --lr-warmup-samples 512 --lr 0.00015
    --min-lr 0.00001 --decoupled-lr 5.0e-4 --lr-decay-style cosine --clip-grad 1.0
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
    --tensor-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2
    --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --split 99,1,0
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
    --distributed-timeout-minutes 60 --tensorboard-dir tensorboard --save checkpoints
    --logging-level 20 --ckpt-assume-constant-structure --rerun-mode disabled
"""

MIXTRAL = """
    --use-mcore-models --disable-bias-linear --seq-length 512 --max-position-embeddings 512
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 896 --num-attention-heads 8
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 4 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path my_document
    --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500
    --lr-decay-iters 320 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1
    --lr-warmup-iters 50 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer
    --sequence-parallel --log-interval 1 --save-interval 100 --eval-interval 100 --eval-iters 10
"""

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 100 --mock-data"
)


def config_of(flags: str = "", world: int = 1, **environment: bool) -> Config:
    """What `SMALL` with these flags behind it resolves to."""
    return resolve(parse_args(f"{SMALL} {flags}".split()), world, **environment)


_WAY_ON = re.compile(
    r"\b(?:add|change|choose|compare|drop|give|keep|lower|make|raise|remove|round|save|set|shard|"
    r"shorten|start|take|use|write)\b|did you mean|must (?:both |not )?be "
)


def names_a_way_on(line: str) -> bool:
    """Whether one line of a refusal says what to do: an instruction behind what is wrong, a flag
    that was meant, or what a value must be."""
    wrong, *rest = re.split(r"[;:(] ?", line, maxsplit=1)
    return "\n" not in line and None is not _WAY_ON.search(rest[0] if rest else wrong)


def with_values(flags: str, values: Mapping[str, str | None]) -> list[str]:
    """Puts other values behind some flags, or takes the flags away.

    Args:
        flags: flag list.
        values: flag -> new values in one string; None removes the flag with its values.

    Raises:
        KeyError: a flag is not in the list, so that an example cannot change unnoticed.
    """
    groups: list[list[str]] = []
    for word in flags.split():
        if word.startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    by_name = {group[0]: group for group in groups}
    for name, value in values.items():
        if name not in by_name:
            raise KeyError(name)
        by_name[name][1:] = (value or "").split()
        if value is None:
            groups.remove(by_name[name])
    return [word for group in groups for word in group]
