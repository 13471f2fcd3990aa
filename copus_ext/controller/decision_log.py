"""The journal of a run's decisions: one JSON line each, written before the decision is applied and
never changed."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.headroom import Headroom
from copus_ext.goodput.inputs import Decision, DecisionInputs
from copus_ext.goodput.messages import decision_scalars, outcome_scalars
from megatron.trainer.common.control import PAUSE_FILE
from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.plain_file import append_plain, open_plain

logger = logging.getLogger(__name__)

NAME = "journal.jsonl"
VERSION = 9
"""Of the records. It changes when a record could not be read, or a decision would be decided in
another way. No other version is read."""


class JournalVersionError(ValueError):
    """A journal of another version; one line that names the file and says what to do."""

    def __init__(self, path: Path, version: Any) -> None:
        super().__init__(f"{_told(path, version)}; read it with the commit that wrote it")


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
        self._was_paused = False

    def open(self, run_dir: Path | None) -> None:
        """Writes to the journal of a run from here on. One of another version is set aside, so that
        no file mixes two."""
        self.path = None if run_dir is None else run_dir / NAME
        if self.path is not None:
            _set_aside(self.path)

    def write(self, kind: str, **fields: Any) -> None:
        """Writes a record and waits until it is on disk.

        Args:
            kind: `start`, `decision`, `outcome`, `conditions`, `spike`, `paused`,
                `resumed`, `segment`, `failure` or `end`; for a change of layout `relayout` and
                `relayout.requested`, `.begin`, `.commit`, `.cancelled` or `.abandoned`.
            fields: plain JSON types; positions in samples of `--seq-length`.

        Raises:
            OSError: it cannot be written.
            ValueError: a number is not finite.
        """
        if self.path is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        record = {"kind": kind, "version": VERSION, "time": now, **fields}
        text = json.dumps(record, allow_nan=False) + "\n"
        is_cut = self.path.exists() and self.path.stat().st_size > 0 and not _ends_well(self.path)
        with append_plain(self.path) as file:
            # A line that a kill cut short ends here, so that it spoils no other.
            file.write(("\n" * is_cut + text).encode())
            file.flush()
            os.fsync(file.fileno())

    def note(self, kind: str, **fields: Any) -> None:
        """Writes a record that nothing depends on: a failure is only a warning."""
        try:
            self.write(kind, **fields)
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
        self.write(
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

    def count(self, *, decisions: int | None = None, changes: int | None = None) -> None:
        """Gives the sinks the number of decisions or changes of the run, as far as it is known."""
        counts = {"copus/decisions": decisions, "copus/changes": changes}
        self._keep(lambda: {tag: float(n) for tag, n in counts.items() if n})

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
        taken, self._scalars = self._scalars, {}
        return taken


def _ends_well(path: Path) -> bool:
    with open_plain(path, follow=True) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_journal(
    path: Path, *, on_unread: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any]]:
    """The records of a journal in order; lines that a kill cut short are left out.

    Args:
        path: of the journal.
        on_unread: called for each line that is left out. The last one may still be written.

    Raises:
        OSError: it cannot be read.
        JournalVersionError: it is of another version.
    """
    for record in _records(path, on_unread):
        if record.get("version") != VERSION:
            raise JournalVersionError(path, record.get("version"))
        yield record


def version_problem(path: Path) -> str:
    """Why a journal cannot be read, by its first record; empty if it can, or holds none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        next(read_journal(path), None)
    except JournalVersionError as error:
        return str(error)
    return ""


def _records(path: Path, on_unread: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
    with open_plain(path, follow=True) as file:
        for line in file:
            try:
                record = parse_json(line.decode(errors="replace"))
            except ValueError:
                record = None
            if isinstance(record, dict) and "kind" in record:
                yield record
            elif line.strip() and line.endswith(b"\n"):
                on_unread()


def _set_aside(path: Path) -> None:
    """Renames a journal of another version; a failure to do so is only a warning."""
    try:
        version = next(_records(path), {"version": VERSION}).get("version")
        if version != VERSION:
            kind = f"version{version}" if isinstance(version, int) else "other"
            old = path.with_name(f"{path.stem}.{kind}{path.suffix}")
            for number in itertools.count(2):
                if not old.exists():
                    break
                old = path.with_name(f"{path.stem}.{kind}-{number}{path.suffix}")
            path.replace(old)
            logger.warning("%s; it is %s now, and a new one begins", _told(path, version), old.name)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("the journal cannot be read: %s", error)


def _told(path: Path, version: Any) -> str:
    kind = f"version {version}" if isinstance(version, int) else "no version"
    return f"{path} is a journal of {kind}, and this copus reads version {VERSION}"
