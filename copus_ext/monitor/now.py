"""How a run stands now: one value, from the end of its record and journal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.model_spec import SpecError
from copus_ext.monitor import alarms
from copus_ext.monitor.alarms import Alarm
from copus_ext.monitor.deciding import ControllerStatus, deciding_of
from copus_ext.monitor.decisions import MOVED, Decisions
from copus_ext.monitor.ends import Record, read_journal_end, read_record, seconds
from copus_ext.monitor.signs import State, is_paused, latest_checkpoint, read_signs
from copus_ext.monitor.values import measured, number, table, text, whole
from megatron.training.config.layout import Layout
from megatron.training.model.flops import LatentWidths, training_flops_per_sample

_SIZES = "global_batch_size", "micro_batch_size"
_MOST_FLOPS = 1e21
"""A peak above is none."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The gradient noise scale after the last step."""

    status: str
    """`ok`, `lower_bound_only` or `none`."""
    phi_samples: float | None
    """phi, samples."""
    low_samples: float | None
    """Lower end of the 95 % interval, samples."""
    high_samples: float | None
    """Upper end, samples; None when unbounded."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The last committed checkpoint."""

    iteration: int
    """Steps that it holds."""
    age_s: float
    """Seconds since it was committed."""
    steps_ago: int | None
    """Steps done since; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run stands. What is unknown is None."""

    run: str
    """Its directory."""
    t: float
    """When this was looked at, seconds since the epoch."""
    state: State
    """What it is about."""
    why: str
    """Why it is over, or what else is to be known."""
    silent_s: float | None
    """Seconds since the last sign of life."""
    launch: str
    """Name of the last launch."""
    launches: int
    """Launches in the end of the record that is read."""
    launches_at_least: bool
    """Whether there may be more."""
    crashes: int
    """Launches among them that another one followed and that did not say how they ended."""
    iteration: int | None
    """Steps done."""
    train_iterations: int | None
    """Steps of the whole run, as estimated at the last one."""
    consumed_samples: int | None
    """Samples trained."""
    train_samples: int | None
    """Samples of the whole run."""
    share_done: float | None
    """The one over the other."""
    left_s: float | None
    """Seconds to the end of the run at the pace of the last steps, pauses included."""
    loss: float | None
    """Of the last step, nats per token."""
    valid_loss: float | None
    """Of the last evaluation."""
    valid_iteration: int | None
    """Steps done before that."""
    learning_rate: float | None
    """After the last step."""
    grad_norm: float | None
    """Of the last step."""
    skipped: int
    """Of the last hundred steps those that left the weights unchanged."""
    step_s: float | None
    """Seconds of a step: the median of the last steps of the present configuration."""
    samples_per_s: float | None
    """Throughput of all ranks."""
    tokens_per_s: float | None
    """The same in tokens."""
    tflops_per_gpu: float | None
    """Model arithmetic of a rank, TFLOP/s."""
    mfu: float | None
    """That over the peak of the rank, where it is known."""
    batch: int | None
    """Samples of the last step."""
    micro_batch: int | None
    """Samples of its micro-batches."""
    layout: str
    """Such as `tp1.pp2.dp4`; empty if unknown."""
    noise: Noise | None
    """None without --copus."""
    deciding: ControllerStatus | None
    """None without a journal."""
    paused: bool
    """Whether an operator has stopped the controller's decisions."""
    saved: Saved | None
    """None before the first checkpoint."""
    alarms: tuple[Alarm, ...]
    """What an operator should look at, newest last."""


