"""Writes the logits of imported models, and a checkpoint that was trained.

The folder holds Hugging Face models in `hf-*`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.jobs import TINY, layout_flags, run
from tests.helpers.text import text_prefix

TRAINED = "trained"
"""Folder of the checkpoint."""
EXPERTS = "--expert-model-parallel-size", "2"
LOGITS_TP = (1, 2)
VOCAB_SIZE = 150
"""Of the imported models: their embeddings are padded, and the text has fewer tokens."""
LLAMA = f"""--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --seq-length 16 --max-position-embeddings 32
--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --tokenizer-type NullTokenizer
--vocab-size {VOCAB_SIZE - 1} --data-path {text_prefix()} --swiglu --normalization RMSNorm
--disable-bias-linear
--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
--log-interval 1000 --norm-epsilon 1e-6 --rotary-base 5000 --finetune --train-iters 1"""


def tokens() -> Any:
    """What the logits are computed of."""
    import torch

    return torch.randint(0, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(5))


def imported_logits(output: Path, model: Path, tp: int) -> None:
    import torch
    import torch.distributed as dist

    from megatron.trainer.extras.convert.target import Changes
    from megatron.trainer.extras.huggingface.exchange import load
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class WriteLogits(Callback):
        def on_train_start(self, context: CallbackContext) -> None:
            (chunk,), ids = context.model, tokens()
            positions = torch.arange(ids.shape[1]).expand_as(ids)
            with torch.no_grad():
                part = chunk(ids, positions, None).contiguous()
            parts = [torch.empty_like(part) for _ in range(context.groups.tp.size())]
            dist.all_gather(parts, part, group=context.groups.tp)
            if dist.get_rank() == 0:
                torch.save(torch.cat(parts, dim=-1), output / f"logits-{model.name}-{tp}.pt")

    converted = output / f"imported-{model.name}-{tp}"
    if dist.get_rank() == 0:
        load(model, converted, Changes(tp=tp), verify=True)
    dist.barrier()
    config = json.loads((model / "config.json").read_text())
    more = [] if config["tie_word_embeddings"] else ["--untie-embeddings-and-output-weights"]
    if config["rope_parameters"]["rope_type"] == "llama3":
        more += ["--use-rope-scaling", "--rope-scaling-factor", "8"]
    more += {"qwen2": ["--add-qkv-bias"], "qwen3": ["--qk-layernorm"]}.get(config["model_type"], [])
    if config["model_type"] == "mixtral":
        more += [*EXPERTS, "--expert-tensor-parallel-size", "1", "--num-experts", "4"]
    flags = [*more, *layout_flags(tp, 1, 1), "--load", str(converted)]
    run(flags, output / f"run-{model.name}-{tp}", [WriteLogits()], base=LLAMA)


def main(output: Path) -> Any:
    flags = ["--bf16", *layout_flags(2, 1, 1), "--train-iters", "2", "--global-batch-size", "2"]
    run([*flags, "--save", str(output / TRAINED)], output / "run-trained", base=TINY)
    for model in sorted(output.glob("hf-*")):
        for tp in LOGITS_TP:
            imported_logits(output, model, tp)
