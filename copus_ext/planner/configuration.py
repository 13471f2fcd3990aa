"""One way to run a step, and what is predicted for it. Frozen, JSON both ways, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.trainer.config import layer_partition
from megatron.trainer.config.layout import Layout

Recompute = Literal["none", "selective", "full", "block"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full", "block")
"""By the codes of `copus_ext.cost_model.rows`."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Layout, batch sizes and memory options of a step."""

    layout: Layout
    """How the ranks share the model."""
    micro_batch_size: int
    """Samples of a micro-batch."""
    global_batch_size: int
    """Samples of a step."""
    cp_comm_type: str | None = None
    """How ranks that share samples exchange keys and values, as `--cp-comm-type` has it; None
    where none do."""
    recompute: Recompute = "none"
    """Activations computed again: none, the core of the attention, every layer, or the first layers
    of every chunk."""
    recompute_num_layers: int = 0
    """How many layers of a chunk, with `block`."""
    logits_chunks: int = 1
    """Parts of a rank's tokens whose logits exist one after the other."""
    sequence_parallel: bool = False
    """Activations split over the sequence between tensor-parallel regions."""
    use_distributed_optimizer: bool = True
    """Optimizer state split over the copies of the weights."""
    overlap: bool = True
    """Gradients are reduced while the backward pass runs and, if they are split, weights are
    gathered while the forward pass does."""
    use_tp_pp_dp_mapping: bool = False
    """Ranks are numbered tensor, pipeline, data, in place of tensor, data, pipeline."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a replica and step; the last may be smaller."""
        return -(-self.global_batch_size // (self.layout.dp * self.micro_batch_size))

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches are of the same size."""
        return self.global_batch_size % (self.layout.dp * self.micro_batch_size) == 0

    @property
    def noise_unmeasurable(self) -> bool:
        """Whether the noise scale cannot be measured: one micro-batch on one replica, or all of
        it through one copy of each expert. (Experts of a dense model are as many as its
        copies, and ranks that share samples are one replica.)"""
        layout = self.layout
        is_single = layout.expert_data_parallel_size == 1 or (layout.cp > 1 and layout.dp == 1)
        return is_single and self.num_microbatches == 1

    def to_flags(self) -> list[str]:
        layout = self.layout
        flags = ["--tensor-model-parallel-size", str(layout.tp)]
        if layout.cp > 1:
            flags += ["--context-parallel-size", str(layout.cp)]
            flags += ["--cp-comm-type", self.cp_comm_type] if self.cp_comm_type else []
        flags += ["--pipeline-model-parallel-size", str(layout.pp)]
        flags += ["--expert-model-parallel-size", str(layout.ep)] if layout.ep > 1 else []
        flags += ["--expert-tensor-parallel-size", str(layout.etp)] if layout.etp else []
        if layout.layer_partition:
            flags += [
                layer_partition.FLAG,
                layer_partition.text_of_partition(layout.layer_partition),
            ]
        elif layout.vpp > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(layout.vpp)]
        flags += ["--micro-batch-size", str(self.micro_batch_size)]
        flags += ["--global-batch-size", str(self.global_batch_size)]
        if self.logits_chunks > 1:
            flags += ["--logits-chunks", str(self.logits_chunks)]
        if self.sequence_parallel:
            flags += ["--sequence-parallel"]
        if self.use_distributed_optimizer:
            flags += ["--use-distributed-optimizer"]
        if layout.copies > 1 and self.overlap:
            flags += ["--overlap-grad-reduce"]
            flags += ["--overlap-param-gather"] if self.use_distributed_optimizer else []
        if self.use_tp_pp_dp_mapping:
            flags += ["--use-tp-pp-dp-mapping"]
        if self.recompute == "full":
            flags += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
            flags += ["--recompute-num-layers", "1"]
        elif self.recompute == "block":
            flags += ["--recompute-granularity", "full", "--recompute-method", "block"]
            flags += ["--recompute-num-layers", str(self.recompute_num_layers)]
        elif self.recompute == "selective":
            flags += ["--recompute-granularity", "selective"]
        return flags

    @property
    def line(self) -> tuple[Any, ...]:
        """Everything that a measured time depends on, except the number of micro-batches."""
        return (
            *self.layout.sizes,
            self.layout.ep,
            self.layout.etp,
            self.layout.cp,
            self.cp_comm_type,
            self.micro_batch_size,
            self.recompute,
            self.recompute_num_layers,
            self.logits_chunks,
            self.sequence_parallel,
            self.use_distributed_optimizer,
            self.overlap,
            self.use_tp_pp_dp_mapping,
        )

    def with_num_microbatches(self, number: int) -> Configuration:
        """The same layout and micro-batch size with another global batch size."""
        return replace(self, global_batch_size=number * self.layout.dp * self.micro_batch_size)

    @property
    def recomputation(self) -> str:
        """Short text: `none`, `selective`, `full` or `block:3`."""
        count = f":{self.recompute_num_layers}" if self.recompute == "block" else ""
        return self.recompute + count

    def __str__(self) -> str:
        """One text that `--explain` reads back, such as `tp2.pp4.dp2,micro_batch=1,sp=1,zero=1`."""
        parts = [str(self.layout), f"micro_batch={self.micro_batch_size}"]
        parts += [f"cp_comm_type={self.cp_comm_type}"] if self.cp_comm_type else []
        parts += [f"recompute={self.recomputation}", f"sp={int(self.sequence_parallel)}"]
        parts.append(f"zero={int(self.use_distributed_optimizer)}")
        parts += [f"logits_chunks={self.logits_chunks}"] if self.logits_chunks > 1 else []
        parts += [] if self.overlap else ["overlap=0"]
        parts += ["use_tp_pp_dp_mapping=1"] if self.use_tp_pp_dp_mapping else []
        return ",".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, as `docs/plan.schema.json` names them."""
        how: dict[str, Any] = {"mode": self.recompute}
        if self.recompute == "block":
            how["num_layers"] = self.recompute_num_layers
        return {
            "cut": None,
            **self.layout.to_json(),
            "cp": self.layout.cp,
            **({"cp_comm_type": self.cp_comm_type} if self.cp_comm_type else {}),
            "micro_batch_size": self.micro_batch_size,
            "global_batch_size": self.global_batch_size,
            "num_microbatches": self.num_microbatches,
            "recompute": how,
            **({"logits_chunks": self.logits_chunks} if self.logits_chunks > 1 else {}),
            "sequence_parallel": self.sequence_parallel,
            "use_distributed_optimizer": self.use_distributed_optimizer,
            "overlap": self.overlap,
            "rank_order": "tp-cp-ep-pp-dp" if self.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        }
