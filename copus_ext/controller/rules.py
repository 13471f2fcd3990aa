"""From the controller's flags to the rules of its decisions; refuses what makes no sense."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from copus_ext.controller.flags import (
    DECISION_STEPS,
    MAX_GROWTH,
    MAX_SHRINKING,
    NOISE_SCALE_MULTIPLIER,
    PUBLISHED_NOISE_SCALE_MULTIPLIER,
    CopusConfig,
    name_of,
)
from copus_ext.controller.segments import length_ratio
from copus_ext.cost_model.model_spec import divisors
from copus_ext.goodput import policies
from copus_ext.goodput.inputs import ADAPTIVE, Rules
from copus_ext.goodput.lr_scaling import MAX_RAMP_SHARE, RateRules, ramp_steps
from copus_ext.goodput.state import (
    MIN_TIMED_STEPS,
    TRIED_STEPS,
    WARM_UP_STEPS,
    ControllerState,
)
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.extras import problems_of
from megatron.trainer.config.batch_schedule import make_schedule, parse_steps
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems, layout_problems
from megatron.trainer.config.moe_flags import changed_by_batch_or_layout

if TYPE_CHECKING:
    from megatron.trainer.config import Config

GROWTH, OWN_GROWTH = 2.0, 4.0
"""Most by which the batch grows at once, with the published policies and with adaptive."""
_ANY = 1e9
_POSITIVE = (
    "copus_noise_scale_multiplier",
    "copus_interval",
    "copus_min_global_batch_size",
    "copus_max_global_batch_size",
    "copus_reference_batch_size",
    "copus_max_micro_batch_size",
    "copus_doubling_first_tokens",
    "copus_relayout_checkpoint_tokens",
    "copus_relayout_cost_s",
    "copus_gns_interval",
    "copus_gns_half_life_tokens",
)
MIN_EFFECTIVE_STEPS = 20.0
"""Measurements that the noise scale must be worth before it counts."""
_FIRST_STEPS = WARM_UP_STEPS + MIN_TIMED_STEPS
"""Before the first where layouts may change: from then on the present one's speed is known, and of
configurations of the present batch nothing else needs to be."""
BLIND_TO_EXPERTS = "--copus cannot measure the noise of experts that see parts of samples"
_ANNEALING_DECISIONS = 8
"""A decision comes after this part of the samples that are left, while the run anneals by batch."""


def check(flags: CopusConfig) -> None:
    """Checks the flags by themselves.

    Raises:
        UsageError: a value that makes no sense.
    """
    for field in _POSITIVE:
        value = getattr(flags, field)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name_of(field)} {value:g} must be positive")
    for field in ("copus_lr_ramp_steps", "copus_prebuild"):
        value = getattr(flags, field)
        if value is not None and value < 0:
            raise UsageError(f"{name_of(field)} {value} must be at least 0")
    if not 1 < flags.copus_doubling_ratio < math.inf:
        name, ratio = name_of("copus_doubling_ratio"), flags.copus_doubling_ratio
        raise UsageError(f"{name} {ratio:g} must exceed 1 and be finite")
    if not 0 <= flags.copus_anneal_by_batch < 1:
        name, share = name_of("copus_anneal_by_batch"), flags.copus_anneal_by_batch
        raise UsageError(f"{name} {share:g} must be at least 0 and below 1")
    if flags.copus_anneal_by_batch and flags.copus_policy != "adaptive":
        raise UsageError(
            f"{name_of('copus_anneal_by_batch')} needs --copus-policy adaptive; remove one of them"
        )
    least, most = flags.copus_min_global_batch_size, flags.copus_max_global_batch_size
    if least is not None and most is not None and least > most:
        raise UsageError(
            f"--copus-min-global-batch-size {least} is above --copus-max-global-batch-size {most}"
        )
    _user_grid(flags)


def observe_note(flags: CopusConfig, config: Config) -> str | None:
    """Says that the noise scale of a run that is only observed belongs to its micro-batches, as its
    loss does, or None. The run is left as it is; in mode `act` `check_run` refuses it."""
    reasons = changed_by_batch_or_layout(config.flat())
    if flags.copus_mode == "act" or not reasons:
        return None
    return (
        "--copus-mode observe leaves the training as it is, and its noise scale is that of this "
        f"micro-batch and layout alone: {reasons[0]}"
    )


def check_run(flags: CopusConfig, config: Config) -> None:
    """Checks the flags against those of the run.

    Raises:
        UsageError: they contradict each other.
    """
    batch, scheduled = config.batch, flags.copus_policy == "step_schedule"
    given = batch.step_batch_size_schedule
    if scheduled and given is None:
        raise UsageError("--copus-policy step_schedule needs --step-batch-size-schedule")
    if given is not None and not scheduled and flags.copus_mode == "act":
        raise UsageError(
            "--step-batch-size-schedule sets the batch and so does --copus; drop one, or use "
            "--copus-mode observe"
        )
    if flags.copus_anneal_by_batch and (style := config.optim.lr_decay_style) != "constant":
        raise UsageError(
            f"{name_of('copus_anneal_by_batch')} needs --lr-decay-style constant: with {style} the "
            "learning rate falls by itself"
        )
    moves = flags.copus_layouts == "all" and flags.copus_mode == "act"
    flat = config.flat()
    if found := problems_of("controller_problems", flat, moves):
        raise UsageError("\n".join(found))
    if moves and flags.copus_relayout == "relaunch" and config.checkpoint.save is None:
        raise UsageError("--copus-relayout relaunch needs --save, from which the run goes on")
    if moves and flags.copus_relayout == "relaunch" and config.checkpoint.no_save_optim:
        raise UsageError(
            "--copus-relayout relaunch goes on from checkpoints, which --no-save-optim leaves "
            "without moments; drop one of them"
        )
    if moves and flags.copus_relayout == "inprocess" and config.precision.fp8 is not None:
        raise UsageError(
            "--fp8-format: Transformer Engine's scales cannot follow a change of layout in the "
            "running processes; use --copus-relayout relaunch, or --copus-layouts current"
        )
    if flags.copus_mode == "act" and (reasons := changed_by_batch_or_layout(config.flat())):
        raise UsageError(
            f"--copus changes micro-batches and layouts, and {reasons[0]}; or use --copus-mode "
            "observe"
        )
    layout, is_moe = config.layout, config.moe.num_experts is not None
    if flags.copus_mode == "act" and is_moe and not layout.experts_see_whole_samples:
        raise UsageError(
            f"{BLIND_TO_EXPERTS}: make --expert-model-parallel-size {layout.ep} x "
            f"--expert-tensor-parallel-size {layout.expert_tensor_parallel_size} a multiple of "
            f"--tensor-model-parallel-size {layout.tp} x --context-parallel-size {layout.cp}, or "
            "use --copus-mode observe"
        )
    first = first_batch_of(flags, config)
    group = config.parallel.microbatch_group_size_per_vp_stage
    uneven = batch.allow_uneven_micro_batches
    if group and batch_problems(config.layout, batch.micro_batch_size, first, uneven=uneven):
        raise UsageError(
            f"--copus knows micro-batches in groups of the pipeline size, and the batch {first} "
            f"needs --microbatch-group-size-per-virtual-pipeline-stage {group}; choose another "
            "--global-batch-size"
        )
    least, most = _bounds(flags, config)
    if not least <= first <= most:
        raise UsageError(
            f"the first batch, {first}, is not between --copus-min-global-batch-size {least} and "
            f"--copus-max-global-batch-size {most}"
        )


def tensor_parallel_sizes(flags: CopusConfig, config: Config) -> list[int]:
    """The tensor parallel sizes that the run may be taken to on its ranks."""
    if flags.copus_layouts != "all":
        return []
    model, world_size = config.model, config.layout.world_size
    # Experts may be whole, or cut over fewer ranks than the rest.
    is_moe = config.moe.num_experts is not None
    whole: Any = {"etp": 1} if is_moe else {}
    return [
        tp
        for tp in divisors(math.gcd(world_size, model.num_attention_heads))
        if not layout_problems(
            Layout(tp=tp, **whole),
            config.flat(),
            seq_length=config.batch.seq_length,
            sequence_parallel=is_moe,
            knows_vocabulary=False,
        )
    ]


def _bounds(flags: CopusConfig, config: Config) -> tuple[int, int]:
    least, first = flags.copus_min_global_batch_size, first_batch_of(flags, config)
    if least is None:
        least = max(first // MAX_SHRINKING, 1) if _allows_shrink(flags) else first
    most = config.batch.global_batch_size if ramp_of(config) else MAX_GROWTH * first
    return least, flags.copus_max_global_batch_size or most


def bounds_at_start(flags: CopusConfig, known: Rules, config: Config) -> tuple[int, int]:
    """The least and the largest batch that a launch goes on with from a checkpoint. A policy that
    does not shrink the batch also keeps one that another policy has made smaller than the first."""
    least, most = _bounds(flags, config)
    is_kept = flags.copus_min_global_batch_size is None and not known.allow_shrink
    return 1 if is_kept else least, most


def _allows_shrink(flags: CopusConfig) -> bool:
    if flags.copus_allow_shrink is None:
        return flags.copus_policy == "adaptive"
    return flags.copus_allow_shrink


def _user_grid(flags: CopusConfig) -> list[int]:
    text = flags.copus_batch_grid
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{name_of('copus_batch_grid')} {text}: write batch sizes like 24,48")
    return [int(part) for part in parts]


def _schedule(flags: CopusConfig, config: Config) -> tuple[tuple[int, int], ...]:
    if flags.copus_policy != "step_schedule":
        return ()
    text = config.batch.step_batch_size_schedule or ""
    return parse_steps(text, config.batch.seq_length // length_ratio(config))


def first_batch_of(flags: CopusConfig, config: Config) -> int:
    if schedule := _schedule(flags, config):
        return schedule[0][1]
    ramp = ramp_of(config)
    return ramp[0] if ramp else config.batch.initial_global_batch_size


def ramp_of(config: Any) -> tuple[int, ...] | None:
    """`--rampup-batch-size`, which a simulated run lacks."""
    return getattr(config.batch, "rampup_batch_size", None)


def batch_of_ramp(config: Config, consumed_samples: int) -> int | None:
    """The batch that `--rampup-batch-size` takes at a place of the run, as it would without a
    controller; None without that flag."""
    if (ramp := ramp_of(config)) is None:
        return None
    size = config.batch.global_batch_size
    schedule = make_schedule(global_batch_size=size, rampup_batch_size=ramp)
    return schedule.at(consumed_samples)


def rules_of(flags: CopusConfig, config: Config) -> Rules:
    """The rules of a run; batches are those that its layout can cut into micro-batches."""
    batch, layout = config.batch, config.layout
    first, schedule = first_batch_of(flags, config), _schedule(flags, config)
    least, most = _bounds(flags, config)
    if schedule:
        least, most = (pick(size for _, size in schedule) for pick in (min, max))
    doublings = range(-int(math.log2(first)), int(math.log2(max(most // first, 1))) + 1)
    plain = {int(first * 2.0**k) for k in doublings if (first * 2.0**k).is_integer()}
    unit = layout.batch_unit
    # A layout of a later launch may not cut the first batch: the nearest below stands for it.
    sizes = {size // unit * unit for size in plain if least <= size <= most}
    more = {*_user_grid(flags), *(size for _, size in schedule)}
    more |= {batch.global_batch_size} if ramp_of(config) else set()
    sizes |= {size for size in more if least <= size <= most and size % unit == 0}
    ratio = length_ratio(config)
    tokens = flags.copus_doubling_first_tokens
    first_doubling = None if tokens is None else max(int(tokens * ratio / batch.seq_length), 1)
    is_ours = flags.copus_policy == ADAPTIVE
    return Rules(
        policy=flags.copus_policy,
        noise_scale_multiplier=_noise_scale_multiplier(flags),
        reference_batch=flags.copus_reference_batch_size or first,
        first_batch=first,
        grid=tuple(sorted(sizes - {0})),
        allow_shrink=_allows_shrink(flags) or bool(schedule),
        growth=_ANY if schedule else OWN_GROWTH if is_ours else GROWTH,
        min_effective_steps=MIN_EFFECTIVE_STEPS,
        schedule=schedule,
        doubling_first_samples=first_doubling,
        doubling_ratio=flags.copus_doubling_ratio,
        relayout=flags.copus_layouts == "all",
        anneal_share=flags.copus_anneal_by_batch,
        seq_length=batch.seq_length,
        length_ratio=ratio,
    )


def _noise_scale_multiplier(flags: CopusConfig) -> float:
    if flags.copus_noise_scale_multiplier is not None:
        return flags.copus_noise_scale_multiplier
    is_ours = flags.copus_policy == ADAPTIVE
    return NOISE_SCALE_MULTIPLIER if is_ours else PUBLISHED_NOISE_SCALE_MULTIPLIER


def rate_rules_of(flags: CopusConfig, config: Config) -> RateRules:
    """How the rates of a run go with its batch; the paper's policy jumps and keeps the decay."""
    steps, beta2 = flags.copus_lr_ramp_steps, config.optim.adam_beta2
    is_paper = flags.copus_policy == "copus"
    names: dict[str, Any] = {
        "lr": flags.copus_lr_rule,
        "weight_decay": "const" if is_paper else flags.copus_weight_decay_rule,
        "beta2_rule": flags.copus_beta2_rule,
    }
    return RateRules(
        **names,
        reference_batch=flags.copus_reference_batch_size or first_batch_of(flags, config),
        beta2=beta2,
        ramp_steps=0 if is_paper else ramp_steps(beta2) if steps is None else steps,
        max_ramp_samples=_max_ramp_samples(flags, config),
    )


