"""The inputs of a decision and the decision, as the journal holds them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from copus_ext.gns.observer import NoiseScale
from copus_ext.goodput.belief import Belief, Look, published_critical_batch_size
from copus_ext.goodput.state import ControllerState
from copus_ext.planner.configuration import Configuration
from megatron.trainer.config.layout import LAYOUT_KEYS, Layout


@dataclass(frozen=True, kw_only=True)
class ConfigThroughput:
    """One configuration and what is known of its speed."""

    configuration: Configuration
    """Layout, batch sizes and memory options."""
    samples_per_s: float
    """Throughput of all ranks."""
    relative_sd: float
    """Relative uncertainty of that over the throughput of the present configuration; 0 for that
    one."""
    source: str
    """`measured` here, `profiled`, `corrected`, `predicted`, or `assumed`."""

    @property
    def layout(self) -> Layout:
        return self.configuration.layout

    @property
    def micro_batch_size(self) -> int:
        return self.configuration.micro_batch_size

    @property
    def global_batch_size(self) -> int:
        return self.configuration.global_batch_size

    @property
    def noise_unmeasurable(self) -> bool:
        """Whether the noise scale cannot be measured there: one micro-batch on one replica."""
        return self.configuration.noise_unmeasurable

    def __str__(self) -> str:
        return (
            f"batch {self.global_batch_size} in micro-batches of {self.micro_batch_size} on "
            f"{self.layout}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, flat; options of memory only where they are not the defaults."""
        c = self.configuration
        options = {name: getattr(c, name) for name in _OPTIONS}
        return {
            **self.layout.to_json(),
            "micro_batch_size": c.micro_batch_size,
            "global_batch_size": c.global_batch_size,
            "samples_per_s": self.samples_per_s,
            "relative_sd": self.relative_sd,
            "source": self.source,
            **{name: value for name, value in options.items() if value != _OPTIONS[name]},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ConfigThroughput:
        """Inverse of `to_json`.

        Raises:
            TypeError, KeyError, ValueError: a record of another form.
        """
        values = dict(data)
        sizes = {name: values.pop(name) for name in LAYOUT_KEYS if name in values}
        layout = Layout.from_json({name: n for name, n in sizes.items() if n is not None})
        known = ("micro_batch_size", "global_batch_size", *_OPTIONS)
        options = {name: values.pop(name) for name in known if name in values}
        return cls(configuration=Configuration(layout=layout, **options), **values)


_OPTIONS = {
    "recompute": "none",
    "recompute_num_layers": 0,
    "logits_chunks": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": True,
    "overlap": True,
}
"""Memory options of a configuration with their defaults, which the journal leaves out."""


ADAPTIVE = "adaptive"
"""The policy that decides by the belief about the critical batch size."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How to decide, fixed for a launch. `copus_ext.controller.rules` makes it of the flags."""

    policy: str
    """A name of `policies.POLICIES`."""
    noise_scale_multiplier: float
    """The critical batch size is this times the measured noise scale; `adaptive` starts there."""
    reference_batch: int
    """Batch for which the learning rate was chosen, samples."""
    first_batch: int
    """Batch of the first step, samples."""
    grid: tuple[int, ...]
    """Batches to consider, ascending, samples."""
    allow_shrink: bool
    """Whether the batch may become smaller."""
    growth: float
    """Most by which the batch grows at once."""
    min_effective_steps: float
    """Measured steps from which the noise scale counts."""
    schedule: tuple[tuple[int, int], ...]
    """Of `step_schedule`: (samples consumed from which it holds, batch)."""
    doubling_first_samples: int | None
    """Of `doubling`: samples after which the batch doubles first; None is an eighth of the run."""
    doubling_ratio: float
    """Of `doubling`: each further doubling comes after this times as many samples."""
    relayout: bool
    """Whether the layout may change."""
    anneal_share: float
    """Part of the run, at its end, over which the batch grows in place of the rate's decay."""
    seq_length: int
    """Tokens of a sample."""
    length_ratio: int
    """Samples of positions and lengths of the run that a sample of a batch is; more than 1 where
    samples have become longer."""


def belief_of(rules: Rules, looks: Sequence[Look], total_samples: int) -> Belief:
    """The belief of a run of so many samples after some looks at the noise scale."""
    end = total_samples / rules.length_ratio
    return Belief(
        law=published_critical_batch_size(end, rules.seq_length),
        end=end,
        multiplier=rules.noise_scale_multiplier,
        looks=tuple(looks),
    )


def annealing_batch(first: int, part: float, left: int) -> float:
    """The batch that annealing by batch asks for, samples.

    The noise that steps leave in the weights goes with LR / sqrt(B). It falls linearly to 0 over
    the last part of a run, as with a rate that does. So B goes with the inverse square of what is
    left of that part.

    Args:
        first: batch at its start, samples.
        part: its samples.
        left: samples until the end.
    """
    return first * max(part / max(left, 1), 1.0) ** 2


@dataclass(frozen=True, kw_only=True)
class DecisionInputs:
    rules: Rules
    """How to decide."""
    noise: NoiseScale
    """The measured noise scale."""
    rows: tuple[ConfigThroughput, ...]
    """Configurations to choose from, the present one among them."""
    current: int
    """Index of the present one."""
    iteration: int
    """Steps done."""
    consumed_samples: int
    """Samples trained."""
    total_samples: int
    """Samples of the whole run."""
    elapsed_s: float
    """Seconds of training so far, pauses included."""
    paused_s: float = 0.0
    """Of these the pauses for changes of the layout."""
    relayout_cost_s: float
    """Upper estimate of the pause of a change of the layout, seconds."""
    relayout_costs_s: dict[str, float] = field(default_factory=dict)
    """The same for single layouts, by name; `relayout_cost_s` holds for the others."""
    in_warmup: bool = False
    """Whether the learning rate is still warming up."""
    in_ramp: bool = False
    """Whether the learning rate still follows the last growth."""
    lr_decay_factor: float = 1.0
    """Schedule's learning rate over its largest, 1 before it decays."""
    skipped_steps: int = 0
    """Of the last 100 steps those that left the weights unchanged."""
    blocked_layouts: tuple[Layout, ...] = ()
    """Layouts to which a change from the present one has failed."""
    relayouts_ended: bool = False
    """Whether too many changes of layout have failed."""
    hold_growth_until_samples: int = 0
    """No growth before, because of a loss spike."""
    hold_shrinking_until_samples: int = 0
    """The same of shrinking."""
    looks: tuple[Look, ...] = ()
    """At the noise scale so far."""
    annealing_from: int | None = None
    """Batch at which the run began to anneal by batch, samples; None before."""
    paused: bool = False
    """Whether an operator has stopped decisions."""

    @property
    def now(self) -> ConfigThroughput:
        """The present configuration."""
        return self.rows[self.current]

    @property
    def trained_samples(self) -> float:
        """Samples trained, in those of the present length."""
        return self.consumed_samples / self.rules.length_ratio

    @functools.cached_property
    def belief(self) -> Belief:
        """What is believed of the critical batch size."""
        return belief_of(self.rules, self.looks, self.total_samples)

    @property
    def critical_batch_size(self) -> float | None:
        """The critical batch size that decisions go by, samples: the median of the belief, or for a
        published policy a multiple of the noise scale. None where that is not measured."""
        if self.rules.policy == ADAPTIVE:
            return self.belief.interval(self.trained_samples)[0]
        phi = self.noise.phi_samples
        return self.rules.noise_scale_multiplier * phi if phi and phi > 0 else None

    @property
    def critical_batch_size_range(self) -> tuple[float | None, float | None]:
        """One standard deviation down and up of what is believed; None without a belief."""
        if self.rules.policy != ADAPTIVE:
            return None, None
        return self.belief.interval(self.trained_samples)[1:]

    @property
    def critical_batch_size_words(self) -> str:
        """The same and what it comes from, as the log and the report put it; empty if unknown."""
        if self.rules.policy == ADAPTIVE:
            return self.belief.words(self.trained_samples)
        critical, multiplier = self.critical_batch_size, self.rules.noise_scale_multiplier
        if critical is None:
            return ""
        scale = critical / multiplier
        return f"critical batch size {critical:.1f} = {multiplier:g} x noise scale {scale:.1f}"

    @property
    def annealing_batch(self) -> float:
        """The batch that annealing asks for, samples; 0 where the run does not anneal by batch."""
        if self.annealing_from is None:
            return 0.0
        part = self.rules.anneal_share * self.total_samples / self.rules.length_ratio
        return annealing_batch(self.annealing_from, part, self.samples_left)

    @property
    def samples_left(self) -> int:
        """Samples of the present length until the end of the run."""
        return max(self.total_samples - self.consumed_samples, 0) // self.rules.length_ratio

    def cost_s(self, layout: Layout) -> float:
        """Upper estimate of the pause of a change to a layout, seconds; 0 for the present one."""
        if layout == self.now.layout:
            return 0.0
        return self.relayout_costs_s.get(str(layout), self.relayout_cost_s)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; floats survive exactly."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "rules": asdict(self.rules),
            "noise": self.noise.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "blocked_layouts": [str(layout) for layout in self.blocked_layouts],
            "looks": [asdict(look) for look in self.looks],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DecisionInputs:
        """Inverse of `to_json`.

        Raises:
            TypeError, KeyError: a record of another form.
        """
        rules = dict(data["rules"])
        rules["grid"] = tuple(rules["grid"])
        rules["schedule"] = tuple((int(a), int(b)) for a, b in rules["schedule"])
        return cls(
            **{
                **data,
                "rules": Rules(**rules),
                "noise": NoiseScale.from_json(data["noise"]),
                "rows": tuple(ConfigThroughput.from_json(row) for row in data["rows"]),
                "blocked_layouts": tuple(map(Layout.from_text, data.get("blocked_layouts", ()))),
                "looks": tuple(Look(**look) for look in data.get("looks", ())),
            }
        )


def build_inputs(
    rules: Rules,
    state: ControllerState,
    *,
    noise: NoiseScale,
    rows: Sequence[ConfigThroughput],
    current: int,
    iteration: int,
    consumed_samples: int,
    total_samples: int,
    in_warmup: bool,
    lr_decay_factor: float,
    paused: bool,
    priors_s: Mapping[Layout, float] | None = None,
) -> DecisionInputs:
    """The inputs of a decision after a step; see `DecisionInputs` for the arguments. `priors_s` is
    what was predicted of changes to single layouts before any was measured, seconds."""
    costs = state.layout_costs
    return DecisionInputs(
        rules=rules,
        noise=noise,
        rows=tuple(rows),
        current=current,
        iteration=iteration,
        consumed_samples=consumed_samples,
        total_samples=total_samples,
        elapsed_s=state.elapsed_s,
        paused_s=costs.paused_s,
        relayout_cost_s=costs.seconds,
        relayout_costs_s={str(to): costs.seconds_of(s) for to, s in (priors_s or {}).items()},
        in_warmup=in_warmup,
        in_ramp=state.is_in_ramp(iteration),
        lr_decay_factor=lr_decay_factor,
        skipped_steps=state.skipped_steps,
        blocked_layouts=costs.blocked_layouts(rows[current].layout),
        relayouts_ended=costs.has_given_up,
        hold_growth_until_samples=state.hold_growth_until_samples,
        hold_shrinking_until_samples=state.hold_shrinking_until_samples,
        looks=tuple(state.looks),
        annealing_from=state.annealing_from,
        paused=paused,
    )


PRESENT = "the present configuration"
"""What blocks the candidate that the run is in."""
TOO_LITTLE = "it wins too little"
"""What blocks a candidate whose gain is below the one needed; a decision says both in its place."""
NEVER_PAYS = "the pause would not pay off in the rest of the run"
"""What blocks a candidate whose pause exceeds the rest."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration as the decision saw it."""

    row: ConfigThroughput
    """The configuration."""
    gain: float | None
    """Goodput over that of the present one, minus 1; None where the policy predicts none."""
    needed: float | None
    """Gain that a change to it needs; None without a gain, or where its pause exceeds the rest."""
    blocked_reason: str
    """Why the run cannot change to it now, or `PRESENT`; empty if it can."""
    gain_sd: float | None = None
    """Standard deviation of the logarithm of 1 plus the gain, as far as it counted: 0 where the
    throughput was timed, and before the present one was. None without a gain."""

    def to_json(self) -> dict[str, Any]:
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "row": self.row.to_json()}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do at a step boundary."""

    kind: Literal["stay", "batch", "relayout"]
    """Nothing; another batch or micro-batch; another layout."""
    to: ConfigThroughput
    """The configuration to go on with."""
    reason: str
    """One line with the numbers."""
    gain: float | None
    """Predicted goodput over the present one, minus 1."""
    target_batch: float | None
    """Batch that the policy wants in the end, samples."""
    gain_sd: float | None = None
    """Standard deviation of the logarithm of 1 plus that; None without a gain."""
    is_scaled: bool = True
    """Whether throughputs are scaled to this machine: this run has timed the present configuration,
    or that of `to`."""
    critical_batch_size: float | None = None
    """What the decision went by, samples."""
    critical_batch_size_low: float | None = None
    """One standard deviation below that; None where no belief says so."""
    critical_batch_size_high: float | None = None
    """One standard deviation above."""
    candidates: tuple[Candidate, ...] = field(default_factory=tuple)
    """The best, best first."""

    @property
    def other_layouts(self) -> list[Layout]:
        """Layouts of the candidates but that of `to`, best first."""
        layouts = dict.fromkeys(c.row.layout for c in self.candidates)
        return [layout for layout in layouts if layout != self.to.layout]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; floats survive exactly."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "to": self.to.to_json(),
            "candidates": [c.to_json() for c in self.candidates],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Decision:
        candidates = tuple(
            Candidate(**{**c, "row": ConfigThroughput.from_json(c["row"])})
            for c in data["candidates"]
        )
        to = ConfigThroughput.from_json(data["to"])
        return cls(**{**data, "to": to, "candidates": candidates})
