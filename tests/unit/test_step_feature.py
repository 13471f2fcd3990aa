"""What an extra does in a step: a real training calls its hooks in order, and shows its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.common.step_settings import Request, StepInfo
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.train import build
from megatron.trainer.train.job import Job
from megatron.trainer.train.pretrain import pretrain
from megatron.trainer.train.step_feature import Schedule, StepFeature
from tests.helpers.jobs import TINY
from tests.helpers.launch import run_in_fork

FLAGS = "--train-iters 3 --eval-interval 2 --eval-iters 1 --save-interval 2 --log-interval 1"


class Recorder(StepFeature):
    """Notes its hooks with the steps done then."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def begin_schedule(self, job: Job, schedule: Schedule) -> dict[str, Any]:
        name = "forward" if schedule.forward_only else "schedule"
        self.seen.append((name, job.state.iteration))
        return {}

    def before_optimizer(self, job: Job) -> None:
        assert any(p.main_grad.abs().sum() > 0 for c in job.model.chunks for p in c.parameters())
        self.seen.append(("optimizer", job.state.iteration))

    def after_step(self, job: Job, info: StepInfo) -> None:
        assert info.iteration == job.state.iteration
        job.context.scalars["recorder"] = float(10 * info.iteration)
        self.seen.append(("after", job.state.iteration))

    def between_steps(self, job: Job) -> Request | None:
        self.seen.append(("between", job.state.iteration))
        return Request(kind="stop", reason="a test") if job.state.iteration == 2 else None

    def before_save(self, job: Job) -> None:
        self.seen.append(("save", job.state.iteration))

    def remove_hooks(self) -> None:
        self.seen.append(("removed", -1))


def trained(folder: Path) -> list[tuple[str, int]]:
    recorder, build.build_features = Recorder(), lambda *_: (recorder,)
    words = [*TINY.split(), *FLAGS.split(), "--run-dir", str(folder), "--save", str(folder / "c")]
    pretrain(resolve(parse_args(words), 1))
    return recorder.seen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[str, int]], Path]:
    folder = tmp_path_factory.mktemp("run")
    return run_in_fork(trained, folder), folder


def test_hooks_come_in_the_order_of_the_step(run: tuple[list[tuple[str, int]], Path]) -> None:
    seen = [hook for hook in run[0] if hook[0] != "forward"]
    steps = [("schedule", 0), ("optimizer", 0), ("after", 1), ("between", 1)]
    steps += [("schedule", 1), ("optimizer", 1), ("after", 2), ("between", 2)]
    assert seen[: len(steps)] == steps
    assert seen[len(steps) :] == [("save", 2), ("removed", -1)]
    assert ("forward", 2) in run[0], "the evaluation"


def test_numbers_of_a_feature_are_recorded(run: tuple[list[tuple[str, int]], Path]) -> None:
    records = [json.loads(x) for x in (run[1] / "metrics.jsonl").read_text().splitlines()]
    found = [r["extra"]["recorder"] for r in records if "recorder" in r.get("extra", {})]
    assert found == [10.0, 20.0]