def _max_ramp_samples(flags: CopusConfig, config: Any) -> float:
    """Most samples that the learning rate's way up to a larger batch takes: a twentieth of the
    schedule's decay, or any number where the user has given its steps."""
    decay = getattr(config.optim, "lr_decay_samples", None)
    is_given = flags.copus_lr_ramp_steps is not None
    return math.inf if is_given or decay is None else MAX_RAMP_SHARE * decay / length_ratio(config)


def rates_at(
    rates: RateRules, flags: CopusConfig, config: Config, consumed_samples: int
) -> RateRules:
    """How the rates go with the batch at a place of the run. Under `--rampup-batch-size` the user
    has chosen them for the batch that the ramp has there."""
    batch = batch_of_ramp(config, consumed_samples)
    if batch is None or flags.copus_reference_batch_size is not None:
        return rates
    return dataclasses.replace(rates, reference_batch=batch)


def samples_to_decision(
    flags: CopusConfig, config: Config, batch: int, state: ControllerState
) -> float:
    """Samples in which the run counts between two decisions, or before the first of a run.

    Args:
        flags: of the controller.
        config: of the run.
        batch: samples of a step.
        state: of the controller.
    """
    ratio = length_ratio(config)
    batch *= ratio
    samples: float = DECISION_STEPS * batch
    total, last = config.batch.train_samples, state.last_decision_samples
    left = total - last
    if left <= flags.copus_anneal_by_batch * total:
        # The batch that annealing asks for doubles while less than a third of the rest is trained.
        return max(min(samples, left / _ANNEALING_DECISIONS), batch)
    if flags.copus_interval is not None:
        samples = flags.copus_interval * ratio / config.batch.seq_length
    if flags.copus_policy == ADAPTIVE and state.changed_speed_alone:
        return min(samples, TRIED_STEPS * batch)
    if flags.copus_policy == ADAPTIVE:
        # At first the critical batch size grows fast.
        return min(samples, max(last, batch))
    is_early = not last and flags.copus_layouts == "all"
    return min(samples, _FIRST_STEPS * batch) if is_early else samples


def batches_to_weigh(rules: Rules, present: int) -> list[int]:
    """The batches that the present one may become, and those near it."""
    if rules.policy in policies.SCHEDULED:
        return sorted({*rules.grid, present})
    most = present * 2 * rules.growth
    return sorted({*(size for size in rules.grid if size <= most), present})
