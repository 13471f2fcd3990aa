"""Compares what every rank holds of a live model with what it should, under many layouts in the
same processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.jobs import EIGHT, LATENT, MOE, TINY, TINY_GPT2, layout_flags

SHARDED = "--use-distributed-optimizer"
BUCKETS = f"{SHARDED} --overlap-grad-reduce --ddp-bucket-size 5000"
ODD = "--hidden-size 96 --num-attention-heads 4 --ffn-hidden-size 200"
BASES = {"llama": TINY, "gpt2": TINY_GPT2, "moe": MOE}
LAYOUTS = [
    (1, 1, 1),
    (2, 1, 1),
    (4, 1, 1),
    (1, 2, 1),
    (1, 4, 1),
    (2, 2, 1),
    (1, 2, 2),
    (2, 2, 2),
]
VARIANTS = [
    ("llama", SHARDED),
    ("gpt2", SHARDED),
    ("llama", ""),
    ("gpt2", ""),
    ("llama", f"{ODD} {BUCKETS} --qk-layernorm"),
    ("gpt2", f"{ODD} {BUCKETS} --bf16 --qk-layernorm"),
    ("llama", f"{LATENT} --q-lora-rank 16 --qk-layernorm --mtp-num-layers 2 {BUCKETS}"),
]
MORE = [
    (2, 1, 1, "llama", f"{SHARDED} --use-tp-pp-dp-mapping"),
    (1, 2, 1, "gpt2", f"{BUCKETS} --use-tp-pp-dp-mapping"),
    (1, 2, 1, "llama", "--use-tp-pp-dp-mapping"),
    (2, 1, 1, "llama", f"{BUCKETS} --overlap-param-gather --bf16 --add-qkv-bias"),
    (4, 1, 1, "gpt2", f"{SHARDED} --num-query-groups 2"),
    (1, 1, 1, "llama", f"{SHARDED} --overlap-grad-reduce"),
    (1, 2, 2, "llama", "--overlap-grad-reduce --ddp-bucket-size 5000 --bf16"),
    (2, 1, 1, "llama", f"{LATENT} --normalization LayerNorm --qk-layernorm {SHARDED}"),
    (1, 2, 1, "gpt2", f"--quick-geglu --apply-layernorm-1p --decoupled-lr 5e-3 {BUCKETS}"),
]
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
SHARING = [
    (1, 1, 1, "llama", f"{BUCKETS} {CP2}"),
    (1, 1, 1, "gpt2", f"{SHARDED} {CP4}"),
    (2, 1, 1, "llama", f"{BUCKETS} {CP2} --sequence-parallel"),
    (1, 2, 1, "gpt2", f"{SHARDED} {CP2} --use-tp-pp-dp-mapping"),
    (1, 2, 2, "llama", f"{BUCKETS} {CP2} --overlap-param-gather --bf16"),
    (1, 1, 1, "moe", f"{SHARDED} {CP2} --expert-model-parallel-size 4"),
]
CUTS = [
    (1, 2, 1, "llama", f"{SHARDED} --pipeline-model-parallel-layout Ettt|tL"),
    (1, 2, 1, "llama", f"{SHARDED} --pipeline-model-parallel-layout Et*4|mL --mtp-num-layers 1"),
    (2, 2, 1, "gpt2", f"{BUCKETS} --pipeline-model-parallel-layout Et|tttL"),
    (1, 2, 1, "gpt2", f"{BUCKETS} --bf16 --pipeline-model-parallel-layout E|tt|t|tL"),
    (1, 4, 1, "llama", "--account-for-loss-in-pipeline-split --num-layers 7"),
    (1, 4, 1, "gpt2", f"{SHARDED} --pipeline-model-parallel-layout E|ttt|t|L"),
]
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
ALONE, GATHERED = "--expert-tensor-parallel-size 1", "--moe-token-dispatcher-type allgather"
SHARED_EXPERT = "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
EXPERTS = [
    (1, 1, 1, "moe", SHARDED),
    (1, 1, 1, "moe", f"{BUCKETS} {EP2} {SHARED_EXPERT}"),
    (1, 1, 1, "moe", f"{SHARDED} {EP4} {SIGMOID}"),
    (2, 1, 1, "moe", SHARDED),
    (2, 1, 1, "moe", f"{BUCKETS} {EP2} {ALONE} --bf16 --moe-layer-freq [0]*1+[1]*3"),
    (2, 1, 1, "moe", f"{SHARDED} {EP4} {ALONE} {SHARED_EXPERT}"),
    (2, 1, 1, "moe", f"{EP2} {ALONE}"),
    (1, 1, 1, "moe", f"{SHARDED} {EP2} --expert-tensor-parallel-size 2 {GATHERED}"),
    (4, 1, 1, "moe", f"{SHARDED} {EP2} --expert-tensor-parallel-size 2 {GATHERED}"),
    (1, 2, 1, "moe", f"{BUCKETS} {EP2} --moe-layer-freq 2"),
    (2, 2, 1, "moe", f"{SHARDED} {EP2} {ALONE} --use-tp-pp-dp-mapping"),
    (1, 2, 2, "moe", f"{BUCKETS} {EP2} {SHARED_EXPERT} --moe-layer-freq 2 --add-qkv-bias"),
    (1, 4, 1, "moe", f"{SHARDED} --moe-layer-freq [0,1,0,1]"),
    (1, 2, 1, "moe", f"{BUCKETS} {EP2} --mtp-num-layers 1"),
    (2, 1, 1, "gpt2", f"{BUCKETS} {EIGHT} {EP2} {ALONE}"),
]
THREE_RANKS = [
    (1, 1, 1, "llama", f"{SHARDED} --global-batch-size 6"),
    (1, 1, 1, "gpt2", f"{ODD} {BUCKETS} --global-batch-size 6"),
    (1, 3, 1, "gpt2", f"{BUCKETS} --num-layers 3"),
]
PAIRS = [(*layout, *variant) for layout in LAYOUTS for variant in VARIANTS]
NUM_DAILY = len(PAIRS[::4]) + len([*MORE, *SHARING, *CUTS, *EXPERTS])
"""Those of four ranks that every commit has. They have each layout and each variant."""
CASES = {
    4: PAIRS[::4]
    + [*MORE, *SHARING, *CUTS, *EXPERTS]
    + [pair for number, pair in enumerate(PAIRS) if number % 4],
    3: THREE_RANKS,
}
MISTAKES: dict[str, dict[str, Any]] = {
    "parameter alignment": {"PARAMETER_ALIGNMENT": 32},
    "bucket alignment": {"BUCKET_ALIGNMENT": 64},
    "bucket size": {"ddp_bucket_size": 4000},
    "order": {"fused_norm": True},
    "sharded": {"use_distributed_optimizer": None},
    "numbering": {"use_tp_pp_dp_mapping": None},
    "tied": {"tied": None},
    "rows": {"gated": None},
}
"""What the comparison must see: a constant or a field of the shape; None turns a switch over."""


@contextmanager
def mistaken(shape: Any, mistake: dict[str, Any]) -> Iterator[Any]:
    """The shape with a mistake in it, or in the constants meanwhile."""
    from copus_ext.reshard import ownership

    ((name, value),) = mistake.items()
    if name.isupper():
        right = getattr(ownership, name)
        setattr(ownership, name, value)
        yield shape
        setattr(ownership, name, right)
    else:
        value = not getattr(shape, name) if value is None else value
        yield dataclasses.replace(shape, **{name: value})


def compare(config: Any, groups: Any, device: Any) -> list[dict[str, Any]]:
    """Builds model and optimizer, reads them and asks their twin; a row of each rank."""
    import torch.distributed as dist

    from copus_ext.reshard.ownership import all_of_layout
    from copus_ext.reshard.parameters import shape_of
    from megatron.trainer.distributed.sharding import digest
    from megatron.trainer.model.gpt import build_model
    from megatron.trainer.model.shards import local_shards
    from megatron.trainer.optim.optimizer import build_optimizer

    rank, layout, shape = dist.get_rank(), config.layout, shape_of(config)
    model = build_model(config, groups, device)
    shards = local_shards(model, build_optimizer(config, model, groups), groups)
    model.detach_hooks()
    sizes = [0] * len(shards.tensors)
    for record in shards.records:
        sizes[record.shard] += record.numel
    mistakes = {}
    for name, mistake in MISTAKES.items():
        with mistaken(shape, mistake) as wrong:
            try:
                mistakes[name] = digest(all_of_layout(wrong, layout)[rank])
            except ValueError:  # such a model cannot be laid out so
                mistakes[name] = "refused"
    row = {
        "live": digest(shards.records),
        "twin": digest(all_of_layout(shape, layout)[rank]),
        "all": [digest(records) for records in all_of_layout(shape, layout)],
        "mistakes": mistakes,
        "covered": sizes == [held["param"].numel() for held in shards.tensors],
        "in_order": shards.records == all_of_layout(shape, layout)[rank],
    }
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    return rows


def main(output: Path, *words: str) -> Any:
    import torch.distributed as dist

    from megatron.trainer.checkpoint.resume import merge_resume_config
    from megatron.trainer.common.device import use_device
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.distributed.process_groups import build_groups, destroy_groups

    cases, before = [], None
    with use_device("cpu", local_rank=0, backend="gloo") as device:
        chosen = CASES[dist.get_world_size()]
        for tp, pp, vpp, model, more in chosen if words else chosen[:NUM_DAILY]:
            flags = [*BASES[model].split(), *layout_flags(tp, pp, vpp), *more.split()]
            args = parse_args([*flags, "--train-iters", "1"])
            config = merge_resume_config(resolve(args, dist.get_world_size()), None, vocab_size=127)
            wanted = (config.layout, config.parallel.use_tp_pp_dp_mapping)
            if wanted != before:
                if before:
                    destroy_groups()
                layout, mapping = before = wanted
                groups = build_groups(layout, timeout_minutes=2, use_tp_pp_dp_mapping=mapping)
            cases.append(compare(config, groups, device))
        destroy_groups()
    return cases
