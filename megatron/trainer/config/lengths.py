"""Lengths in samples, fixed at the first launch so that no later batch size moves them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron.trainer.common.errors import UsageError, counted
from megatron.trainer.config.batch_schedule import BatchSchedule, make_schedule
from megatron.trainer.config.draft import Draft, Environment, flag_of

if TYPE_CHECKING:
    from megatron.trainer.config import Config

USUAL_WARMUP_STEPS = 50
"""A warm-up of the learning rate usually has at least so many steps."""
_SHORT_RUN_STEPS = 100
"""A run of fewer steps is a trial, and no warm-up would be long enough."""
_GIVEN_BY = {
    "train_samples": ("train_iters", "train_samples"),
    "lr_decay_samples": ("lr_decay_iters", "lr_decay_samples"),
    "lr_warmup_samples": ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    "lr_wsd_decay_samples": ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
}


@dataclass(frozen=True, kw_only=True)
class TrainingLengths:
    """What a run promised at its first launch; stored in every checkpoint."""

    initial_global_batch_size: int
    """Samples per step in which iterations were counted."""
    train_samples: int
    """Length of training in samples."""
    lr_decay_samples: int
    """Length of the learning rate decay in samples."""
    lr_warmup_samples: int
    """Length of the learning rate warm-up in samples."""
    lr_wsd_decay_samples: int | None
    """Length of the last part of a WSD schedule in samples, or None without one."""
    eval_samples: int
    """Validation samples of the whole run."""

    @classmethod
    def of(cls, config: Config) -> TrainingLengths:
        """Reads the lengths of a resolved configuration."""
        return cls(
            initial_global_batch_size=config.batch.initial_global_batch_size,
            train_samples=config.batch.train_samples,
            lr_decay_samples=config.optim.lr_decay_samples,
            lr_warmup_samples=config.optim.lr_warmup_samples,
            lr_wsd_decay_samples=config.optim.lr_wsd_decay_samples,
            eval_samples=config.batch.eval_samples,
        )

    def to_json(self) -> dict[str, int | None]:
        """Returns the fields as a JSON-safe dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainingLengths:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: missing or unknown keys.
        """
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            raise ValueError(f"lengths have the keys {sorted(names)}, got {sorted(data)}")
        return cls(**data)


def to_samples(iters: int | None, samples: int | None, schedule: BatchSchedule) -> int | None:
    """Returns a length in samples from the one of the two forms that is given, or None. Iterations
    are the first so many steps of the batch schedule."""
    return schedule.samples_after(iters) if iters else samples


def last_samples(iters: int, schedule: BatchSchedule, lr_decay_samples: int) -> int:
    """Returns the samples of the last so many steps of the decay."""
    all_steps = schedule.iterations_left(0, lr_decay_samples)
    return schedule.samples_after(all_steps) - schedule.samples_after(all_steps - iters)


def warmup_samples(fraction: float | None, length: int | None, lr_decay_samples: int) -> int:
    """Returns the warm-up in samples: a share of the decay, or a length in samples."""
    if fraction is not None:
        return int(fraction * lr_decay_samples)
    return length or 0


def count_eval_samples(
    num_iterations: int, eval_interval: int | None, eval_iters: int, global_batch_size: int
) -> int:
    """Returns the validation samples of a run: one evaluation per interval and one at the end."""
    during = num_iterations // eval_interval if eval_interval else 0
    return (during + 1) * eval_iters * global_batch_size


def schedule_of(draft: Draft) -> BatchSchedule:
    """Returns the batch schedule of a draft whose global batch size is known.

    Raises:
        UsageError: batch flags that contradict each other.
    """
    return make_schedule(
        global_batch_size=draft["global_batch_size"],
        rampup_batch_size=draft["rampup_batch_size"],
        step_batch_size_schedule=draft["step_batch_size_schedule"],
        seq_length=draft["seq_length"],
    )


def derive_horizon(draft: Draft, environment: Environment) -> None:
    """Converts every length of a draft to samples, once, and checks them."""
    _check_units(draft)
    draft.stop_if_problems()
    unit = draft["global_batch_size"]
    draft["initial_global_batch_size"] = unit
    schedule = schedule_of(draft)
    total = to_samples(draft["train_iters"], draft["train_samples"], schedule)
    decay = to_samples(draft["lr_decay_iters"], draft["lr_decay_samples"], schedule) or total
    length = to_samples(draft["lr_warmup_iters"], draft["lr_warmup_samples"], schedule)
    assert total is not None and decay is not None
    draft["train_samples"] = total
    draft["lr_decay_samples"] = decay
    draft["lr_warmup_samples"] = warmup_samples(draft["lr_warmup_fraction"], length, decay)
    if draft["lr_wsd_decay_iters"]:
        last = last_samples(draft["lr_wsd_decay_iters"], schedule, decay)
        draft["lr_wsd_decay_samples"] = last
    iterations = schedule.iterations_left(0, total)
    draft["eval_samples"] = count_eval_samples(
        iterations,
        draft["eval_interval"],
        draft["eval_iters"],
        draft["eval_global_batch_size"] or unit,
    )
    draft.require(
        iterations >= 1,
        f"--train-samples {total} is less than one batch of {unit} samples; raise it",
    )
    warmup = draft["lr_warmup_samples"]
    draft.require(
        warmup < decay,
        f"a warm-up of {warmup} samples does not fit into a decay of {decay} samples; shorten "
        "--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
    )
    draft.require(
        draft["lr_decay_style"] != "WSD" or draft["lr_wsd_decay_samples"] is not None,
        "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples; give one",
    )
    draft.require(
        draft["min_lr"] <= draft["lr"],
        f"--min-lr {draft['min_lr']} is above --lr {draft['lr']}; lower it",
    )
    apart, lowest = draft["decoupled_lr"], draft["decoupled_min_lr"]
    draft.require(
        lowest is None or apart is not None,
        "--decoupled-min-lr needs --decoupled-lr; give both or none",
    )
    lowest = draft["min_lr"] if lowest is None else lowest
    draft.require(
        apart is None or lowest <= apart,
        f"--decoupled-lr {apart} is below the lowest learning rate {lowest}; lower "
        "--decoupled-min-lr",
    )
    derive_weight_decay(draft)
    if len(schedule.steps) > 1 and (given := lengths_given(draft.explicit, draft.values)):
        flag = "rampup_batch_size" if draft["rampup_batch_size"] else "step_batch_size_schedule"
        draft.notes.append(f"iterations count the steps of {flag_of(flag)}: {given}")


def lengths_given(explicit: Collection[str], values: Mapping[str, Any]) -> str:
    """What the lengths given in iterations became, such as `--train-iters 50 is 400 samples`; empty
    where none is given so.

    Args:
        explicit: names of the flags that were given.
        values: of all fields, with the lengths in samples.
    """
    told = [
        f"{flag_of(iters)} {values[iters]} is {values[samples]} samples"
        for samples, names in _GIVEN_BY.items()
        for iters in names
        if iters.endswith("_iters") and iters in explicit and values[iters]
    ]
    return ", ".join(told)


def _check_units(draft: Draft) -> None:
    """Checks that lengths are given all in iterations or all in samples."""
    by_iters, by_samples = draft["train_iters"] is not None, draft["train_samples"] is not None
    draft.require(by_iters or by_samples, "--train-iters or --train-samples is required; give one")
    draft.require(
        not (by_iters and by_samples),
        "--train-iters and --train-samples exclude each other; drop one",
    )
    other, unit = ("samples", "--train-iters") if by_iters else ("iters", "--train-samples")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        flag = f"{name}_{other}"
        draft.require(
            not draft[flag],
            f"{flag_of(flag)} {draft[flag]} does not go with {unit}; give the length in the same "
            "unit",
        )
    fraction = draft["lr_warmup_fraction"]
    if fraction is not None:
        draft.require(
            0 <= fraction < 1, f"--lr-warmup-fraction {fraction} must be at least 0 and below 1"
        )
        draft.require(
            not draft["lr_warmup_iters"] and not draft["lr_warmup_samples"],
            "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples; drop one",
        )


def derive_weight_decay(draft: Draft) -> None:
    """Fills in first and last weight decay where it is constant."""
    constant = draft["weight_decay_incr_style"] == "constant"
    start, end = draft["start_weight_decay"], draft["end_weight_decay"]
    if constant:
        draft.require(
            {start, end} <= {None, draft["weight_decay"]},
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
            "cosine",
        )
    else:
        draft.require(
            start is not None and end is not None,
            f"--weight-decay-incr-style {draft['weight_decay_incr_style']} needs "
            "--start-weight-decay and --end-weight-decay; give both",
        )
    draft.default("start_weight_decay", draft["weight_decay"])
    draft.default("end_weight_decay", draft["weight_decay"])


def apply_checkpoint_lengths(config: Config, stored: TrainingLengths, *, override: bool) -> Config:
    """Puts the lengths of a checkpoint into the configuration of a resumed run.

    The stored lengths win where the flags are absent or mean the same when iterations are counted
    in the stored initial batch size. `--use-checkpoint-opt-param-scheduler` takes the stored
    learning rate schedule unasked.

    Args:
        config: resolved from the flags of this launch.
        override: whether the flags win (`--override-opt_param-scheduler`): all of the learning
            rate schedule, and `train_samples` if it grew.

    Raises:
        UsageError: a flag that means another length than the stored one, one line each.
    """
    if override:
        new, problems = _overridden(config, stored)
    else:
        new, problems = _confirmed(config, stored)
    if problems:
        raise UsageError("\n".join(problems))
    notes = config.runtime.notes
    if new["train_samples"] > stored.train_samples:
        notes += (
            f"training is extended from {stored.train_samples} to {new['train_samples']} samples; "
            "the order of samples changes once another epoch is planned",
        )
    now, first = config.batch.global_batch_size, stored.initial_global_batch_size
    if now != first:
        num = config.batch.eval_iters * (config.batch.eval_global_batch_size or first)
        evaluations = f"; an evaluation is of {num}" if num else ""
        note = (
            f"--global-batch-size is {now} and was {first} at the first launch, in whose steps "
            f"iterations are counted: the run trains {new['train_samples']} samples, warms up over "
            f"{new['lr_warmup_samples']} and decays over {new['lr_decay_samples']}{evaluations}"
        )
        notes += () if note in notes else (note,)
    grown = config.replace(
        initial_global_batch_size=stored.initial_global_batch_size, notes=notes, **new
    )
    return grown.replace(eval_samples=max(stored.eval_samples, _eval_samples(grown)))


def warmup_note(config: Config) -> str | None:
    """One line for a run whose learning rate warms up in few steps of its first batch; None if they
    are enough. In a run of fewer than 200 steps a quarter of them is."""
    schedule, optim = BatchSchedule.of(config), config.optim
    total = schedule.iterations_left(0, config.batch.train_samples)
    steps = schedule.iterations_left(0, optim.lr_warmup_samples)
    usual = min(USUAL_WARMUP_STEPS, total // 4)
    if total < _SHORT_RUN_STEPS or steps >= usual:
        return None
    flat = config.flat()
    given = [
        name for name in _GIVEN_BY["lr_warmup_samples"] if name in config.explicit and flat[name]
    ]
    unit = "lr_warmup_iters" if "train_iters" in config.explicit else "lr_warmup_samples"
    flag = flag_of(given[0] if given else unit)
    if not optim.lr_warmup_samples:
        return f"the learning rate does not warm up; {usual} steps or more are usual: give {flag}"
    return (
        f"the learning rate warms up in {counted(steps, 'step')}; {usual} or more are usual: raise "
        f"{flag}"
    )


def _eval_samples(config: Config) -> int:
    iterations = BatchSchedule.of(config).iterations_left(0, config.batch.train_samples)
    return count_eval_samples(
        iterations,
        config.batch.eval_interval,
        config.batch.eval_iters,
        config.batch.eval_global_batch_size or config.batch.initial_global_batch_size,
    )


def _asked(config: Config, name: str, schedule: BatchSchedule, lr_decay_samples: int) -> int | None:
    """Returns what the flags given for one length mean in samples, or None if none was given."""
    flat = config.flat()
    given = [flag for flag in _GIVEN_BY[name] if flag in config.explicit and flat[flag] is not None]
    if not given:
        return None
    flag = given[0]
    if flag == "lr_warmup_fraction":
        return warmup_samples(flat[flag], None, lr_decay_samples)
    if not flag.endswith("_iters"):
        return flat[flag]
    if flag == "lr_wsd_decay_iters":
        return last_samples(flat[flag], schedule, lr_decay_samples)
    return schedule.samples_after(flat[flag])


def _schedule_at_start(config: Config, stored: TrainingLengths) -> BatchSchedule:
    """The batch schedule in whose steps the first launch counted iterations."""
    batch = config.batch
    return make_schedule(
        global_batch_size=stored.initial_global_batch_size,
        rampup_batch_size=batch.rampup_batch_size,
        step_batch_size_schedule=batch.step_batch_size_schedule,
        seq_length=batch.seq_length,
    )


def _confirmed(config: Config, stored: TrainingLengths) -> tuple[dict[str, Any], list[str]]:
    new = {name: getattr(stored, name) for name in _GIVEN_BY}
    problems, schedule = [], _schedule_at_start(config, stored)
    for name in _GIVEN_BY:
        if name.startswith("lr_") and config.optim.use_checkpoint_opt_param_scheduler:
            continue
        asked = _asked(config, name, schedule, stored.lr_decay_samples)
        if asked is not None and asked != new[name]:
            problems.append(_conflict(config, name, asked, stored))
    return new, problems


def _overridden(config: Config, stored: TrainingLengths) -> tuple[dict[str, Any], list[str]]:
    schedule = _schedule_at_start(config, stored)
    train = _asked(config, "train_samples", schedule, 0)
    train = stored.train_samples if train is None else train
    decay = _asked(config, "lr_decay_samples", schedule, 0)
    decay = train if decay is None else decay
    wsd = _asked(config, "lr_wsd_decay_samples", schedule, decay)
    new = {
        "train_samples": train,
        "lr_decay_samples": decay,
        "lr_warmup_samples": _asked(config, "lr_warmup_samples", schedule, decay) or 0,
        "lr_wsd_decay_samples": stored.lr_wsd_decay_samples if wsd is None else wsd,
    }
    problems = []
    if train < stored.train_samples:
        problems.append(_conflict(config, "train_samples", train, stored))
    if new["lr_warmup_samples"] >= decay:
        problems.append(
            f"a warm-up of {new['lr_warmup_samples']} samples does not fit into a decay of {decay} "
            "samples; shorten --lr-warmup-iters or --lr-warmup-samples"
        )
    return new, problems


def _conflict(config: Config, name: str, asked: int, stored: TrainingLengths) -> str:
    given = next(flag for flag in _GIVEN_BY[name] if flag in config.explicit)
    flag = "--" + given.replace("_", "-")
    value = config.flat()[given]
    is_constant = len(_schedule_at_start(config, stored).steps) == 1
    unit = f" at {stored.initial_global_batch_size} samples each" if is_constant else ""
    unit = unit if given.endswith("_iters") else ""
    told = f"{flag} {value}{unit}" + ("" if value == asked else f" = {asked} samples")
    kept = getattr(stored, name)
    start = f"{told} differs from the {kept} samples of the checkpoint; drop the flag"
    if name == "train_samples" and asked < kept:
        return f"{start}, or stop earlier with --exit-interval"
    return f"{start}, or add --override-opt_param-scheduler to change it"
