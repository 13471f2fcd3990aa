"""The parallel layout of a run and the rules that make one legal."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron.training.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of a job share one model.

    Raises:
        ValueError: a size is not an integer of at least 1, or `vpp` is used without a pipeline.
    """

    tp: int = 1
    """Tensor parallel size: ranks that share each layer."""
    pp: int = 1
    """Pipeline parallel size: ranks that share the stack of layers."""
    vpp: int = 1
    """Virtual pipeline size: model chunks held by each pipeline rank; 1 means no interleaving."""
    dp: int = 1
    """Data parallel size: copies of the model, each reading other samples."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"layout size {field.name} must be an integer >= 1, got {value!r}")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} needs a pipeline (pp > 1)")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that hold one copy of the model."""
        return self.tp * self.pp

    def __str__(self) -> str:
        virtual = f".vpp{self.vpp}" if self.vpp > 1 else ""
        return f"tp{self.tp}.pp{self.pp}{virtual}.dp{self.dp}"

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """Inverse of `str`.

        Raises:
            ValueError: another form.
        """
        found = re.fullmatch(r"tp(\d+)\.pp(\d+)(?:\.vpp(\d+))?\.dp(\d+)", text)
        if not found:
            raise ValueError(f"{text!r} is no layout such as tp2.pp1.dp4")
        tp, pp, vpp, dp = (int(size or 1) for size in found.groups())
        return cls(tp=tp, pp=pp, vpp=vpp, dp=dp)

    def to_json(self) -> dict[str, int]:
        """Returns the four sizes as a JSON-safe dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: an unknown key or an illegal size.
        """
        unknown = sorted(set(data) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown layout keys: {', '.join(unknown)}")
        return cls(**data)

    @classmethod
    def from_world(cls, world_size: int, tp: int = 1, pp: int = 1, vpp: int = 1) -> Layout:
        """Gives the ranks that tensor and pipeline parallelism leave over to data parallelism.

        Raises:
            UsageError: the sizes do not divide the world, or are illegal by themselves.
        """
        names = (
            ("--tensor-model-parallel-size", tp),
            ("--pipeline-model-parallel-size", pp),
            ("--num-virtual-stages-per-pipeline-rank", vpp),
        )
        for flag, value in names:
            if value < 1:
                raise UsageError(f"{flag} {value} must be at least 1")
        if vpp > 1 and pp == 1:
            raise UsageError(
                f"{vpp} virtual pipeline stages need --pipeline-model-parallel-size of at least 2; "
                "raise it or drop the virtual pipeline flag"
            )
        if world_size % (tp * pp) != 0:
            raise UsageError(
                f"world size {world_size} is not divisible by --tensor-model-parallel-size {tp} x "
                f"--pipeline-model-parallel-size {pp} = {tp * pp}; start a multiple of {tp * pp} "
                "ranks or lower one of the two"
            )
        return cls(tp=tp, pp=pp, vpp=vpp, dp=world_size // (tp * pp))


def layout_problems(
    layout: Layout,
    *,
    num_layers: int,
    num_attention_heads: int,
    num_query_groups: int,
    ffn_hidden_size: int,
    seq_length: int,
    padded_vocab_size: int | None,
    sequence_parallel: bool,
    layers_per_stage_given: bool = False,
) -> list[str]:
    """Lists why a model cannot be laid out this way.

    Args:
        layout: the layout to judge.
        num_layers: transformer layers of the whole model.
        num_attention_heads: query heads of one layer.
        num_query_groups: key-value heads of one layer.
        ffn_hidden_size: width of the MLP.
        seq_length: tokens per sample.
        padded_vocab_size: rows of the embedding, or None while it is not known.
        sequence_parallel: whether activations are split over the sequence between tensor-parallel
            regions.
        layers_per_stage_given: whether the layers of each stage were given, so that they need not
            be equal.

    Returns:
        One sentence per broken rule, naming the flag, the values and the fix; empty if the layout
        is legal.
    """
    tp = layout.tp
    tp_fix = f"choose another --tensor-model-parallel-size (now {tp})"
    problems = []
    stages = layout.pp * layout.vpp
    if num_layers % stages != 0 and not layers_per_stage_given:
        problems.append(
            f"--num-layers {num_layers} cannot be cut into {layout.pp} pipeline ranks x "
            f"{layout.vpp} virtual stages evenly; use a multiple of {stages} or change "
            "--pipeline-model-parallel-size"
        )
    if num_attention_heads % tp != 0:
        problems.append(
            f"--num-attention-heads {num_attention_heads} is not divisible by {tp}; {tp_fix}"
        )
    if num_query_groups % tp != 0 and tp % num_query_groups != 0:
        problems.append(
            f"--num-query-groups {num_query_groups} neither divides nor is divided by {tp}; "
            f"{tp_fix}"
        )
    if ffn_hidden_size % tp != 0:
        problems.append(f"--ffn-hidden-size {ffn_hidden_size} is not divisible by {tp}; {tp_fix}")
    if sequence_parallel and seq_length % tp != 0:
        problems.append(
            f"--seq-length {seq_length} is not divisible by {tp} as --sequence-parallel needs; "
            f"{tp_fix}"
        )
    if padded_vocab_size is not None and padded_vocab_size % tp != 0:
        problems.append(
            f"the padded vocabulary of {padded_vocab_size} rows is not divisible by {tp}; start "
            f"the run with --pad-vocab-for-tensor-parallel-size {tp}"
        )
    return problems


def batch_problems(layout: Layout, micro_batch_size: int, global_batch_size: int) -> list[str]:
    """Lists why a global batch cannot be cut into micro-batches on this layout.

    Args:
        layout: the layout to judge.
        micro_batch_size: samples of one forward pass on one data-parallel rank.
        global_batch_size: samples of one optimizer step.

    Returns:
        One sentence per broken rule, naming the flag, the values and the fix; empty if it fits.
    """
    if micro_batch_size < 1 or global_batch_size < 1:
        return [
            f"--micro-batch-size {micro_batch_size} and --global-batch-size {global_batch_size} "
            "must both be at least 1"
        ]
    unit = micro_batch_size * layout.dp
    # The interleaved schedule works on groups of PP micro-batches and cannot cut the last one.
    group = layout.pp if layout.vpp > 1 else 1
    if global_batch_size % unit != 0:
        return [
            f"--global-batch-size {global_batch_size} is not divisible by --micro-batch-size "
            f"{micro_batch_size} x data parallel size {layout.dp} = {unit}; use "
            f"{_nearest_multiples(global_batch_size, unit * group)}"
        ]
    num_microbatches = global_batch_size // unit
    if num_microbatches % group != 0:
        return [
            f"--global-batch-size {global_batch_size} gives {num_microbatches} micro-batches, "
            f"which a virtual pipeline over {layout.pp} ranks cannot schedule; use "
            f"{_nearest_multiples(global_batch_size, unit * group)}"
        ]
    return []


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