def read_now(run: Path, *, t: float | None = None) -> RunStatus:
    """How a run stands. Reads some megabytes, whatever the size of its files.

    Args:
        run: its directory.
        t: now, seconds since the epoch; None asks the clock.
    """
    t = time.time() if t is None else t
    record, decisions = read_record(run), read_journal_end(run)
    signs = read_signs(run, record, decisions, t=t)
    last, changes = record.last, _changes(record, decisions)
    layout = changes[-1][1] if changes else _decided_in(decisions) or _of_flags(record.config)
    batch, micro = whole(last.get("global_batch_size")), whole(last.get("micro_batch_size"))
    pace = _pace(record, decisions, since=changes[-1][0] if changes else 0.0, layout=layout)
    deciding = _deciding(run, record, decisions, present=(layout, micro, batch))
    saved = _saved(run, record, t)
    launches, crashes = _launches(record)
    evals = [e for e in record.of("eval") if e.get("split", "valid") == "valid"]
    evaluated = evals[-1] if evals else {}
    return RunStatus(
        run=text(run),
        t=t,
        state=signs.state,
        why=signs.why,
        silent_s=signs.silent_s,
        launch=record.launch,
        launches=launches,
        launches_at_least=not record.is_whole,
        crashes=len(crashes),
        train_iterations=whole(last.get("train_iterations")),
        loss=_loss(last),
        valid_loss=_loss(evaluated),
        valid_iteration=whole(evaluated.get("iteration")),
        learning_rate=number(last.get("learning_rate")),
        grad_norm=measured(last.get("grad_norm")),
        skipped=sum(step.get("updated") is False for step in record.steps),
        batch=batch,
        micro_batch=micro,
        layout=layout,
        noise=_noise(record),
        deciding=deciding,
        paused=is_paused(run),
        saved=saved,
        alarms=tuple(
            alarms.recorded(record, t=t)
            + alarms.seen(
                signs=signs,
                step_s=pace["step_s"],
                age_s=t - seconds(last) if last else None,
                decisions=decisions,
                crashes=crashes,
                t=t,
            )
        ),
        **_position(record, signs.is_alive, pace["wall_samples_per_s"]),
        **{name: value for name, value in pace.items() if name != "wall_samples_per_s"},
    )


def _loss(record: dict[str, Any]) -> float | None:
    return measured(table(record.get("losses")).get("lm loss"))


def _noise(record: Record) -> Noise | None:
    """That of the last step which tells."""
    known = next((n for s in reversed(record.steps) if isinstance(n := s.get("noise"), dict)), None)
    if known is None:
        return None
    names = ("phi_samples", "low_samples", "high_samples")
    ends = {name: number(known.get(name)) for name in names}
    return Noise(status=text(known.get("status")), **ends)


def _changes(record: Record, decisions: Decisions) -> list[tuple[float, str]]:
    """The layouts of the last launch and when it entered them, as far as is read."""
    known = [e for e in record.since_start if e.get("kind") in ("run.start", "layout")]
    found = [(seconds(event), text(event.get("layout"))) for event in known]
    found += [(s.t or 0.0, s.to) for s in decisions.switches if s.kind == MOVED]
    return sorted(found)


def _decided_in(decisions: Decisions) -> str:
    """The layout at the last decision; empty if unknown."""
    standing = decisions.standing
    return standing[-1].now.layout if standing else ""


def _of_flags(config: Mapping[str, Any]) -> str:
    """The layout that a launch began with; empty if unknown."""
    names = ("tensor", "pipeline", "virtual_pipeline")
    sizes = [whole(config.get(f"{name}_model_parallel_size")) for name in names]
    tp, pp, vpp, dp = *sizes, whole(config.get("data_parallel_size"))
    try:
        cut = config.get("layers_of_chunks")
        return str(Layout(tp=tp or 0, pp=pp or 0, vpp=vpp or 1, dp=dp or 0, cut=cut))
    except ValueError:
        return ""


def _deciding(
    run: Path, record: Record, decisions: Decisions, *, present: tuple[str, int | None, int | None]
) -> ControllerStatus | None:
    """What the controller makes of it; mode and policy as the launch's flags say, where its start
    is not among what is read of the journal."""
    if decisions.is_empty:
        return None
    known, config = deciding_of(run, decisions, present=present), record.config
    if decisions.mode:
        return known
    mode, policy = (text(config.get(f"copus_{name}")) for name in ("mode", "policy"))
    return replace(known, mode=mode or known.mode, policy=policy or known.policy)


def _position(record: Record, is_alive: bool, pace: float | None) -> dict[str, Any]:
    """How far it is, and how long it has to go."""
    last, total = record.last, whole(record.config.get("train_samples"))
    start = record.starts[-1] if record.starts else {}
    source = last or start
    consumed = whole(source.get("consumed_samples"))
    known = bool(total) and consumed is not None
    left = max(total - consumed, 0) if known and total and consumed is not None else None
    return {
        "iteration": whole(source.get("iteration")),
        "consumed_samples": consumed,
        "train_samples": total,
        "share_done": consumed / total if known and total and consumed is not None else None,
        "left_s": left / pace if is_alive and left is not None and pace else None,
    }


