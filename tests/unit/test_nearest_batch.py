"""A batch that few layouts can split is told with the nearest one that trains faster."""

from __future__ import annotations

import json
import shlex

import jsonschema
import pytest

from copus_ext.commands import plan
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.planner.nearest_batch import better_batch, near_batches
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from tests.helpers.launch import ROOT

MODEL, CLUSTER = PRESETS["llama-2-7b"].with_seq_length(2048), preset("a100-80g:16")
WHERE = "--model llama-2-7b --seq-length 2048 --cluster a100-80g:16 --top 1"


def test_batches_nearby_are_multiples_of_what_replicas_may_be() -> None:
    assert near_batches(511, 16) == [510, 512, 508, 504, 496]
    assert near_batches(7, 16) == [6, 8]
    assert near_batches(100, 64) == [96, 104, 112]
    assert near_batches(12, 12) == near_batches(64, 16) == near_batches(64, 1024) == []
    assert near_batches(1, 8) == [2]
    assert near_batches(15, 15) == [] and near_batches(16, 15) == [15, 18]


@pytest.mark.parametrize(("batch", "better"), [(511, 512), (7, 8)])
def test_the_nearest_that_trains_faster_is_told(
    batch: int, better: int, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = Planner(MODEL, CLUSTER)
    (poor,), (good,) = (planner.rank([size], top=1, reasons=False) for size in (batch, better))
    found = better_batch(planner, poor)
    assert found is not None and found.global_batch_size == better
    assert poor.fastest is not None and good.fastest is not None
    (_, slow_s), (c, quick_s) = poor.fastest, good.fastest
    assert (
        found.gain == pytest.approx(better / quick_s / (batch / slow_s) - 1) and found.gain > 0.05
    )
    assert found.configuration == c
    assert plan.main(shlex.split(f"{WHERE} --global-batch-size {batch}")) == 0
    told = f"global batch {batch} splits badly over 16 GPUs: --global-batch-size {better} trains "
    told += f"{100 * found.gain:.0f} % more tokens a second, with {quick_s:.4g} s a step on {c}"
    assert f"\n{told}\n" in capsys.readouterr().out
    assert plan.main(shlex.split(f"{WHERE} --global-batch-size {batch} --json")) == 0
    record = json.loads(capsys.readouterr().out)
    jsonschema.validate(record, json.loads((ROOT / "docs" / "plan.schema.json").read_text()))
    assert record["plans"][0]["better_batch"]["global_batch_size"] == better
    assert plan.main(shlex.split(f"{WHERE} --global-batch-size {batch} --format slurm")) == 0
    assert f"\n# {told}\n" in capsys.readouterr().out


def test_nothing_is_told_where_nothing_is_gained(capsys: pytest.CaptureFixture[str]) -> None:
    planner = Planner(MODEL, CLUSTER)
    (one,) = planner.rank([512], top=1, reasons=False)
    assert better_batch(planner, one) is None
    # A layout without replicas splits anything.
    fixed = Planner(MODEL, CLUSTER, limits=Limits(fixed={"tp": 8, "pp": 2, "vpp": 1, "cp": 1}))
    (one,) = fixed.rank([511], top=1, reasons=False)
    assert better_batch(fixed, one) is None
    down = Planner(MODEL, CLUSTER, limits=Limits(round_down=True))
    (one,) = down.rank([511], top=1, reasons=False)
    assert better_batch(down, one) is None
    assert plan.main(shlex.split(f"{WHERE} --global-batch-size 512")) == 0
    assert "splits badly" not in capsys.readouterr().out
