"""The journal of a run's decisions: one JSON line each, written before the decision is applied and
never changed."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.headroom import Headroom
from copus_ext.goodput.inputs import PRESENT, Decision, DecisionInputs
from copus_ext.goodput.messages import decision_scalars, outcome_scalars
from megatron.training.common.control import PAUSE_FILE
from megatron.training.common.outside import parse_json

logger = logging.getLogger(__name__)

NAME = "journal.jsonl"
VERSION = 4
"""4: decisions by the rules of docs/decisions/067 and 069; older ones may come out as others."""
_POSITIONS = (
    "consumed_samples",
    "hold_growth_until_samples",
    "hold_shrinking_until_samples",
)
"""Fields of a record that are positions of the run. What is inside of a decision stays in samples
of its phase, so that it can be made again."""


class DecisionLog:
    """Appends records to `<run>/journal.jsonl`; a kill loses at most the line being written. Keeps
    the numbers of decisions and outcomes for the metric sinks.

    Args:
        run_dir: of the run; None writes nothing, as on all ranks but 0.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self.path: Path | None = None
        self.open(run_dir)
        self._scalars: dict[str, float] = {}
        self._ratio, self._rest = 1, 0
        self._was_paused = False

    def open(self, run_dir: Path | None) -> None:
        """Writes to the journal of a run from here on."""
        self.path = None if run_dir is None else run_dir / NAME

    def count_from(self, *, ratio: int, rest: int) -> None:
        """Says which samples positions are given in from here on. The journal itself counts as the
        run does, in samples of the first phase.

        Args:
            ratio: samples of the run that one sample of the phase is.
            rest: what the position of the run leaves over when it is divided by `ratio`; the same
                at every step of a phase.
        """
        self._ratio, self._rest = ratio, rest

    def append(self, kind: str, **fields: Any) -> None:
        """Writes a record and waits until it is on disk.

        Args:
            kind: `start`, `decision`, `outcome`, `conditions`, `spike`, `paused`,
                `resumed`, `phase`, `failure` or `end`; for a change of layout `switch` and
                `switch.requested`, `.begin`, `.commit`, `.cancelled` or `.abandoned`.
            fields: plain JSON types; positions in samples of the present phase.

        Raises:
            OSError: it cannot be written.
            ValueError: a number is not finite.
        """
        if self.path is None:
            return
        for name in _POSITIONS:
            if fields.get(name) is not None:
                fields[name] = fields[name] * self._ratio + self._rest
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        record = {"kind": kind, "version": VERSION, "time": now, **fields}
        text = json.dumps(record, allow_nan=False) + "\n"
        is_cut = self.path.exists() and self.path.stat().st_size > 0 and not _ends_well(self.path)
        with self.path.open("a") as file:
            # A line that a kill cut short ends here, so that it spoils no other.
            file.write("\n" * is_cut + text)
            file.flush()
            os.fsync(file.fileno())

    def note(self, kind: str, **fields: Any) -> None:
        """Writes a record that nothing depends on: a failure is only a warning."""
        try:
            self.append(kind, **fields)
        except (OSError, ValueError) as error:
            logger.warning("the journal cannot be written: %s", error)

    def look_for_pause(self, run_dir: Path | None, *, iteration: int) -> bool:
        """Whether an operator has paused decisions; a change of that is recorded."""
        is_paused = run_dir is not None and (run_dir / PAUSE_FILE).exists()
        if is_paused != self._was_paused:
            self._was_paused = is_paused
            self.note("paused" if is_paused else "resumed", iteration=iteration)
        return is_paused

    def record_decision(
        self,
        inputs: DecisionInputs,
        decision: Decision,
        *,
        number: int,
        applied: bool,
        seconds: float,
        headroom: Headroom | None = None,
    ) -> None:
        """Writes a decision with its inputs.

        Args:
            inputs: all that it depends on.
            decision: what to do.
            number: of the decision, from 1.
            applied: whether the run makes the change.
            seconds: that it took to decide.
            headroom: what is to be gained in the rest of the run; None if unknown.

        Raises:
            OSError: it is not on disk.
        """
        self.append(
            "decision",
            number=number,
            iteration=inputs.iteration,
            consumed_samples=inputs.consumed_samples,
            applied=applied,
            seconds=seconds,
            headroom=headroom and headroom.to_json(),
            situation=inputs.to_json(),
            decision=decision.to_json(),
        )
        self._keep(lambda: decision_scalars(inputs, decision, number=number))

    def record_outcome(self, change: ConfigChange, *, num_changes: int) -> None:
        """Writes a change with its outcome.

        Args:
            change: whose outcome was measured.
            num_changes: changes of the run so far.
        """
        self.note("outcome", **change.to_json())
        self._keep(lambda: outcome_scalars(change, num_changes=num_changes))

    def _keep(self, scalars: Callable[[], dict[str, float]]) -> None:
        """Keeps numbers for the sinks. No decision depends on them: an error is a warning."""
        try:
            self._scalars |= scalars()
        except Exception as error:
            logger.warning("a number of the controller is left out: %r", error)

    def take_scalars(self) -> dict[str, float]:
        """Numbers by tag since the last call."""
        taken, self._scalars = self._scalars, {}
        return taken


def _ends_well(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal in order, with today's names; lines that a kill cut short are left
    out.

    Raises:
        OSError: it cannot be read.
    """
    with path.open(errors="replace") as file:
        for line in file:
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "kind" in record:
                yield upgraded(record)


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """A record of any version with today's names, and its own version. Version 1 is read for one
    release.

    Args:
        record: a line of a journal; parts of an unknown form stay as they are.
    """
    if record.get("version") != 1:
        return record
    _warn_of_version_1()
    new = dict(record)
    if "obeyed" in new:
        new["applied"] = new.pop("obeyed")
    if "sizes" in new:
        sizes = new.pop("sizes")
        both = sizes if isinstance(sizes, list) and len(sizes) == 2 else (None, None)
        new["global_batch_size"], new["micro_batch_size"] = both
    return new | {
        part: _renamed(new[part], names)
        for part, names in _NAMES_OF_VERSION_1.items()
        if part in new
    }


_NAMES_OF_VERSION_1: dict[str, Any] = {
    "decision": {
        "is_small": "batch_above_optimal",
        "candidates": {"verdict": "blocked_reason"},
    },
    "situation": {
        "barred_layouts": "blocked_layouts",
        "small_since_samples": "above_optimal_since_samples",
        "noise_when_shrunk": "critical_batch_size_when_shrunk",
        "noise": {"g2": "grad_norm_sq", "v": "grad_variance_trace"},
        "rules": {"calibration": "noise_scale_multiplier"},
    },
}
_VERDICTS_OF_VERSION_1 = {"chosen": "", "present": PRESENT}


def _renamed(value: Any, names: dict[str, Any]) -> Any:
    """A part of a record, or a list of such, with its keys under their present names."""
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    new = {}
    for key, item in value.items():
        name = names.get(key, key)
        if isinstance(name, dict):
            name, item = key, _renamed(item, name)
        if key == "verdict" and isinstance(item, str):
            item = _VERDICTS_OF_VERSION_1.get(item, item)
        new[name] = item
    return new


@functools.cache
def _warn_of_version_1() -> None:
    logger.warning("a journal of version 1: the next release will not read its names any more")
