"""Directories of runs that never ran, written with the writers that a run uses, and decided by what
decides in one."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.gns.observer import NoiseScale
from copus_ext.goodput.belief import Look
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import ConfigThroughput, Decision, DecisionInputs
from copus_ext.planner.configuration import Configuration
from megatron.trainer.config.layout import Layout
from megatron.trainer.logging.log_line import StepReport
from megatron.trainer.logging.tracker import Tracker
from tests.helpers.recorded import hold, let_go, noise, shipped_rules

GRID = (8, 16, 32, 64)
LAYOUTS = (Layout(dp=4), Layout(tp=2, dp=2), Layout(pp=2, dp=2))
FLAGS = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 128,
    "train_samples": 4000,
    "copus": True,
    "copus_policy": "adaptive",
    "world_size": 4,
}


def write_change(
    journal: DecisionLog,
    number: int,
    iteration: int,
    *,
    batch: int = 16,
    to: Layout = LAYOUTS[0],
    applied: bool = True,
) -> None:
    """A decision, applied or only proposed, to change from batch 8 on dp 4 and micro-batches of 2,
    without the rest of what it was about."""
    sizes = {"tp": to.tp, "pp": to.pp, "vpp": 1, "dp": to.dp, "micro_batch_size": 2}
    row = {**sizes, "global_batch_size": batch, "samples_per_s": 10.0}
    kind = "batch" if to == LAYOUTS[0] else "relayout"
    decision = {"kind": kind, "to": row, "reason": f"for {batch}", "gain": 0.5, "candidates": []}
    where = {"number": number, "iteration": iteration, "consumed_samples": 8 * iteration}
    journal.write("decision", **where, applied=applied, situation={}, decision=decision)


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Writes other records in place of those of a file of a run."""
    records = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records))


