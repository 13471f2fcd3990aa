"""The checkpoint that is to be served: its model, its held-out text, what was measured on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from copus_ext.cost_model.megatron_flags import spec_of_arguments
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.extras.serving.export import load_written, written
from copus_ext.extras.serving.held_out import HeldOut, Text
from copus_ext.extras.serving.measure import measure
from copus_ext.extras.serving.sensitivity import FILE, Sensitivity
from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.formats import format_of
from megatron.trainer.common.errors import UsageError, VerificationFailed
from megatron.trainer.config.arguments import parse_args, with_checkpoint_args
from megatron.trainer.extras.generate.model import OpenedModel, open_model
from megatron.trainer.extras.inspect_checkpoint.archive import Archive, open_archive


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A model that was written, and its loss in nats per token before and after."""

    loss_before: float
    loss_after: float
    """Of the weights that were written, read back."""
    loss_increase: float
    standard_error: float
    notes: tuple[str, ...]


class Source:
    """A checkpoint and the text to measure its loss on.

    Raises:
        Refused: there is no complete checkpoint.
        UsageError: it is not a checkpoint, or does not say what it was trained on.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        step: int | None = None,
        device: str = "auto",
        trust_unverified: bool = False,
        data_path: Sequence[str] = (),
        split: str | None = None,
        num_samples: int,
    ) -> None:
        model = format_of(checkpoint)
        if not checkpoint.is_dir() or model is not None:
            what = "not a directory" if model is None else model.title
            raise UsageError(
                f"CHECKPOINT {checkpoint} is {what}; give the --save directory of a run"
            )
        self.device, self.trust_unverified = device, trust_unverified
        self.archive: Archive = open_archive(
            checkpoint, step=step, trust_unverified=trust_unverified
        )
        self.root, self.step = self.archive.folder.parent, self.archive.iteration
        self.text = Text.of_run(
            self.archive.arguments, data_path=data_path, split=split, num_samples=num_samples
        )

    @cached_property
    def model(self) -> ModelSpec:
        stored = self.archive.arguments
        args = with_checkpoint_args(parse_args(["--seq-length", str(self.text.seq_length)]), stored)
        args.padded_vocab_size = stored.get("padded_vocab_size")
        return spec_of_arguments(args)

    def open(self) -> AbstractContextManager[OpenedModel]:
        return open_model(
            self.root,
            step=self.step,
            device=self.device,
            trust_unverified=self.trust_unverified,
        )

    def settings(self, group_size: int) -> dict[str, Any]:
        manifest = self.archive.folder / files.MANIFEST
        data = manifest.read_bytes() if manifest.is_file() else b""
        return {
            "iteration": self.step,
            "manifest": hashlib.sha256(data).hexdigest(),
            "group_size": group_size,
            "text": self.text.to_json(),
        }

    def sensitivity(
        self,
        bits: Sequence[int],
        group_size: int,
        *,
        on_layer: Callable[[int, int], None] = lambda done, layers: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Sensitivity:
        """What the loss increases by, as measured before or now."""
        path, settings = self.root / FILE, self.settings(group_size)
        known = None
        if path.is_file():
            try:
                known = Sensitivity.read(path)
            except UsageError as error:
                tell(f"note: {error}; measuring again")
        if known is not None and known.settings == settings and _has(known, bits, self.model):
            tell(f"note: loss increases are those of {path}")
            return known
        can_write = True

        def keep(done: int, found: Sensitivity) -> None:
            nonlocal can_write
            on_layer(done, self.model.num_layers)
            try:
                if can_write:
                    found.write(path)
            except OSError as error:
                can_write = False
                tell(f"note: {path} cannot be written ({error.strerror}); nothing is kept")

        with self.open() as opened:
            return measure(
                HeldOut(opened, self.text),
                bits=bits,
                group_size=group_size,
                settings=settings,
                known=known,
                on_layer=keep,
            )

    def apply(
        self,
        destination: Path,
        bits: Sequence[int],
        group_size: int,
        *,
        max_loss_increase: float | None,
    ) -> Applied:
        """Writes the model with the bits of each layer, if its measured loss is within the limit.

        Raises:
            VerificationFailed: it is not, or the files differ from what they should be; then there
                is no `destination`.
        """
        with self.open() as opened:
            held_out = HeldOut(opened, self.text)
            before = held_out.losses()
            how = {"group_size": group_size, "trust_unverified": self.trust_unverified}
            with written(opened, destination, bits, **how) as made:
                load_written(opened, made)
                found = held_out.losses()
                increase, error = found.increase_over(before)
                if max_loss_increase is not None and not increase <= max_loss_increase:
                    raise VerificationFailed(
                        f"the loss with these bits is {found.mean:.5f}, {increase:.5f} more than "
                        f"the checkpoint's, above --max-loss-increase {max_loss_increase:g}; "
                        f"{destination} was not written; plan with a lower limit"
                    )
        return Applied(
            loss_before=before.mean,
            loss_after=found.mean,
            loss_increase=increase,
            standard_error=error,
            notes=made.notes,
        )


def _has(known: Sensitivity, bits: Sequence[int], model: ModelSpec) -> bool:
    layers = known.loss_increase
    wanted = {str(b) for b in bits if b != 16}
    return len(layers) == model.num_layers and all(wanted <= layer.keys() for layer in layers)
