"""The policies as flags of the trainer, each with the care that the others get."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing, read_profile
from megatron.training.config.layout import Layout

STATIC = "static"
"""What the names of static batches begin with."""
BASELINES = ("cbs_small", "cbs_large", "norm_test", "doubling", "seesaw")
"""Policies whose batches do not depend on how fast anything is: on another link the same run takes
other times, and no more. The same holds for static batches."""
OURS = ("adaptive", "adaptive_unprofiled")
ABLATIONS = ("only_batch", "only_layout")
PAPER = "paper"
MARK = "*"
"""Behind the name of a policy that was trained on another link."""
PLAIN, PLAIN_WHOLE = "plain", "plain_whole"
"""The first batch from where `adaptive_unprofiled` starts, without a controller, in micro-batches
of one sample as it does or in one on each rank: the losses are those of the static batch, so that
they are only timed."""
_CONTENDERS = 3
"""Lines of the profile that are timed again at each batch."""


class Profile:
    """Measured times of one link, of `tools/profile_layouts.py`."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        self._lines: dict[Any, list[Timing]] = {}
        for timing in timings:
            self._lines.setdefault(timing.configuration.line, []).append(timing)

    @classmethod
    def of_records(cls, records: list[dict[str, Any]]) -> Profile:
        """Out of the lines of a profile's file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.jsonl"
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
            return cls(read_profile(path)[1])

    def seconds(self, line: Any, count: int) -> float:
        """Of a step of so many micro-batches: as measured, else on a straight line."""
        known = self._lines[line]
        for timing in known:
            if timing.configuration.num_microbatches == count:
                return timing.step_s
        counts = [float(t.configuration.num_microbatches) for t in known]
        steps = np.array([t.step_s for t in known])
        if len(known) == 1:
            return known[0].step_s * count / counts[0]
        slope, level = np.polyfit(counts, steps, 1, w=1 / steps)
        return max(float(slope * count + level), float(steps.min()) / 10)

    def ranked(
        self, batch: int, *, layout: str = "", only_measured: bool = False
    ) -> list[tuple[float, Configuration]]:
        """(samples/s, configuration) of a batch, fastest first.

        Args:
            batch: samples of a step.
            layout: text of the only one to consider; empty for all.
            only_measured: leave out what was not timed at this batch, if anything was.
        """
        found, direct = [], []
        for line, known in self._lines.items():
            c = known[0].configuration
            own, unit = c.layout, c.layout.dp * c.micro_batch_size
            if batch % unit or (own.vpp > 1 and batch // unit % own.pp):
                continue
            if layout and str(c.layout) != layout:
                continue
            speed = batch / self.seconds(line, batch // unit)
            found.append((speed, dataclasses.replace(c, global_batch_size=batch)))
            if any(t.configuration.num_microbatches == batch // unit for t in known):
                direct.append(found[-1])
        chosen = direct if only_measured and direct else found
        return sorted(chosen, key=lambda e: (-e[0], str(e[1])))

    def best(self, batch: int, layout: str = "", *, sees_noise: bool = False) -> Configuration:
        """The fastest of a batch, of those timed at it where some were.

        Args:
            batch: samples of a step.
            layout: text of the only one to consider; empty for all.
            sees_noise: only where the noise scale can be measured, unless there is none.
        """
        able = [c for _, c in self.ranked(batch, layout=layout, only_measured=True)]
        seeing = [c for c in able if not c.is_blind]
        if sees_noise and not seeing:
            seeing = [c for _, c in self.ranked(batch, layout=layout) if not c.is_blind]
        return (seeing or able if sees_noise else able)[0]

    def contenders(self, batches: Sequence[int]) -> list[tuple[Configuration, list[int]]]:
        """Lines to time again, with the batches at which they are among the fastest."""
        wanted: dict[Any, tuple[Configuration, list[int]]] = {}
        for batch in batches:
            for _, c in self.ranked(batch)[:_CONTENDERS]:
                wanted.setdefault(c.line, (c, []))[1].append(batch)
        return list(wanted.values())

    def all_round(self, batches: Sequence[int]) -> str:
        """The layout that is fastest over all batches, by the geometric mean."""
        layouts = {str(c.layout) for batch in batches for _, c in self.ranked(batch)}
        speeds = {}
        for x in layouts:
            best = [self.ranked(b, layout=x, only_measured=True) for b in batches]
            if all(best):
                speeds[x] = statistics.geometric_mean(ranked[0][0] for ranked in best)
        return max(speeds, key=lambda x: speeds[x])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all runs of a measurement share."""

    batches: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Grid, ascending, samples."""
    first_batch: int = 4
    """Of the policies that change it, and the one for which the learning rate was chosen."""
    samples: int = 4096
    """Length of a run; a multiple of evaluations times the largest batch."""
    lr: float = 5e-4
    """At the first batch."""
    min_lr_part: float = 0.1
    """End of the decay over its start."""
    decay: str = "cosine"
    """Of the learning rate."""
    warmup_part: float = 0.1
    """Part of the samples over which the learning rate rises."""
    weight_decay: float = 0.01
    """At the first batch."""
    beta2: float = 0.95
    """Of Adam."""
    eval_samples: int = 64
    """Held-out samples of an evaluation; a multiple of the largest batch."""
    evaluations: int = 32
    """Of a run."""
    calibration: float = 2.0
    """c of the baselines; ours have their own."""

    @classmethod
    def of(cls, result: dict[str, Any]) -> Recipe:
        """That of a results file."""
        known = result["settings"]["recipe"]
        return cls(**{**known, "batches": tuple(known["batches"])})

    @property
    def rising(self) -> list[int]:
        """Batches that a policy which grows may have."""
        return [b for b in self.batches if b >= self.first_batch]

    def rates(self, batch: int) -> list[str]:
        """Rates of a run whose first batch is this one: those of the first batch by the rules that
        the controller follows, learning rate by the root, weight decay per token."""
        factor = math.sqrt(batch / self.first_batch)
        ends = self.lr * self.min_lr_part
        return [
            *("--lr", f"{self.lr * factor:.9g}", "--min-lr", f"{ends * factor:.9g}"),
            *("--lr-decay-style", self.decay),
            *("--lr-warmup-samples", str(int(self.warmup_part * self.samples))),
            *("--weight-decay", f"{self.weight_decay * factor:.9g}"),
            *("--adam-beta2", f"{self.beta2:g}"),
        ]

    def flags(self, c: Configuration) -> list[str]:
        """Flags of a run that starts in some configuration: the same held-out samples at the same
        samples trained, whatever the first batch."""
        batch = c.global_batch_size
        every, number = self.samples // self.evaluations // batch, self.eval_samples // batch
        evaluating = ["--eval-interval", str(every), "--eval-iters", str(number)]
        length = ["--train-samples", str(self.samples)]
        return [*c.to_flags(), *length, *self.rates(batch), *evaluating]


def batch_of(name: str) -> int:
    """Of a static batch."""
    return int(name.removeprefix(f"{STATIC}_").rstrip(MARK))


def is_static(name: str) -> bool:
    """Whether the batch never changes by the flags alone."""
    return name.startswith(f"{STATIC}_")


def is_plain(name: str) -> bool:
    """Whether a policy is the start of ours that nobody measured, kept."""
    return name.rstrip(MARK) in (PLAIN, PLAIN_WHOLE)


def is_baseline(name: str) -> bool:
    """Whether a policy is one that ours is compared with."""
    return is_static(name) or name.rstrip(MARK) in BASELINES


def is_blind_to_speed(name: str) -> bool:
    """Whether a policy trains the same on every link."""
    return is_baseline(name) or is_plain(name)


@functools.cache
def start_of(name: str, recipe: Recipe, profile: Profile) -> Configuration:
    """Where a policy starts: in its fastest configuration on the link."""
    if is_static(name):
        return profile.best(batch_of(name))
    first, last = recipe.first_batch, recipe.batches[-1]
    # One micro-batch on one replica leaves nothing to measure the noise by, and the run would never
    # leave it.
    small = profile.best(first, sees_noise=True)
    if is_plain(name) or name == "adaptive_unprofiled":
        # Where somebody starts who has measured nothing: data parallel.
        ranks = small.layout.world_size
        whole = first // ranks if name == PLAIN_WHOLE else 1
        layout = Layout(dp=ranks)
        return dataclasses.replace(
            small, layout=layout, sequence_parallel=False, micro_batch_size=whole
        )
    if name == "cbs_large":
        return profile.best(first, str(profile.best(last).layout), sees_noise=True)
    if name in ("norm_test", "doubling", "seesaw"):
        return profile.best(first, profile.all_round(recipe.rising), sees_noise=True)
    return small


def flags_of(name: str, recipe: Recipe, profile: Profile, store: str) -> list[str]:
    """The trainer's flags of a policy on the link whose profile lies in the file `store`."""
    own = recipe.flags(start_of(name, recipe, profile))
    if is_static(name):
        return own
    own += ["--copus", "--copus-max-global-batch-size", str(recipe.batches[-1])]
    if name != "adaptive_unprofiled":
        own += ["--copus-profile", store]
    if name in BASELINES:
        own += ["--copus-noise-scale-multiplier", f"{recipe.calibration:g}"]
    if name in (*OURS, "only_layout", PAPER):
        own += ["--copus-layouts", "all"]
    fixed = {"cbs_small": "cbs", "cbs_large": "cbs", "only_layout": "static", PAPER: "copus"}
    if policy := fixed.get(name, name if name in BASELINES else ""):
        own += ["--copus-policy", policy]
    return own
