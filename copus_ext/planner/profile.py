"""Measured step times: kept in a file, never mixed between machines.

Two counts of micro-batches per layout and micro-batch say how a step grows, and so give every batch
(`copus_ext.cost_model.correct`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.context import CP_COMM_TYPES
from copus_ext.cost_model.correct import Correction, Steps, correct, most_informative
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.spec_file import is_positive
from copus_ext.cost_model.step import StepTime, step_time
from copus_ext.planner.arithmetic import least_step_s
from copus_ext.planner.configuration import RECOMPUTE, Configuration
from copus_ext.planner.space import Candidates, joined, points_of, to_config_batch
from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.plain_file import open_plain
from megatron.trainer.common.program import other_command
from megatron.trainer.config.layout import Layout

_SIZES = ("tp", "pp", "vpp", "dp")
_OPTIONS = (
    "micro_batch_size",
    "recompute",
    "recompute_num_layers",
    "logits_chunks",
    "use_distributed_optimizer",
    "overlap",
    "use_tp_pp_dp_mapping",
)
_REQUIRED = (*_SIZES, "micro_batch_size", "num_microbatches", "num_steps")


class ForeignProfile(ValueError):
    """Times of another machine, model or software."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The measured time of one configuration."""

    configuration: Configuration
    """What ran."""
    step_s: float
    """Median seconds of a step."""
    spread_s: float = 0.0
    """Median absolute deviation."""
    num_steps: int = 1
    """Steps measured."""
    end_share: float | None = None
    """Share of a step that follows its last backward pass; None: not measured, as in a profile."""
    peak_bytes: float | None = None
    """Memory that the process needed at most on the GPU that needed most; None: not measured."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two timings of the same configuration."""
        return *self.configuration.line, self.configuration.num_microbatches

    @property
    def relative_sd(self) -> float:
        """Relative standard deviation of `step_s`.

        That is the deviation of one step, 1.4826 median absolute deviations, times that of a median
        of n independent steps, 1.2533/sqrt(n). Consecutive steps are alike, so half of them count.
        """
        independent = max(self.num_steps / 2.0, 1.0)
        return 1.2533 * 1.4826 * self.spread_s / self.step_s / math.sqrt(independent)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, as a line of a profile has them."""
        c = self.configuration
        is_usual = c.sequence_parallel == (c.layout.tp > 1)
        return {
            **dict(zip(_SIZES, c.layout.sizes)),
            **({"ep": c.layout.ep} if c.layout.ep > 1 else {}),
            **({"etp": c.layout.etp} if c.layout.etp else {}),
            **({"cp": c.layout.cp} if c.layout.cp > 1 else {}),
            **({"cp_comm_type": c.cp_comm_type} if c.cp_comm_type else {}),
            **{name: getattr(c, name) for name in _OPTIONS},
            **({} if is_usual else {"sequence_parallel": c.sequence_parallel}),
            "num_microbatches": c.num_microbatches,
            "step_s": self.step_s,
            "spread_s": self.spread_s,
            "num_steps": self.num_steps,
            **({} if self.peak_bytes is None else {"peak_bytes": self.peak_bytes}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timing:
        """Inverse of `to_json`; fields with a default may be missing, others are ignored.

        Raises:
            ValueError: a value that is missing or makes no sense.
        """
        plain = {"vpp": 1, "recompute": "none", "recompute_num_layers": 0, "num_steps": 1}
        values = {**plain, "use_distributed_optimizer": True, "overlap": True, "spread_s": 0.0}
        values |= {"use_tp_pp_dp_mapping": False, "logits_chunks": 1}
        values |= data
        if missing := [name for name in (*_REQUIRED, "step_s") if name not in values]:
            raise ValueError(f"{missing[0]} is missing")
        for name in _REQUIRED:
            if not _is_whole(values[name]) or values[name] < 1:
                raise ValueError(f"{name} {values[name]!r} must be a whole number from 1 on")
        if values["recompute"] not in RECOMPUTE:
            raise ValueError(f"recompute {values['recompute']!r} is none of {', '.join(RECOMPUTE)}")
        if not _is_whole(values["recompute_num_layers"]):
            raise ValueError("recompute_num_layers must be a whole number")
        if not _is_whole(chunks := values["logits_chunks"]) or chunks < 1:
            raise ValueError(f"logits_chunks {chunks!r} must be a whole number from 1 on")
        for name in ("use_distributed_optimizer", "overlap", "use_tp_pp_dp_mapping"):
            if not isinstance(values[name], bool):
                raise ValueError(f"{name} must be true or false")
        for name, least in (("step_s", np.nextafter(0, 1)), ("spread_s", 0)):
            if not isinstance(values[name], (int, float)) or not least <= values[name] < np.inf:
                raise ValueError(f"{name} {values[name]!r} must be positive")
        parallel = values.get("sequence_parallel", values["tp"] > 1)
        if not isinstance(parallel, bool):
            raise ValueError(f"sequence_parallel {parallel!r} must be true or false")
        if (peak := values.setdefault("peak_bytes", None)) is not None and not is_positive(peak):
            raise ValueError(f"peak_bytes {peak!r} must be positive")
        further = {"ep": values.get("ep", 1), "etp": values.get("etp"), "cp": values.get("cp", 1)}
        layout = Layout(**{name: values[name] for name in _SIZES}, **further)
        form = values.get("cp_comm_type")
        if form is not None and form not in CP_COMM_TYPES:
            raise ValueError(f"cp_comm_type {form!r} is none of {', '.join(CP_COMM_TYPES)}")
        return cls(
            configuration=Configuration(
                layout=layout,
                cp_comm_type=(form or CP_COMM_TYPES[0]) if layout.cp > 1 else None,
                **{name: values[name] for name in _OPTIONS},
                global_batch_size=(
                    values["num_microbatches"] * layout.dp * values["micro_batch_size"]
                ),
                sequence_parallel=parallel,
            ),
            **{name: values[name] for name in ("step_s", "spread_s", "num_steps", "peak_bytes")},
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def fingerprint(parts: dict[str, Any]) -> str:
    """A short name of model, software and hardware: equal parts, equal name."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def append_lines(path: Path, text: str) -> None:
    """Appends whole lines to a file. A line that a kill cut short ends here, so that it spoils no
    other.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


class ProfileStore:
    """A JSON-lines file of timings; the last good line of a configuration wins."""

    def __init__(self, path: Path, parts: dict[str, Any]) -> None:
        """Names file and machine.

        Args:
            path: made when the first timing is added.
            parts: model, software and hardware that the times belong to.
        """
        self.path, self.parts = path, parts
        self.key = fingerprint(parts)

    def add(self, timing: Timing) -> None:
        """Appends a timing; a kill loses at most this line."""
        self._append(timing.to_json())

    def add_attempt(self, attempt: str, **fields: Any) -> None:
        """Appends what became of an attempt to measure. It is not a timing: `read` passes over it.

        Args:
            attempt: what became of it.
            fields: of what; none is called `step_s` or `machine`.
        """
        self._append({"attempt": attempt, **fields})

    def attempts(self) -> list[dict[str, Any]]:
        """The attempts on this machine, in their order."""
        records = _lines(self.path)
        return [r for r in records if "attempt" in r and r.get("fingerprint") == self.key]

    def _append(self, fields: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        header = {"machine": self.parts, "fingerprint": self.key}
        known = any("machine" in r and r.get("fingerprint") == self.key for r in _lines(self.path))
        text = "" if known else json.dumps(header) + "\n"
        text += json.dumps({"fingerprint": self.key, **fields}) + "\n"
        append_lines(self.path, text)

    def read(self) -> list[Timing]:
        """The timings of this machine.

        Raises:
            ForeignProfile: the file holds timings, but none of this machine.
        """
        own, others = _sorted_out(self.path, {self.key})
        if others and not own:
            raise ForeignProfile(
                f"{self.path} was measured with another model, machine or software; measure again "
                f"with {other_command('profile_layouts.py')} or name another file"
            )
        return own


def read_profile(path: Path) -> tuple[dict[str, Any], list[Timing]]:
    """Machine and timings of a file, whatever machine it is of.

    Raises:
        OSError: it cannot be read.
        ForeignProfile: it is not a profile, or of several machines.
    """
    machine: dict[str, Any] = {}
    for record in _lines(path):
        if "machine" in record:
            machine = record["machine"]
    if not machine or not isinstance(machine, dict):
        measure = other_command("profile_layouts.py")
        raise ForeignProfile(f"{path} is not a profile; make one with {measure}")
    own, others = _sorted_out(path, {fingerprint(machine)})
    if others:
        raise ForeignProfile(f"{path} mixes machines; measure into a file of its own")
    return machine, own


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return
    with open_plain(path, follow=True) as file:
        for line in file:
            try:
                record = parse_json(line.decode(errors="replace"))
            except ValueError:
                continue  # cut short by a kill
            if isinstance(record, dict):
                yield record


def _sorted_out(path: Path, keys: Set[str]) -> tuple[list[Timing], int]:
    own: dict[Any, Timing] = {}
    others = 0
    for record in _lines(path):
        if "step_s" not in record:
            continue
        mark = record.get("fingerprint")
        if not isinstance(mark, str) or mark not in keys:
            others += 1
            continue
        try:
            timing = Timing.from_json(record)
        except ValueError as error:
            raise ForeignProfile(f"{path} holds a line that is not a timing: {error}") from error
        own[timing.key] = timing
    return list(own.values()), others


class Measured:
    """Timings against their predictions.

    Args:
        model: that was timed.
        cluster: where.
        constants: of the predictions.
        timings: any number.
        earlier: more of them, of a time when the machine may have been faster or slower.
        of_others: times of other models on this machine. What parts of a step take, and what all
            of them share, holds for every model; only what is a configuration's own does not.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        constants: Constants,
        timings: Sequence[Timing],
        earlier: Sequence[Timing] = (),
        of_others: Sequence[tuple[ModelSpec, Sequence[Timing]]] = (),
    ) -> None:
        self.of_others = of_others
        self.timings = [*timings, *earlier]
        self.points = points_of([x.configuration for x in self.timings])
        """What was timed."""
        self.predict = lambda points: step_time(to_config_batch(model, cluster, points), constants)
        """Uncorrected times of points."""
        self.least_s = lambda points: least_step_s(model, cluster, points)
        """Seconds of their steps that no correction goes below."""
        self._told: list[Timing] = []
        self._log_ratios, self._known = np.zeros(0), Steps.of([])
        for number, (one, some) in enumerate([(model, self.timings), *of_others]):
            if not some:
                continue
            points = points_of([x.configuration for x in some])
            predicted = step_time(to_config_batch(one, cluster, points), constants)
            steps = steps_of(points, predicted, model=number)
            self._known = self._known.and_(steps) if self._told else steps
            ratios = np.log([x.step_s for x in some] / predicted.step_s)
            self._log_ratios = np.append(self._log_ratios, ratios)
            self._told += some
        self._earlier = [len(timings) <= i < len(self.timings) for i in range(len(self._told))]
        self._lines = {tuple(key) for key in keys_of(self.points).tolist()}

    @property
    def knows(self) -> bool:
        """Whether any time corrects the predictions."""
        return len(self._known) > 0

    def corrected(self, points: Candidates, times: StepTime) -> tuple[Any, Any, list[str]]:
        """Seconds, relative uncertainty and source of each point.

        Args:
            points: n of them.
            times: raw predictions of them.
        """
        found = self._correction(steps_of(points, times))
        if not self.knows:
            source = ["predicted"] * len(points)
        else:
            keys = keys_of(points).tolist()
            source = ["profiled" if tuple(k) in self._lines else "corrected" for k in keys]
        return times.step_s * self._factor(found, points, times), found.relative_sd, source

    def _factor(self, found: Correction, points: Candidates, times: StepTime) -> Any:
        """[n] that of a correction, as long as GPUs compute no faster than they can."""
        if not self.knows:
            return found.factor
        return np.maximum(found.factor, self.least_s(points) / times.step_s)

    def against(self, points: Candidates, times: StepTime, one: Configuration) -> Any:
        """[n] relative uncertainty of the seconds of each point over those of one configuration: 0
        for itself.

        Args:
            points: n of them.
            times: raw predictions of them.
            one: what they are compared with.
        """
        single = points_of([one])
        both = joined([points, single])
        steps = steps_of(points, times).and_(steps_of(single, self.predict(single)))
        sd = self._correction(steps, against=len(points)).against_sd[:-1]
        keys = keys_of(both)
        same = (keys[:-1] == keys[-1]).all(axis=1)
        same &= points.num_microbatches == both.num_microbatches[-1]
        return np.where(same, 0.0, sd)

    def apart(self, points: Candidates, times: StepTime) -> tuple[float, Any]:
        """What all points share of their relative uncertainty, and [n] that of each over the first.

        Args:
            points: n of them.
            times: raw predictions of them.
        """
        found = self._correction(steps_of(points, times), against=0)
        return found.common_sd(), found.over_sd()

    def ran(self, points: Candidates) -> Any:
        """[n] whether each was timed, with at least as many micro-batches in flight, so that it has
        the memory it needs."""
        own, found = keys_of(points), np.zeros(len(points), dtype=bool)
        # Beyond two for each stage no more are in flight.
        counts = np.minimum(points.num_microbatches, 2 * points.pp)
        timed = np.minimum(self.points.num_microbatches, 2 * self.points.pp)
        for key, count in zip(keys_of(self.points), timed):
            found |= (own == key).all(axis=1) & (counts <= count)
        return found

    def factors(
        self, point: Candidates, times: StepTime
    ) -> tuple[float, float, dict[str, tuple[float, float]]]:
        """What the seconds of one point are multiplied by, the share of the parts in it, and the
        seconds of each part as predicted and by its own factors."""
        found = self._correction(steps_of(point, times))
        now = found.parts(times.parts)
        parts = {name: (float(x[0]), float(now[name][0])) for name, x in times.parts.items()}
        return float(self._factor(found, point, times)[0]), float(found.of_parts[0]), parts

    def parts(self, points: Candidates, times: StepTime) -> dict[str, Any]:
        """[n] corrected seconds of every part of a step, which add up to it."""
        found = self._correction(steps_of(points, times))
        scale = self._factor(found, points, times) / found.of_parts
        return {name: x * scale for name, x in found.parts(times.parts).items()}

    def part_factors(self) -> dict[str, float]:
        """What the times make of the seconds of every part of a step; empty without any."""
        return self._correction(self._known).part_factors if self.knows else {}

    def most_informative(self, points: Candidates, times: StepTime, number: int) -> list[int]:
        """Indices of the points whose times would say most of the others; see
        `correct.most_informative`."""
        samples = points.global_batch_size
        steps = steps_of(points, times)
        return most_informative(steps, number, known=self._known, samples=samples)

    def _correction(self, steps: Steps, *, against: int | None = None) -> Correction:
        return correct(
            steps,
            self._known,
            self._log_ratios,
            noise=[x.relative_sd for x in self._told],
            earlier=self._earlier,
            ends=[x.end_share for x in self._told],
            against=against,
        )


def steps_of(points: Candidates, times: StepTime, *, model: int = 0) -> Steps:
    """Configurations with their raw predictions, as a correction sees them; those of another model
    have another number."""
    keys, counts = keys_of(points), points.num_microbatches
    keys = np.column_stack([keys, np.full(len(keys), model)])
    return Steps.of(keys, counts, times.parts, times.hiding, times.launch_s, times.across)


def keys_of(points: Candidates) -> Any:
    """[n, 16] what a correction goes by: tensor, pipeline, micro-batch, and all that tells
    configurations apart but the number of micro-batches."""
    names = ("tp", "pp", "micro_batch_size", "vpp", "ep", "etp", "cp", "cp_comm_type", "dp")
    names += ("recompute", "recompute_num_layers", "logits_chunks")
    names += ("sequence_parallel", "use_distributed_optimizer", "overlap", "use_tp_pp_dp_mapping")
    return np.stack([getattr(points, n).astype(np.int64) for n in names], axis=1)
