"""What an out-of-memory report says against a prediction, and what is offered and said after it."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from copus_ext.commands import plan
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.planner.equals import FAR_ABOVE, MAY_FIT
from copus_ext.planner.request import configuration_of
from copus_ext.planner.search import Planner

MODEL, GIB = PRESETS["llama-2-13b"], 2.0**30
LARGE = "--model llama-2-13b --cluster h100-80g:64 --global-batch-size 256"
SURE = "tp8.pp2,micro_batch=1,recompute=full"


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    code = plan.main(shlex.split(text))
    out, err = capsys.readouterr()
    return code, out, err


def test_an_out_of_memory_of_what_surely_fits_is_doubted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    c = configuration_of(SURE, global_batch_size=256, world_size=64)
    needs = Planner(MODEL, preset("h100-80g:64")).priced(c).prediction
    assert needs.fit_probability > 0.99
    _, out, err = run(capsys, f"{LARGE} --measured '{SURE}: oom'")
    (line,) = [x for x in err.splitlines() if "warning" in x]
    assert f"by a factor of {80 * GIB / needs.peak_bytes:.1f} or more" in line
    assert f"{needs.peak_bytes / GIB:.1f} GiB" in line and "probability 1.00" in line
    for cause in ("another process", "--gpu", "--attention", "longer than 4096 tokens"):
        assert cause in line
    assert "nvidia-smi" in line and "max allocated" in line
    # Tools learn it, too.
    _, out, _ = run(capsys, f"{LARGE} --json --measured '{SURE}: oom'")
    assert any("contradicts" in x for x in json.loads(out)["inputs"]["warnings"])


def test_an_out_of_memory_that_was_to_be_feared_is_believed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for text in (LARGE.replace("h100-80g:64", "a100-80g:8"), LARGE):
        _, _, err = run(capsys, f"{text} --measured 'tp2.pp1,micro_batch=8: oom'")
        assert "warning" not in err


@pytest.mark.parametrize("told", ["", SURE, "tp2.pp2,micro_batch=2", "tp4.pp2,micro_batch=1"])
def test_nothing_is_offered_that_will_hardly_fit(
    capsys: pytest.CaptureFixture[str], told: str
) -> None:
    for where in (LARGE, LARGE.replace("h100-80g:64", "a100-80g:16")):
        measured = f"--measured '{told}: oom'" if told else ""
        _, out, _ = run(capsys, f"{where} --json {measured}")
        for one in json.loads(out)["plans"][0].get("try_first", []):
            memory = one["prediction"]["memory"]
            assert memory["fit_probability"] >= MAY_FIT >= 0.25
            assert memory["peak_bytes"] <= FAR_ABOVE * 80 * GIB


def test_what_may_fit_is_not_said_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Likely, but less so than a row has to be: neither "does not fit" nor "more do not help"."""
    where = LARGE.replace("h100-80g:64", "h100-80g:16")
    lacked = "tp8.pp2,micro_batch=1"
    seen = 0
    for text in ("tp8.pp2,recompute=full", "tp8.pp2,recompute=block:10", "tp4.pp4,recompute=full"):
        code, out, _ = run(capsys, f"explain {text} {where} --measured '{lacked}: oom'")
        chance = re.search(r"fits with probability (\d+) %", out)
        if code == 4 and chance is not None and int(chance[1]) >= 100 * MAY_FIT:
            seen += 1
            assert ": may not fit: " in out and "does not fit" not in out
    assert seen


def test_where_a_try_is_likely_more_gpus_are_not_said_to_be_of_no_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "--model llama-3-70b --seq-length 4096 --cluster a100-80g:16 --global-batch-size 128"
    code, out, err = run(capsys, where)
    line = next(x for x in err.splitlines() if "error" in x)
    assert code == 4 and "try 1" in out
    chance = re.search(r"fits with probability ([\d.]+)", out)
    assert chance is not None and f"none sure to fit, the likeliest with {chance[1]}" in line
    assert "none fits" not in line and "do not help" not in line
