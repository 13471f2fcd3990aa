"""What the training loop saves at a boundary where the layout changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron.training import loop
from megatron.training.settings import Request
from megatron.training.signals import StopReason


@pytest.mark.parametrize(
    ("kind", "leaves", "is_due", "calls"),
    [
        ("change", True, True, ["move", "save must"]),
        ("change", True, False, ["move", "save must"]),
        ("change", False, True, ["move", "save"]),
        ("save", False, True, ["save must", "move"]),
    ],
)
def test_a_boundary_is_saved_once(kind: Any, leaves: bool, is_due: bool, calls: list[str]) -> None:
    made: list[str] = []
    request = Request(kind=kind, reason="r", settings=None, move=lambda job: None)
    why = StopReason(kind="relayout", text="t") if leaves else None
    state = SimpleNamespace(iteration=0)

    def step(job: Any) -> Any:
        state.iteration += 1
        info = SimpleNamespace(loss=1.0, updated=True, grad_norm=1.0)
        return info, SimpleNamespace(stop=None, save=False)

    def save(*, must: bool, by_file: bool = False) -> bool:
        made.append("save must" if must else "save")
        return True

    job: Any = mock.MagicMock(
        state=state, valid_data=None, test_data=None, save=save, save_is_due=is_due
    )
    job.move = lambda move: made.append("move") or why
    job.fire = lambda event, **_: request if event == "on_train_step_end" else None
    job.outside.urgent_stop.return_value = None
    job.evaluation_due.return_value = False
    type(job).next_batch_fits = mock.PropertyMock(side_effect=[True, False])
    job.config.batch.iterations_to_skip = []
    with (
        mock.patch.object(loop, "train_step", step),
        mock.patch.object(loop, "Reporter"),
        mock.patch.object(loop, "BadSteps"),
    ):
        assert loop.train(job) is why
    assert made == calls
