"""What the flags of a draft say about the stages of its pipeline."""

from __future__ import annotations

from megatron.training.common.errors import UsageError
from megatron.training.config.draft import Draft
from megatron.training.config.layer_partition import (
    FLAG,
    partition_of_ends,
    partition_of_text,
    partition_with_ends_counted,
)
from megatron.training.config.layout import Layout

_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def virtual_size(draft: Draft, pp: int) -> int:
    """Model chunks of every pipeline rank.

    Args:
        draft: with its flags as they were given.
        pp: stages.

    Raises:
        UsageError: flags that exclude each other, or layers that cannot be cut so.
    """
    _exclude(draft)
    if draft["pipeline_model_parallel_layout"] is not None:
        return _chunks_of_text(draft, pp)
    layers, stages = (draft[name] for name in _VIRTUAL)
    if layers is None:
        return stages or 1
    counted = draft["num_layers"] + sum(draft[name] for name in _COUNTED)
    if pp < 1 or counted % (pp * layers) != 0:
        raise UsageError(
            f"--num-layers {draft['num_layers']} cannot be cut into {pp} pipeline ranks with "
            f"chunks of --num-layers-per-virtual-pipeline-stage {layers}; choose a divisor of the "
            f"layers per rank"
        )
    return counted // (pp * layers)


def partition_of_flags(draft: Draft, layout: Layout) -> tuple[int, ...] | None:
    """Layers of every chunk; None where the flags leave them equal.

    Args:
        draft: with its flags as they were given.
        layout: their sizes.

    Raises:
        UsageError: a cut that is none of this model.
    """
    shared = {"num_layers": draft["num_layers"], "pp": layout.pp, "vpp": layout.vpp}
    text = draft["pipeline_model_parallel_layout"]
    if text is not None:
        cut = _cut_of_text(draft, text)
        if 0 in cut[1:-1]:
            raise UsageError(f"{FLAG} {text}: every chunk but the first and the last needs a t")
        return cut
    first, last = (draft[name] for name in _ENDS)
    if first is not None or last is not None:
        return partition_of_ends(**shared, first=first, last=last)
    embedding, loss = (draft[name] for name in _COUNTED)
    if embedding or loss:
        return partition_with_ends_counted(**shared, embedding=embedding, loss=loss)
    return None


def _chunks_of_text(draft: Draft, pp: int) -> int:
    text = draft["pipeline_model_parallel_layout"]
    chunks = len(_cut_of_text(draft, text))
    if pp < 1 or chunks % pp != 0 or (pp == 1 and chunks > 1):
        raise UsageError(
            f"{FLAG} {text} has {chunks} chunks, no multiple of --pipeline-model-parallel-size "
            f"{pp}; change one of the two"
        )
    return chunks // pp


def _cut_of_text(draft: Draft, text: str) -> tuple[int, ...]:
    further = draft["mtp_num_layers"] or 0
    return partition_of_text(text, num_layers=draft["num_layers"], mtp_num_layers=further)


def _exclude(draft: Draft) -> None:
    """Raises: of flags that say the same in two ways, two were given."""
    ways = [_VIRTUAL[:1], _VIRTUAL[1:]]
    if draft["pipeline_model_parallel_layout"] is not None:
        ways = [("pipeline_model_parallel_layout",), *ways, _ENDS, _COUNTED]
    elif any(draft[name] is not None for name in _ENDS):
        ways = [_ENDS, _VIRTUAL[:1], _COUNTED]
    given = [
        [f"--{name.replace('_', '-')}" for name in names if draft[name] not in (None, False)]
        for names in ways
    ]
    told = [names[0] for names in given if names]
    if len(told) > 1:
        raise UsageError(f"{' and '.join(told)} exclude each other; drop one")
