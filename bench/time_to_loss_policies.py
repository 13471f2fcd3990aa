"""The policies of B8 as flags of the trainer, each with the care that the others get."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from time_to_loss import geometric_mean

if TYPE_CHECKING:
    from copus_ext.cost_model.profile import Timing
    from copus_ext.planner.configuration import Configuration

STATIC = "static"
"""What the names of static batches begin with."""
BASELINES = ("cbs_small", "cbs_large", "norm_test", "doubling", "seesaw")
OURS = ("adaptive", "adaptive_unprofiled")
ABLATIONS = ("only_batch", "only_layout")
MORE = (
    "objective_copus",
    "lr_model",
    "c_2",
    "c_8",
    "paper_rule",
    "paper",
    "cbs_free",
    "norm_test_free",
    "beta2_tokens",
    "no_ramp",
)
"""Run if asked for by --policies."""
MARK = "*"
"""Behind the name of a policy that was trained on another link."""
PLAIN, PLAIN_WHOLE = "plain", "plain_whole"
"""The first batch from where `adaptive_unprofiled` starts, without a controller, in micro-batches
of one sample as it does or in one on each rank: the losses are those of the static batch, so that
they are only timed."""
BY_NOISE_ALONE = ("cbs_small", "cbs_large", "norm_test", "doubling", "seesaw")
"""Policies whose batches do not depend on how fast anything is: on another link the same run takes
other times, and no more. The same holds for static batches."""
CONTENDERS = 3
"""Lines of the profile that are timed again at each batch."""


class Profile:
    """Measured times of one link.

    Args:
        timings: of `tools/profile_layouts.py`.
    """

    def __init__(self, timings: Sequence[Timing]) -> None:
        self.timings = list(timings)
        self._lines: dict[Any, list[Timing]] = {}
        for timing in timings:
            self._lines.setdefault(timing.line, []).append(timing)

    def seconds(self, line: Any, count: int) -> float:
        """Of a step of so many micro-batches: as measured, else on a straight line."""
        known = self._lines[line]
        for timing in known:
            if timing.num_microbatches == count:
                return timing.step_s
        counts = [float(t.num_microbatches) for t in known]
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
        from copus_ext.planner.configuration import Configuration

        found, direct = [], []
        for line, known in self._lines.items():
            c = Configuration.of_timing(known[0])
            unit = c.dp * c.micro_batch_size
            if batch % unit or (c.vpp > 1 and batch // unit % c.pp):
                continue
            if layout and layout_of(c) != layout:
                continue
            entry = (
                batch / self.seconds(line, batch // unit),
                dataclasses.replace(c, global_batch_size=batch),
            )
            found.append(entry)
            if any(t.num_microbatches == batch // unit for t in known):
                direct.append(entry)
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

    def speed(self, batch: int, layout: str = "") -> float:
        """Its samples/s."""
        return self.ranked(batch, layout=layout, only_measured=True)[0][0]

    def contenders(self, batches: Sequence[int]) -> dict[Any, tuple[Configuration, list[int]]]:
        """Lines to time again, by key, with the batches at which they are among the fastest."""
        wanted: dict[Any, tuple[Configuration, list[int]]] = {}
        for batch in batches:
            for _, c in self.ranked(batch)[:CONTENDERS]:
                wanted.setdefault(c.timed(1.0).line, (c, []))[1].append(batch)
        return wanted

    def all_round(self, batches: Sequence[int]) -> str:
        """The layout that is fastest over all batches, by the geometric mean."""
        layouts = {layout_of(c) for batch in batches for _, c in self.ranked(batch)}
        able = [x for x in layouts if all(self.ranked(b, layout=x) for b in batches)]
        return max(able, key=lambda x: geometric_mean(self.speed(b, x) for b in batches))


def layout_of(c: Configuration) -> str:
    """Text of the trainer's layout."""
    from megatron.training.config.layout import Layout

    return str(Layout(tp=c.tp, pp=c.pp, vpp=c.vpp, dp=c.dp))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all runs of a measurement share."""

    batches: tuple[int, ...]
    """Grid, ascending, samples."""
    first_batch: int
    """Of the policies that change it, and the one for which the learning rate was chosen."""
    samples: int
    """Length of a run."""
    lr: float
    """At the first batch."""
    min_lr_part: float
    """End of the decay over its start."""
    decay: str
    """constant or cosine."""
    warmup_part: float
    """Part of the samples over which the learning rate rises."""
    weight_decay: float
    """At the first batch."""
    beta2: float
    """Of Adam."""
    eval_samples: int
    """Held-out samples of an evaluation."""
    evaluations: int
    """Of a run."""
    calibration: float
    """c of the baselines; ours have their own."""

    def __post_init__(self) -> None:
        every, most = self.samples // self.evaluations, self.batches[-1]
        if self.samples % self.evaluations or every % most or self.eval_samples % most:
            raise ValueError(
                f"samples {self.samples} must be a multiple of evaluations {self.evaluations} "
                f"times the largest batch {most}, eval-samples {self.eval_samples} of the batch"
            )
        if self.first_batch not in self.batches:
            raise ValueError(f"the first batch {self.first_batch} is none of {self.batches}")

    @property
    def rising(self) -> list[int]:
        """Batches that a policy which grows may have."""
        return [b for b in self.batches if b >= self.first_batch]

    def rates(self, batch: int) -> list[str]:
        """Rates of a run whose first batch is this one: those of the first batch by the rules that
        the controller follows, learning rate by the root, weight decay per token."""
        factor = math.sqrt(batch / self.first_batch)
        style = ["--lr-decay-style", self.decay]
        ends = self.lr * self.min_lr_part if self.decay != "constant" else 0.0
        return [
            *("--lr", f"{self.lr * factor:.9g}", "--min-lr", f"{ends * factor:.9g}", *style),
            *("--lr-warmup-samples", str(int(self.warmup_part * self.samples))),
            *("--weight-decay", f"{self.weight_decay * factor:.9g}"),
            *("--adam-beta2", f"{self.beta2:g}"),
        ]

    def evaluating(self, batch: int) -> list[str]:
        """The same held-out samples at the same samples trained, whatever the first batch."""
        every = self.samples // self.evaluations // batch
        number = self.eval_samples // batch
        return ["--eval-interval", str(every), "--eval-iters", str(number)]

    def of(self, c: Configuration) -> list[str]:
        """Flags of a run that starts in some configuration."""
        batch = c.global_batch_size
        length = ["--train-samples", str(self.samples)]
        return [*c.to_flags(), *length, *self.rates(batch), *self.evaluating(batch)]


def names_of(recipe: Recipe, asked: str = "") -> list[str]:
    """Policies of a measurement, in the order in which they run.

    Args:
        recipe: for the static batches.
        asked: names to run instead, or with `+` in front to run besides.

    Raises:
        ValueError: an unknown name.
    """
    statics = [f"{STATIC}_{batch}" for batch in recipe.batches]
    usual = [*statics, *BASELINES, *OURS, *ABLATIONS]
    if recipe.decay == "constant":
        usual.remove("seesaw")  # it follows the decay, and there is none
    words = [w for w in asked.lstrip("+").split(",") if w]
    if unknown := [w for w in words if w not in (*statics, *BASELINES, *OURS, *ABLATIONS, *MORE)]:
        raise ValueError(
            f"--policies {', '.join(unknown)}: choose from {', '.join((*usual, *MORE))}"
        )
    if not words:
        return usual
    return [*usual, *(w for w in words if w not in usual)] if asked.startswith("+") else words


def is_baseline(name: str) -> bool:
    """Whether a policy is one that ours is compared with."""
    name = name.rstrip(MARK)
    return name.startswith(f"{STATIC}_") or name in (*BASELINES, "cbs_free", "norm_test_free")


def is_static(name: str) -> bool:
    """Whether the batch never changes by the flags alone."""
    return name.startswith(f"{STATIC}_")


def is_plain(name: str) -> bool:
    """Whether a policy is the start of ours that nobody measured, kept."""
    return name.rstrip(MARK) in (PLAIN, PLAIN_WHOLE)


def is_blind_to_speed(name: str) -> bool:
    """Whether a policy trains the same on every link."""
    return is_static(name) or is_plain(name) or name in BY_NOISE_ALONE


def start_of(name: str, recipe: Recipe, profile: Profile) -> Configuration:
    """Where a policy that is blind to speed starts, in its fastest configuration.

    Args:
        name: see `is_blind_to_speed`.
        recipe: of the measurement.
        profile: of the link.
    """
    if is_static(name):
        return profile.best(int(name.removeprefix(f"{STATIC}_")))
    first, last = recipe.first_batch, recipe.batches[-1]
    # One micro-batch on one replica leaves nothing to measure the noise by, and the run would never
    # leave it.
    if name == "cbs_small":
        return profile.best(first, sees_noise=True)
    if is_plain(name):
        c = _plain(profile.best(first, sees_noise=True))
        whole = first // c.dp if name == PLAIN_WHOLE else 1
        return dataclasses.replace(c, micro_batch_size=whole)
    if name == "cbs_large":
        return profile.best(first, layout_of(profile.best(last)), sees_noise=True)
    return profile.best(first, profile.all_round(recipe.rising), sees_noise=True)


def flags_of(name: str, recipe: Recipe, profile: Profile, store: str) -> list[str]:
    """The trainer's flags of a policy.

    Args:
        name: one of `names_of`.
        recipe: of the measurement.
        profile: of the link.
        store: path of the profile's file.
    """
    last, rising = recipe.batches[-1], recipe.rising
    if is_static(name):
        return recipe.of(start_of(name, recipe, profile))
    small = start_of("cbs_small", recipe, profile)
    copus = ["--copus", "--copus-max-global-batch-size", str(last)]
    copus += ["--copus-batch-grid", ",".join(map(str, rising))]
    known = ["--copus-profile", store]
    free = ["--copus-layouts", "all"]
    if name == "adaptive_unprofiled":
        return [*recipe.of(_plain(small)), *copus, *free]

    def fixed(policy: str) -> list[str]:
        return ["--copus-policy", policy]

    if name in BY_NOISE_ALONE:
        own = fixed("cbs" if name.startswith("cbs") else name)
        own += ["--copus-noise-scale-multiplier", f"{recipe.calibration:g}"]
        return [*recipe.of(start_of(name, recipe, profile)), *copus, *known, *own]
    ways = {
        "cbs_free": (small, [*fixed("cbs"), *free]),
        "norm_test_free": (small, [*fixed("norm_test"), *free]),
        "adaptive": (small, free),
        "only_batch": (small, []),
        "only_layout": (small, [*fixed("static"), *free]),
        "objective_copus": (small, [*free, "--copus-objective", "copus"]),
        "c_2": (small, [*free, "--copus-noise-scale-multiplier", "2"]),
        "c_8": (small, [*free, "--copus-noise-scale-multiplier", "8"]),
        "lr_model": (small, [*free, "--copus-objective", "lr_model"]),
        "paper_rule": (small, [*free, "--copus-switch-rule", "paper"]),
        "paper": (small, [*free, *fixed("copus")]),
        "beta2_tokens": (small, [*free, "--copus-beta2-rule", "tokens"]),
        "no_ramp": (small, [*free, "--copus-lr-ramp-steps", "0"]),
    }
    start, own = ways[name]
    return [*recipe.of(start), *copus, *known, *own]


def _plain(c: Configuration) -> Configuration:
    """Where somebody starts who has measured nothing: data parallel, one sample at a time."""
    ranks = c.world_size
    return dataclasses.replace(
        c, tp=1, pp=1, vpp=1, dp=ranks, micro_batch_size=1, sequence_parallel=False
    )