def _pace(record: Record, decisions: Decisions, *, since: float, layout: str) -> dict[str, Any]:
    """Of the last steps of one configuration; `wall_samples_per_s` counts what is between them.

    Args:
        record: of the run.
        decisions: the end of its journal.
        since: when the layout was entered, seconds since the epoch.
        layout: the present one.
    """
    names = "step_s", "samples_per_s", "tokens_per_s", "tflops_per_gpu", "mfu", "wall_samples_per_s"
    found: dict[str, Any] = dict.fromkeys(names)
    steps = _alike(record.steps, since)
    batch = whole(record.last.get("global_batch_size"))
    times = [number(step.get("elapsed_per_iteration_ms")) for step in steps]
    step_s = statistics.median([ms / 1000 for ms in times if ms is not None and ms > 0] or [0.0])
    if not batch or step_s <= 0:
        return found
    found |= {
        "step_s": step_s,
        "samples_per_s": batch / step_s,
        "wall_samples_per_s": batch / step_s,
    }
    wall_s = seconds(steps[-1]) - seconds(steps[0])
    if len(steps) > 1 and wall_s > 0:
        found["wall_samples_per_s"] = (len(steps) - 1) * batch / wall_s
    if (length := whole(record.config.get("seq_length"))) is not None:
        found["tokens_per_s"] = length * batch / step_s
    flops = _flops_of_a_rank(record, layout, batch / step_s)
    if flops is not None:
        found["tflops_per_gpu"] = flops / 1e12
        peak = _peak_flops(record.config, decisions)
        found["mfu"] = None if peak is None else flops / peak
    return found


def _alike(steps: Sequence[dict[str, Any]], since: float) -> list[dict[str, Any]]:
    """The last steps that were taken alike, under a layout that was entered at some time; until
    there is one, those before."""
    found: list[dict[str, Any]] = []
    for step in reversed(steps):
        is_other = any(step.get(name) != steps[-1].get(name) for name in _SIZES)
        if is_other or seconds(step) < since <= seconds(steps[-1]):
            break
        found.append(step)
    return found[::-1]


def _flops_of_a_rank(record: Record, layout: str, samples_per_s: float) -> float | None:
    """Model arithmetic per second; None where the flags do not tell."""
    names = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"]
    names += ["num_query_groups", "kv_channels", "seq_length", "padded_vocab_size"]
    sizes = {name: whole(record.config.get(name)) for name in names}
    try:
        ranks = Layout.from_text(layout).world_size
    except ValueError:
        return None
    if not all(sizes.values()):
        return None
    known = {name: size for name, size in sizes.items() if size is not None}
    gated = record.config.get("swiglu") is True or record.config.get("quick_geglu") is True
    try:
        flops = training_flops_per_sample(
            **known,
            gated_mlp=gated,
            latent=LatentWidths.of(record.config),
            mtp_num_layers=whole(record.config.get("mtp_num_layers")) or 0,
        )
    except (KeyError, TypeError, ArithmeticError):
        return None
    return flops * samples_per_s / ranks


def _peak_flops(config: dict[str, Any], decisions: Decisions) -> float | None:
    """Of a rank, as the controller noted it, or of the machine that the flags name. No other file
    is opened for it: the path would be one of the machine that trains."""
    known = decisions.peak_flops
    if known is not None and 0 < known < _MOST_FLOPS:
        return known
    kind = text(config.get("copus_cluster")).partition(":")[0]
    try:
        gpu = preset(f"{kind}:1").gpu
    except SpecError:
        return None
    half = config.get("bf16") is True or config.get("fp16") is True
    return gpu.peak("bf16" if half else "fp32")


def _saved(run: Path, record: Record, t: float) -> Saved | None:
    done = whole(record.last.get("iteration"))
    commits = [e for e in record.of("checkpoint.commit") if whole(e.get("iteration")) is not None]
    known = (commits[-1]["iteration"], seconds(commits[-1])) if commits else latest_checkpoint(run)
    if known is None:
        return None
    iteration, then = known
    since = None if done is None else max(done - iteration, 0)
    return Saved(iteration=iteration, age_s=max(t - then, 0.0), steps_ago=since)


def _launches(record: Record) -> tuple[int, list[float]]:
    """How many, and when those began that followed a crash."""
    crashes: list[float] = []
    count, is_open = 0, False
    for event in record.of("run.start", "run.end"):
        if event["kind"] == "run.start":
            count += 1
            crashes += [seconds(event)] if is_open else []
        is_open = event["kind"] == "run.start"
    return count, crashes
