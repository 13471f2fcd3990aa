"""What megatron-core has beside a plain GPT: the same numbers under every layout, also after a
change of layout through a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.worker_features import ALONE, BEFORE, DAILY, LAYOUTS, MODELS, SAME
from tests.helpers.nightly import case, words_of
from tests.helpers.of_extras import of_extra
from tests.helpers.on_ranks import on_ranks

Runs = dict[str, list[list[float]]]
CASES = [
    case(model, layout, daily=model in DAILY)
    for model in MODELS
    for layout in LAYOUTS
    if layout != "dp"
]


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    on_ranks("worker_features", folder, 2, *words_of(request), timeout_s=1000)
    return folder


@pytest.fixture(scope="module")
def runs(output: Path) -> Runs:
    return json.loads((output / "result.json").read_text())


def numbers(steps: list[list[float]]) -> list[float]:
    """Losses and gradient norms of all steps in one row."""
    return [number for step in steps for number in step]


@pytest.mark.timeout(1040)
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_losses_and_norms_equal_those_of_plain_data_parallelism(
    runs: Runs, model: str, layout: str
) -> None:
    whole, own = runs[f"{model}-dp"], runs[f"{model}-{layout}"]
    rel = 2e-2 if model == "half" else 1e-5
    assert numbers(own) == pytest.approx(numbers(whole), rel=rel)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_run_goes_on_under_another_layout(runs: Runs, model: str, layout: str) -> None:
    whole, resumed = runs[f"{model}-dp"], runs[f"{model}-{layout}-resumed"]
    rel = 2e-2 if model == "half" else 1e-5
    assert len(resumed) == len(whole) - BEFORE
    assert numbers(resumed) == pytest.approx(numbers(whole[BEFORE:]), rel=rel)


@pytest.mark.nightly
def test_every_flag_has_an_effect_of_its_own(runs: Runs) -> None:
    found = [str(runs[f"alone-{number}"]) for number in range(len(ALONE) + 2)]
    alike = {text: [i for i, other in enumerate(found) if other == text] for text in found}
    assert [same for same in alike.values() if len(same) > 1] == []


def test_flags_of_the_schedule_change_no_number(runs: Runs) -> None:
    for number in range(len(SAME)):
        assert numbers(runs[f"same-{number}"]) == pytest.approx(numbers(runs["alone-0"]), rel=1e-5)
    assert numbers(runs["grouped"]) == pytest.approx(numbers(runs["plain"]), rel=1e-5)


@pytest.mark.parametrize("model", [case(name, daily=name in DAILY) for name in MODELS])
def test_a_checkpoint_is_proved_complete_and_converts(
    output: Path, tmp_path: Path, model: str
) -> None:
    convert = of_extra("megatron.trainer.extras.convert.convert").convert
    changes = of_extra("megatron.trainer.extras.convert.target").Changes(tp=2, dp=1)
    outcome = convert(output / f"{model}-saved", tmp_path / "to", changes, verify=True)
    assert outcome.num_compared