class WrittenRun:
    """A run that is written step by step, four ranks wide, at batch 8 on dp 4 at first.

    Args:
        path: its directory.
        launch: name of the first launch.
        flags: more of them, or others.
    """

    def __init__(self, path: Path, *, launch: str = "job.0.0", **flags: Any) -> None:
        self.path, self.flags = path, {**FLAGS, **flags}
        self.iteration = self.samples = self.number = 0
        self.batch, self.micro, self.layout = GRID[0], 2, LAYOUTS[0]
        self.journal = DecisionLog(path)
        self.tracker = Tracker(path, launch=launch)
        hold(path)
        self.start()

    def start(self) -> None:
        self.tracker.event(
            "run.start", self.iteration, self.samples, config=self.flags, layout=str(self.layout)
        )
        where = {"iteration": self.iteration, "consumed_samples": self.samples}
        self.journal.write("start", **where, mode="act", layout=str(self.layout), note="")

    def relaunch(self, name: str, *, iteration: int, samples: int) -> None:
        """A launch that goes on from a checkpoint, after the one before was killed."""
        self.tracker.close()
        self.tracker = Tracker(self.path, launch=name)
        self.iteration, self.samples = iteration, samples
        self.start()

    def loss(self) -> float:
        """Of the next step: falls, and goes up and down."""
        return 2.0 + 4.0 / math.sqrt(self.iteration + 1) + 0.3 * math.sin(1.7 * self.iteration)

    def step(self, num: int = 1, *, loss: float | None = None, noise: bool = True) -> None:
        for _ in range(num):
            value = self.loss() if loss is None else loss
            self.iteration += 1
            self.samples += self.batch
            report = StepReport(
                iteration=self.iteration,
                train_iterations=1000,
                consumed_samples=self.samples,
                elapsed_per_iteration_ms=100.0 + self.iteration % 7,
                learning_rate=1e-3 / (1 + self.iteration / 100),
                global_batch_size=self.batch,
                losses={"lm loss": value},
            )
            known: dict[str, Any] = {}
            if noise:
                known["noise"] = {**self.noise().to_json(), "measured": self.iteration % 3 == 0}
            self.tracker.step(report, micro_batch_size=self.micro, updated=True, **known)

    def noise(self) -> NoiseScale:
        """As known now; its interval is open above at first."""
        phi = 6.0 + 0.2 * self.iteration
        return dataclasses.replace(
            noise(phi, steps=50.0),
            status="ok" if self.iteration > 10 else "lower_bound_only",
            low_samples=0.8 * phi if self.iteration > 5 else 0.0,
            high_samples=1.3 * phi if self.iteration > 10 else None,
        )

    def situation(self) -> DecisionInputs:
        """What a decision would depend on now."""
        rows = [
            ConfigThroughput(
                configuration=Configuration(
                    layout=layout, micro_batch_size=micro, global_batch_size=batch
                ),
                samples_per_s=80.0 * (1 + 0.1 * i) * batch / (batch + 4) * (1 - 0.05 / micro),
                relative_sd=0.01,
                source="predicted",
            )
            for i, layout in enumerate(LAYOUTS)
            for batch in GRID
            for micro in (1, 2)
        ]
        current = next(
            i
            for i, row in enumerate(rows)
            if row.layout == self.layout
            and (row.global_batch_size, row.micro_batch_size) == (self.batch, self.micro)
        )
        rows[current] = dataclasses.replace(rows[current], source="measured", relative_sd=0.0)
        seen = self.noise().phi_samples
        assert seen is not None
        look = Look(samples=float(self.samples), noise_scale=seen, log_variance=0.01)
        return DecisionInputs(
            looks=(look,),
            rules=shipped_rules(
                flags={"copus_layouts": "all"},
                grid=GRID,
            ),
            noise=self.noise(),
            rows=tuple(rows),
            current=current,
            iteration=self.iteration,
            consumed_samples=self.samples,
            total_samples=1_000_000,
            elapsed_s=1000.0,
            relayout_cost_s=2.0,
        )

    def decide(self, *, applied: bool = True, reason: str | None = None) -> Decision:
        """Decides and obeys, as the controller would; `reason` replaces the words alone."""
        situation = self.situation()
        decision = decide(situation)
        self.number += 1
        told = decision.to_json() | ({} if reason is None else {"reason": reason})
        where = {"iteration": self.iteration, "consumed_samples": self.samples}
        self.journal.write(
            "decision",
            number=self.number,
            **where,
            applied=decision.kind != "stay" and applied,
            situation=json.loads(json.dumps(situation.to_json())),
            decision=told,
        )
        if decision.kind == "stay" or not applied:
            return decision
        before = (self.batch, self.micro, str(self.layout))
        if decision.kind == "relayout":
            self._relayout(str(decision.to.layout), where)
        to = decision.to
        self.batch, self.micro = to.global_batch_size, to.micro_batch_size
        self.layout = to.layout
        self._outcome(decision, before, where)
        return decision

    def _relayout(self, to: str, where: dict[str, Any]) -> None:
        about = {"number": self.number, **where, "start": str(self.layout), "to": to}
        self.journal.write("relayout.requested", **about, way="inprocess", predicted_s=2.0)
        phases = {"prepare": 0.125, "copy": 0.25, "copy together": 0.0625, "transfer": 1.5}
        outcome = {"kind": "moved", "reason": "", "phases": phases, "pause_s": 1.875}
        self.journal.write("relayout", **about, outcome=outcome)
        self.tracker.event("layout", self.iteration, self.samples, layout=to)

    def _outcome(
        self, decision: Decision, before: tuple[int, int, str], where: dict[str, Any]
    ) -> None:
        speed = decision.to.samples_per_s
        self.journal.write(
            "outcome",
            decision=self.number,
            **where,
            from_batch=before[0],
            from_micro_batch=before[1],
            from_layout=before[2],
            to_batch=self.batch,
            to_micro_batch=self.micro,
            to_layout=str(self.layout),
            predicted_samples_per_s=speed,
            gain=decision.gain,
            reason=decision.reason,
            samples_per_s_before=0.9 * speed,
            samples_per_s=0.95 * speed,
            steps=50,
            loss_slope=-0.5,
            slope_before=-1.0,
        )

    def evaluate(self, loss: float) -> None:
        self.tracker.evaluation(
            iteration=self.iteration, consumed_samples=self.samples, losses={"lm loss": loss}
        )

    def end(self, why: str = "done") -> None:
        self.tracker.event("run.end", self.iteration, self.samples, why=why)
        self.journal.write("end", iteration=self.iteration, changes=0)
        self.tracker.close()
        let_go(self.path)


def usual_run(path: Path, *, steps: int = 120, every: int = 20, **flags: Any) -> WrittenRun:
    """A run that decides every so many steps, evaluates once, and ends."""
    run = WrittenRun(path, **flags)
    for _ in range(steps // every):
        run.step(every)
        run.decide()
    run.evaluate(2.25)
    run.end()
    return run
