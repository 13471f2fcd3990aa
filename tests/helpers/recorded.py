"""Small runs in directories, written by the writers of the product."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.gns_callback import noise_scalars
from copus_ext.controller.rules import rules_of
from copus_ext.gns.observer import NoiseScale
from copus_ext.goodput.belief import Look
from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.decide import decide
from copus_ext.goodput.headroom import of_inputs
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs, Rules
from copus_ext.goodput.state import WINDOW_STEPS, ControllerState
from copus_ext.planner.configuration import Configuration
from megatron.trainer.common.control import LOCK_FILE
from megatron.trainer.config.layout import Layout
from megatron.trainer.logging.log_line import StepReport
from megatron.trainer.logging.tracker import NullTracker, Sink, Tracker

BATCH, TOTAL = 16, 16_000
LAYOUT = "tp1.pp1.dp2"
CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 16,
    "seq_length": 128,
    "padded_vocab_size": 384,
    "train_samples": TOTAL,
    "save_interval": 10,
    "log_interval": 5,
}


def shipped_rules(
    first_batch: int = 8, *, flags: dict[str, Any] | None = None, **changes: Any
) -> Rules:
    """The rules of a run with `--copus` and the given flags: what ships, on two replicas.

    Args:
        first_batch: of the run.
        flags: fields of `CopusConfig`.
        changes: fields of the rules that a test is about.
    """
    batch = SimpleNamespace(
        seq_length=128, initial_global_batch_size=first_batch, step_batch_size_schedule=None
    )
    config: Any = SimpleNamespace(batch=batch, layout=Layout(dp=2))
    rules = rules_of(CopusConfig(copus=True, **(flags or {})), config)
    return dataclasses.replace(rules, **changes)


def noise(
    phi: float | None = 64.0, *, spread: float = 2.0, status: Any = None, steps: float = 100
) -> NoiseScale:
    """A noise scale with an interval from phi / spread to phi * spread, or of another status."""
    status = status or ("none" if phi is None else "ok")
    return NoiseScale(
        status=status,
        phi_samples=None if phi is None or status != "ok" else phi,
        low_samples=None if phi is None else phi / spread,
        high_samples=None if phi is None or status != "ok" else phi * spread,
        grad_norm_sq=None if phi is None else 1.0,
        grad_variance_trace=phi,
        smoothed_tokens_per_sample=128.0,
        step_tokens_per_sample=128.0,
        effective_steps=steps if phi is not None else 0.0,
        estimator="micro",
        age_tokens=0.0,
    )


def row(
    batch: int, speed: float = 10.0, *, micro: int = 4, sd: float = 0.0, dp: int = 2, **more: Any
) -> ConfigThroughput:
    """A configuration and its speed; `more` are further sizes of the layout."""
    return ConfigThroughput(
        configuration=Configuration(
            layout=Layout(**{"pp": 2 // dp, "dp": dp, **more}),
            micro_batch_size=micro,
            global_batch_size=batch,
        ),
        samples_per_s=speed,
        relative_sd=sd,
        source="measured",
    )


def situation(iteration: int, batch: int = BATCH, phi: float = 64.0) -> DecisionInputs:
    """Saturating throughput, so that a batch above the first one is best."""
    rows = tuple(row(b, 30.0 * b / (b + 32)) for b in (8, 16, 32, 64, 128))
    return DecisionInputs(
        rules=shipped_rules(grid=(8, 16, 32, 64, 128)),
        noise=noise(phi),
        rows=rows,
        current=next(i for i, r in enumerate(rows) if r.global_batch_size == batch),
        iteration=iteration,
        consumed_samples=iteration * batch,
        total_samples=TOTAL,
        elapsed_s=1600.0,
        relayout_cost_s=60.0,
        looks=(Look(samples=40.0, noise_scale=1.0, log_variance=0.01),),
    )


def step(tracker: NullTracker, i: int, **changes: Any) -> None:
    loss = changes.pop("loss", 6.0 / i)
    known = noise(64.0 + i)
    more = changes.pop("extra", {})
    values: dict[str, Any] = dict(
        iteration=i,
        train_iterations=TOTAL // BATCH,
        consumed_samples=BATCH * i,
        elapsed_per_iteration_ms=500.0 + i,
        learning_rate=1e-3,
        global_batch_size=BATCH,
        losses={"lm loss": loss},
        grad_norm=2.0 + i,
    )
    tracker.step(
        StepReport(**{**values, **changes}),
        extra={**noise_scalars(known), **more},
        micro_batch_size=4,
        num_microbatches=2,
        updated=True,
        noise={**known.to_json(), "measured": True},
    )


def record_run(
    run: Path,
    steps: int = 20,
    *,
    launch: str = "job.0.0",
    start: int = 0,
    ended: bool = True,
    sinks: tuple[Sink, ...] = (),
    **config: Any,
) -> None:
    """A launch from its start to its end, with a checkpoint every tenth step. One that has not
    ended holds its directory, as if it were training or had been killed."""
    hold(run)
    with Tracker(run, launch=launch, sinks=sinks) as tracker:
        tracker.event("run.start", start, BATCH * start, config={**CONFIG, **config}, layout=LAYOUT)
        for i in range(start + 1, start + steps + 1):
            step(tracker, i)
            if i % 10 == 0:
                tracker.event("checkpoint.begin", i, BATCH * i)
                sizes: dict[str, Any] = {"bytes": 1000, "free_bytes": 9000}
                tracker.event("checkpoint.commit", i, BATCH * i, seconds=0.5, **sizes)
        if ended:
            done = start + steps
            tracker.event("run.end", done, BATCH * done, why="done")
    if ended:
        let_go(run)


def hold(run: Path) -> None:
    """Makes a directory that of a living run, as its lock does."""
    (run / LOCK_FILE).parent.mkdir(parents=True, exist_ok=True)
    (run / LOCK_FILE).touch()


def let_go(run: Path) -> None:
    """Removes the lock as its holder does, with a directory that is empty then."""
    (run / LOCK_FILE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (run / LOCK_FILE).parent.rmdir()


def record_decisions(run: Path, *, reason: str | None = None) -> DecisionLog:
    """A journal with a batch that grew, its outcome, and a decision to stay.

    Args:
        run: directory of the run.
        reason: what the change is said to be for.
    """
    state, log = ControllerState(), DecisionLog(run)
    log.write("start", mode="act", flags={"copus_policy": "adaptive"}, layout=LAYOUT)
    grown = situation(5, 8)
    decision = decide(grown)
    gain = of_inputs(grown)
    log.record_decision(grown, decision, number=1, applied=True, seconds=0.01, headroom=gain)
    change = ConfigChange(
        decision=1,
        iteration=5,
        consumed_samples=40,
        from_batch=8,
        from_micro_batch=4,
        from_layout=LAYOUT,
        to_batch=decision.to.global_batch_size,
        to_micro_batch=4,
        to_layout=LAYOUT,
        predicted_samples_per_s=decision.to.samples_per_s,
        gain=decision.gain,
        reason=reason or decision.reason,
    )
    state.apply(change, ramp=None)
    for i in range(WINDOW_STEPS):
        state.record_step(
            key=change.to_key,
            iteration=6 + i,
            consumed_samples=56 + 16 * i,
            batch=16,
            loss=3.0,
            seconds=16 / 9.5,
        )
    outcome = state.record_outcome()
    assert outcome is not None
    log.record_outcome(outcome, num_changes=1)
    stay = situation(15, BATCH, phi=16.0)
    more: dict[str, Any] = {"seconds": 0.01, "headroom": of_inputs(stay)}
    log.record_decision(stay, decide(stay), number=2, applied=False, **more)
    return log
