"""The flags that send gradients and messages between stages in fewer numbers, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.trainer.config.draft import Draft, Environment, flag_of
from megatron.trainer.config.fields import option
from megatron.trainer.config.layout import Layout


@dataclass(frozen=True, kw_only=True)
class SlowLinksConfig:
    """Flags of the extra."""

    pipeline_message_bits: int | None = option(None, choices=(8,))
    """Bits of a number in messages between pipeline stages. 8 rounds them, which changes the
    training. Default: as they are."""
    pipeline_message_rank: int | None = option(None)
    """Columns of the two factors in place of a gradient between pipeline stages, in the messages
    at the end of a step that nothing hides. Changes the training. Default: whole."""
    grad_compression_rank: int = option(0)
    """Columns of the two factors (PowerSGD) in place of the gradient of a matrix, where replicas
    exchange gradients. Changes the training. Vectors, embeddings, output layer and experts stay
    whole. 0: all stay whole."""
    grad_compression_stages: int | None = option(None)
    """Pipeline stages whose gradients --grad-compression-rank compresses, from the first. Default:
    all."""


def check_slow_links(draft: Draft, environment: Environment) -> None:
    """Notes what shorter gradients and messages do not go with, and what they mean for the run;
    see `Extra.check`."""
    most = _max_stages(draft)
    _check_messages(draft, most)
    rank, stages = draft["grad_compression_rank"], draft["grad_compression_stages"]
    flag = f"--grad-compression-rank {rank}"
    draft.require(rank >= 0, f"{flag} must not be negative; use 0 for whole gradients")
    draft.require(
        stages is None or stages >= 1,
        f"--grad-compression-stages {stages} must be at least 1; use --grad-compression-rank 0 for "
        "whole gradients",
    )
    draft.require(
        stages is None or rank != 0,
        "--grad-compression-stages needs --grad-compression-rank; give both",
    )
    if rank <= 0:
        return
    for name, why in (
        ("fp16", "residuals would keep an old loss scale; use --bf16"),
        ("calculate_per_token_loss", "residuals would keep an old number of tokens"),
    ):
        draft.require(not draft[name], f"{flag} excludes {flag_of(name)}: {why}; drop one")
    replicas = draft["data_parallel_size"] * draft["context_parallel_size"]
    idle = "; without effect while no ranks share gradients" if replicas == 1 else ""
    draft.notes.append(
        f"{flag} changes the training by an unknown amount. A new launch and a change of layout "
        f"drop what is not sent yet{idle}"
    )
    if stages is not None and stages > most:
        draft.notes.append(
            f"--grad-compression-stages {stages} is more than --pipeline-model-parallel-size "
            f"{most}: all stages compress"
        )


def _max_stages(draft: Draft) -> int:
    """Pipeline stages of the layout that has most, over all that the run is to take."""
    # Phases are checked before, in the order of names.
    later = [Layout.from_text(text).pp for text in draft.values.get("phase_layouts", ())]
    return max(draft["pipeline_model_parallel_size"], *later, 1)


def _check_messages(draft: Draft, stages: int) -> None:
    """Notes what messages of low rank do not go with, in a run of at most some stages."""
    rank, bits = draft["pipeline_message_rank"], draft["pipeline_message_bits"]
    if rank is None:
        return
    flag = f"--pipeline-message-rank {rank}"
    draft.require(rank >= 1, f"{flag} must be at least 1; drop it for whole messages")
    draft.require(bits is None, f"{flag} excludes --pipeline-message-bits {bits}; drop one")
    draft.require(
        draft["virtual_pipeline_model_parallel_size"] == 1,
        f"{flag} knows the end of a plain pipeline only; drop virtual stages, or the flag",
    )
    draft.require(
        not draft["fp16"],
        f"{flag} excludes --fp16: factors carry the norm of the whole gradient, which overflows; "
        "use --bf16",
    )
    idle = "; without effect while the pipeline has one stage" if stages == 1 else ""
    draft.notes.append(f"{flag} changes the training by an unknown amount{idle}")


def layout_problems(arguments: Mapping[str, Any], layout: Layout) -> list[str]:
    """See `Extra.layout_problems`."""
    rank = arguments.get("grad_compression_rank") or 0
    if rank <= 0 or not arguments.get("overlap_grad_reduce"):
        return []
    return [
        f"--grad-compression-rank {rank} excludes --overlap-grad-reduce: factors are of whole "
        "gradients, and the flag reduces parts early; drop one"
    ]


def controller_problems(arguments: Mapping[str, Any], moves: bool) -> list[str]:
    """See `Extra.controller_problems`. Under one layout the factor is in every batch's goodput, and
    cancels."""
    lossy = ("grad_compression_rank", "pipeline_message_rank")
    return [
        f"{flag_of(name)} costs progress by an unknown factor that depends on the layout; use "
        "--copus-layouts current, --copus-mode observe, or drop it"
        for name in lossy
        if moves and arguments.get(name)
    ]
