"""`copus plan partition`: what it tells and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.extras.layer_partition.layers import repartitions
from copus_ext.planner.plan import Ranked
from copus_ext.planner.profile import ProfileStore, Timing
from copus_ext.planner.search import Planner
from tests.unit.test_plan_command import MIXTRAL, json_of, run
from tests.unit.test_planner_moe import CLUSTER, MODEL


def test_partition_tells_the_fastest_split_of_the_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "--model llama-3-70b --cluster a100-80g:64 --global-batch-size 64 --top 3"
    cuts = json_of(capsys, f"partition {text}")["cuts"]
    assert cuts and all(sum(x["cut"]["layers"]) == 80 for x in cuts)
    assert "cuts" not in json_of(capsys, text)
    _, table, _ = run(capsys, f"partition {text}")
    assert "--pipeline-model-parallel-layout" in table and "with even stages" in table
    lines = [x for x in table.splitlines() if " partition " not in x and "even stages" not in x]
    assert run(capsys, text)[1].splitlines() == lines


def profile_of(path: Path, planner: Planner, found: Ranked, factor: float) -> Path:
    """A profile in which one configuration takes so many times what is predicted."""
    cluster = planner.cluster
    machine = {"model": planner.model.to_json(), "world_size": cluster.world_size}
    store = ProfileStore(path, {**machine, "gpu": cluster.gpu.name})
    measured = factor * found.prediction.step_s
    store.add(Timing(configuration=found.configuration, step_s=measured))
    return path


def test_a_profile_holds_for_partitions_as_for_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planner = Planner(PRESETS["llama-3-70b"], preset("a100-80g:64"))
    first = next(r for r in planner.rank([64], top=9)[0].ranked if r.configuration.layout.pp > 1)
    path = profile_of(tmp_path / "profile.jsonl", planner, first, 1.5)
    text = "partition --model llama-3-70b --cluster a100-80g:64 --global-batch-size 64 --top 9"
    found = json_of(capsys, f"{text} --profile {path}")
    assert found["cuts"]
    for cut in found["cuts"]:
        ranked = found["ranked"][cut["rank"] - 1]["prediction"]
        assert cut["even_step_s"] == pytest.approx(ranked["step_s"], rel=1e-6)
        assert cut["cut"]["step_s"] <= cut["even_step_s"] and cut["gain"] < 0.5


def test_it_refuses_mixtures(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, f"partition {MIXTRAL}")
    assert code == 2 and err.count("\n") == 1
    assert "`partition` does not know mixtures of experts" in err
    planner = Planner(MODEL, CLUSTER)
    with pytest.raises(SpecError, match="does not know mixtures of experts"):
        repartitions(planner, planner.rank([256], top=1)[0])
