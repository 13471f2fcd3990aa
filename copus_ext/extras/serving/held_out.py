"""The loss of an opened model on held-out text, sample by sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.trainer.common.errors import UsageError
from megatron.trainer.data.dataloader import BatchReader
from megatron.trainer.data.datasets import build_datasets
from megatron.trainer.extras.generate.model import OpenedModel

_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_KEPT = ("split", "mock_data", "data_cache_path", "reset_position_ids", "eod_mask_loss")
_FIX = "give held-out text with --data-path"
_MICRO_BATCH = 8
"""Samples that pass at once."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Of the same samples, so that two of them differ by the weights alone."""

    sums: torch.Tensor
    """[samples] sum over tokens, fp64."""
    counts: torch.Tensor
    """[samples] tokens that count."""

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.counts.sum())

    def increase_over(self, other: Losses) -> tuple[float, float]:
        """How much more than another model's, and the standard error of that over samples."""
        each = (self.sums - other.sums) * (len(self.sums) / float(self.counts.sum()))
        spread = float(each.std(correction=1)) if len(each) > 1 else 0.0
        return float(each.mean()), spread / len(each) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Text:
    """Which text, before it is opened."""

    flags: dict[str, Any]
    """Fields of the trainer's `DataConfig`."""
    seq_length: int
    seed: int
    num_samples: int

    @classmethod
    def of_run(
        cls,
        arguments: Mapping[str, Any],
        *,
        data_path: Sequence[str] = (),
        split: str | None = None,
        num_samples: int,
    ) -> Text:
        """The held-out split of a run, or of other data.

        Raises:
            UsageError: the checkpoint does not say what it was trained on.
        """
        flags = {name: arguments[name] for name in _KEPT if arguments.get(name) is not None}
        flags |= {"mock_data": bool(flags.get("mock_data")), **dict.fromkeys(_PATHS)}
        if data_path:
            flags |= {"data_path": tuple(data_path), "mock_data": False}
        for name in () if data_path else _PATHS:
            words = arguments.get(name)
            words = words.split() if isinstance(words, str) else words
            flags[name] = tuple(words) if words else None
        if not flags["mock_data"] and not any(flags[name] for name in _PATHS):
            raise UsageError(f"the checkpoint does not say what it was trained on; {_FIX}")
        if split is not None:
            flags["split"] = split
        length = arguments.get("seq_length") or arguments["max_position_embeddings"]
        seed = arguments.get("seed")
        return cls(
            flags=flags,
            seq_length=int(length),
            seed=1234 if seed is None else int(seed),
            num_samples=num_samples,
        )

    def to_json(self) -> dict[str, Any]:
        paths = {n: list(self.flags[n]) for n in _PATHS if self.flags[n]}
        shown = {"mock_data": True} if self.flags["mock_data"] else paths
        return {
            **shown,
            "split": self.flags.get("split"),
            "seed": self.seed,
            "seq_length": self.seq_length,
            "num_samples": self.num_samples,
        }


class HeldOut:
    """Held-out samples of an opened model.

    Raises:
        UsageError: there is no such text; names the flag.
    """

    def __init__(self, opened: OpenedModel, text: Text) -> None:
        self.opened, self.num_samples = opened, text.num_samples
        try:
            built = build_datasets(
                dataclasses.replace(opened.config.data, **text.flags),
                seq_length=text.seq_length,
                seed=text.seed,
                tokenizer=opened.tokenizer,
                num_samples=(0, text.num_samples, 0),
            )
        except UsageError as error:
            raise UsageError(f"{error}; {_FIX}") from error
        if built.valid is None:
            raise UsageError(f"there is no held-out text ({'; '.join(built.notes)}); {_FIX}")
        self._reader = BatchReader(built.valid)

    @torch.no_grad()
    def losses(self) -> Losses:
        (chunk,) = self.opened.model.chunks
        sums, counts = [], []
        for batch in self._reader.read_evaluation(
            num_samples=self.num_samples,
            start=0,
            micro_batch_size=min(_MICRO_BATCH, self.num_samples),
            dp_rank=0,
            dp_size=1,
        ):
            batch = {name: t.to(self.opened.device) for name, t in batch.items()}
            mask = batch["loss_mask"].double()
            ids, places = batch["tokens"], batch["position_ids"]
            found = chunk(ids, places, None, labels=batch["labels"], loss_mask=batch["loss_mask"])
            sums.append((found.double() * mask).sum(dim=1).cpu())
            counts.append(mask.sum(dim=1).cpu())
        used = slice(0, self.num_samples)
        return Losses(sums=torch.cat(sums)[used], counts=torch.cat(counts)[used])
