"""What a plan leaves out that Megatron-LM does, and what Megatron-LM has none of."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.model_spec import ModelSpec, divisors
from copus_ext.planner.explain import GIB
from copus_ext.planner.run_flags import parsed_flags, uneven_stages
from copus_ext.planner.suited import software_flags

if TYPE_CHECKING:
    from copus_ext.planner.search import Planner

NO_MASK = "--no-create-attention-mask-in-dataloader"
_MATTERS = 0.01
"""Share of a GPU's memory from which on the data loader's mask is worth a warning."""


def flags_before(args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> list[str]:
    """What comes before the flags of a row: the software that it was priced for, and that no data
    loader makes masks, where the flags of the run do not say so. None for CPU ranks."""
    no_mask = [] if cluster.is_gloo or _lacks_masks(args) else [NO_MASK]
    return [*software_flags(args, model, cluster), *no_mask]


def _lacks_masks(args: argparse.Namespace) -> bool:
    if args.megatron_args is None:
        return False
    return not parsed_flags(args.megatron_args).create_attention_mask_in_dataloader


def mask_line(args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> str:
    """That the command makes masks whose bytes no row counts; empty where it makes none, or small
    ones."""
    if args.launched is None or cluster.is_gloo or _lacks_masks(args):
        return ""
    samples = parsed_flags(args.megatron_args).micro_batch_size or 1
    size = samples * model.seq_length**2
    if size <= _MATTERS * cluster.gpu.memory_bytes:
        return ""
    return (
        f"Megatron-LM's data loader makes an attention mask of {size / GIB:.3g} GiB on the GPU for "
        f"each micro-batch ({samples} x {model.seq_length} x {model.seq_length} bytes, and four "
        f"times that on the host), which nothing here counts; add {NO_MASK}"
    )


def uneven_line(args: argparse.Namespace, planner: Planner) -> str:
    """That pipelines with stages of unequal length, as the command has one, were not compared, and
    their sizes; empty where it has stages of equal length."""
    if args.launched is None:
        return ""
    given, layers = parsed_flags(args.megatron_args), planner.model.num_layers
    flags, pp = uneven_stages(given), given.pipeline_model_parallel_size or 1
    if not flags and layers % pp == 0:
        return ""
    own = ", ".join(flags) or f"{layers} layers in {pp} stages"
    sizes = [x for x in divisors(planner.cluster.world_size) if x <= layers and layers % x]
    sizes = [str(x) for x in sizes if planner.limits.allows(pp=x)]
    also = f", nor are pipeline sizes {', '.join(sizes)}, which do not divide the {layers} layers"
    return (
        f"stages of unequal length, as in your command ({own}), are not compared"
        f"{also if sizes else ''}: the cost model has equal ones alone. Megatron-LM runs them, and "
        "one may be faster than row 1"
    )


def warnings_on(args: argparse.Namespace, planner: Planner) -> list[str]:
    """What Megatron-LM does, or may do, with the command of which the answer knows nothing."""
    masks = mask_line(args, planner.model, planner.cluster)
    return [line for line in (uneven_line(args, planner), masks) if line]
