"""How far a launch came, from the end of the run's record. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.config.layout import Layout
from megatron.training.logging.metrics import METRICS_FILE, decode
from megatron.training.logging.tail_reader import Tail, last_lines

_MOST_BYTES = 1 << 19
"""Read from the end of the record: some thousand steps, many more than entering a layout counts."""
_MOST_BYTES_OF_ALL = 1 << 28
"""Looked through for the few events that say how a checkpoint was saved."""
_SAVING = (b"run.start", b"layout", b"checkpoint.commit")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a launch did."""

    step: int | None = None
    """Last step that was done; None if there was none."""
    entered: list[tuple[Layout, int]] = field(default_factory=list)
    """Layouts it took on lately, each with the steps done before."""


def progress_of(run_dir: Path, launch: str) -> Progress:
    """What the record says of a launch; nothing, if it cannot be read."""
    step: int | None = None
    entered: list[tuple[Layout, int]] = []
    for record in Tail(run_dir / METRICS_FILE, most_bytes=_MOST_BYTES).records():
        iteration = record.get("iteration")
        if record.get("launch") != launch or not isinstance(iteration, int):
            continue
        if record.get("kind") == "step":
            step = iteration
        elif record.get("kind") in ("run.start", "layout"):
            layout = _layout_of(record.get("layout"))
            if layout is not None:
                entered.append((layout, iteration))
    return Progress(step=step, entered=entered)


def saved_with(run_dir: Path, save: Path, iteration: int) -> dict[str, Any] | None:
    """The flags that a checkpoint was saved with, if the record tells; spares reading the
    checkpoint.

    Args:
        run_dir: directory of the run.
        save: where the checkpoint is.
        iteration: of the checkpoint.
    """
    now: dict[str, Any] | None = None
    found: dict[str, Any] | None = None
    for record in _records_of_saving(run_dir / METRICS_FILE):
        kind, layout = record.get("kind"), _layout_of(record.get("layout"))
        if kind == "run.start":
            config = record.get("config")
            folder = config.get("save") if isinstance(config, dict) else None
            is_there = isinstance(folder, str) and Path(folder).resolve() == save.resolve()
            now = config if is_there else None
        if kind in ("run.start", "layout") and now is not None and layout is not None:
            now = {
                **now,
                "tensor_model_parallel_size": layout.tp,
                "pipeline_model_parallel_size": layout.pp,
                "virtual_pipeline_model_parallel_size": layout.vpp,
                "data_parallel_size": layout.dp,
                "layers_of_chunks": layout.layer_partition,
            }
        elif kind == "checkpoint.commit" and record.get("iteration") == iteration:
            found = now
    return found


def _records_of_saving(path: Path) -> Iterator[dict[str, Any]]:
    """Those of the whole record, which may begin days before its last steps."""
    for line in last_lines(path, _MOST_BYTES_OF_ALL):
        if any(kind in line for kind in _SAVING):
            record = decode(line.decode(errors="replace"))
            if record is not None:
                yield record


def _layout_of(text: Any) -> Layout | None:
    try:
        return Layout.from_text(text) if isinstance(text, str) else None
    except ValueError:
        return None
