"""The configuration of a run under another layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layer_partition import text_of_partition
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import layout_problems, recompute_problems

if TYPE_CHECKING:
    from megatron.trainer.config import Config


def with_layout(config: Config, layout: Layout) -> Config:
    """The same run on the same ranks under another layout; depends on the flags and the layout
    alone, not on the layouts between.

    Sequence parallelism follows the flags. Where they give neither it nor a tensor size, it is on
    wherever it can be.

    Raises:
        UsageError: the model cannot be laid out this way; a line per problem.
    """
    if layout.world_size != config.layout.world_size:
        raise UsageError(f"{layout} is for {layout.world_size} ranks, not for this job's")
    model = config.model
    sequence_parallel = is_sequence_parallel(config, layout)
    overlap = "overlap_p2p_comm" not in config.explicit and layout.vpp > 1
    problems = layout_problems(
        layout,
        config.flat(),
        seq_length=config.segment.seq_length,
        sequence_parallel=sequence_parallel,
        knows_vocabulary=model.padded_vocab_size is not None,
    )
    if config.recompute.recompute_granularity == "full" and not problems:
        problems += recompute_problems(
            layout,
            num_layers=model.num_layers,
            method=config.recompute.recompute_method,
            recompute_num_layers=config.recompute.recompute_num_layers or 0,
        )
    if layout.vpp > 1 and layout.pp == 2 and not overlap:
        problems.append("--no-overlap-p2p-communication excludes a virtual pipeline over 2 ranks")
    if problems:
        raise UsageError("\n".join(problems))
    return config.replace(
        **layout_fields(layout, model.mtp_num_layers or 0),
        sequence_parallel=sequence_parallel,
        overlap_p2p_comm=overlap,
    )


def wants_sequence_parallel(config: Config) -> bool:
    """Whether a run cuts its activations over tensor-parallel ranks wherever it can: its flags say
    so or name no tensor size, or its model needs it."""
    return _needs_sequence_parallel(config) or "tensor_model_parallel_size" not in config.explicit


def is_sequence_parallel(config: Config, layout: Layout) -> bool:
    """Whether a run cuts its activations over the tensor-parallel ranks of a layout."""
    divides = config.segment.seq_length % (layout.tp * layout.cp) == 0
    cuts = _needs_sequence_parallel(config) or (divides and wants_sequence_parallel(config))
    return layout.tp > 1 and cuts


def _needs_sequence_parallel(config: Config) -> bool:
    has_experts = config.moe.num_experts is not None
    is_asked = "sequence_parallel" in config.explicit
    return is_asked or config.model.multi_latent_attention or has_experts


UNEVEN_FIELDS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "layers_of_chunks",
)
"""Fields of `layout_fields` that a checkpoint of Megatron-LM may not know."""


def layout_fields(layout: Layout, mtp_num_layers: int) -> dict[str, Any]:
    """The fields of a configuration that name a layout."""
    return {
        **layout.to_arguments(),
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": (
            text_of_partition(layout.layer_partition, mtp_num_layers)
            if layout.layer_partition
            else None
        ),
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
