"""An elastic run on CUDA and NCCL of the stub loses one of three ranks, under its supervisor."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.trainer.logging.metrics import read_metrics
from tests.gpu_stub import on_stub
from tests.gpu_stub.launch import variables
from tests.helpers import processes
from tests.helpers.jobs import steps_of
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.of_extras import of_extra
from tests.helpers.text import text_prefix

runs = of_extra("tests.extras.elastic.runs")
RANKS, STEPS, COPY_INTERVAL, KILLED_AT = 3, 10, 4, 6
MOMENTS = {
    "in the forward pass": "compute",
    "behind the reduction": "optimizer",
    "before the numbers of a step are shared": "after the optimizer",
}
"""Name -> moment of `tests/extras/elastic/rank.py`. The others wait for the lost rank in a
collective: the reduction, the gradient norm, `share_numbers`."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Loss by iteration of CPU ranks that nobody kills."""
    run = tmp_path_factory.mktemp("reference")
    flags = [*runs.MODEL.split(), "--data-path", text_prefix()]
    flags += ["--train-iters", str(STEPS), "--save", str(run)]
    run_ranks([ROOT / "pretrain_gpt.py", *flags], RANKS, timeout_s=300).check()
    return {step["iteration"]: step["losses"]["lm loss"] for step in steps_of(run)}


@pytest.fixture
def mark() -> Iterator[str]:
    """Of all that a test starts; it is ended."""
    name = uuid.uuid4().hex
    yield name
    processes.end_marked(name)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", MOMENTS)
def test_two_of_three_ranks_go_on(
    name: str, reference: dict[int, float], mark: str, tmp_path: Path
) -> None:
    kill = {"number": 0, "step": KILLED_AT, "moment": MOMENTS[name], "victim": [0, 1]}
    (tmp_path / "plan.json").write_text(json.dumps({"kills": [{**kill, "what": "rank"}]}))
    child = runs.start_node(
        tmp_path,
        [RANKS],
        0,
        "--device cuda",
        STEPS,
        data=text_prefix(),
        mark=mark,
        copy_interval=COPY_INTERVAL,
        python=on_stub.venv() / "bin/python",
        device=variables(RANKS),
    )
    codes, log = runs.wait([child], 300), (tmp_path / "log0").read_text()
    assert codes == [0], log[-6000:]
    assert processes.marked(mark) == []
    assert (tmp_path / "kill-0").exists()
    records = read_metrics(tmp_path / "run", superseded=True)
    first, *others = [r for r in records if r["kind"] == "run.start"]
    assert others[0]["members"] == [first["members"][0], first["members"][2]]
    assert {start["loaded"] for start in others} == {"memory of the ranks"}
    found = runs.account(tmp_path, STEPS, reference)
    assert (found["last_step"], found["samples_lost"]) == (STEPS, 0), log[-6000:]
    assert found["largest_loss_difference"] < 1e-5
