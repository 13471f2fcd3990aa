"""The controller in a checkout of Megatron-LM: a fake of its seams around real megatron-core."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.commands import replay
from copus_ext.controller.flags import CopusConfig
from copus_ext.megatron_lm.checkout import check
from megatron.trainer.common.core_version import since
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.batch_schedule import make_schedule
from tests.helpers.launch import run_ranks

WORKER = Path(__file__).with_name("worker_megatron_lm.py")
RAMPS = ["ramp_plain", "ramp_off", "ramp_observed", "ramp"]
pytestmark = pytest.mark.timeout(480)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("megatron_lm")
    found: dict[str, Any] = {"folder": folder}
    kinds = ["plain", "new", "shrinking", *RAMPS]
    run_ranks([WORKER, folder, *kinds], 2, timeout_s=220).check()
    return found | {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in kinds}


def batches(run: dict[str, Any]) -> list[int]:
    return [row[1] for row in run["log"]]


def test_the_batch_doubles_where_it_should(runs: dict[str, Any]) -> None:
    assert batches(runs["plain"]) == [8] * 32
    # 1,024 and 2,048 tokens are 64 and 128 samples; 256 samples in all.
    assert batches(runs["new"]) == [8] * 8 + [16] * 4 + [32] * 4


def test_the_default_policy_may_also_shrink_there(runs: dict[str, Any]) -> None:
    lines = (runs["folder"] / "shrinking" / "journal.jsonl").read_text().splitlines()
    rows = [r for r in map(json.loads, lines) if r["kind"] == "decision"]
    assert rows and all(r["situation"]["rules"]["allow_shrink"] for r in rows)


@pytest.mark.parametrize("kind", ["plain", "new", "shrinking"])
def test_every_sample_is_read_once(runs: dict[str, Any], kind: str) -> None:
    assert runs[kind]["read"] == list(range(256)) and runs[kind]["consumed"] == 256


def test_losses_are_those_of_the_plain_run_until_it_changes(runs: dict[str, Any]) -> None:
    assert runs["new"]["log"][:8] == runs["plain"]["log"][:8]


def test_the_learning_rate_follows(runs: dict[str, Any]) -> None:
    rates = [row[3] for row in runs["new"]["log"]]
    # The ramp of ten steps begins with the ninth: half of the doubling's logarithm in all.
    assert rates[7] == 1e-3 and rates[8] == pytest.approx(1e-3 * 2**0.05)
    assert rates[2:] == sorted(rates[2:])


@pytest.mark.parametrize("kind", ["ramp_off", "ramp_observed"])
def test_a_ramp_that_is_only_watched_is_the_plain_one_bit_for_bit(
    runs: dict[str, Any], kind: str
) -> None:
    plain = runs["ramp_plain"]
    # megatron-core 0.19 takes `--rampup-batch-size` without effect.
    assert sorted(set(batches(plain))) == ([16] if since("0.19") else [4, 8, 12, 16])
    assert runs[kind]["log"] == plain["log"] and runs[kind]["read"] == plain["read"]


def test_a_ramp_is_where_the_controller_begins(runs: dict[str, Any]) -> None:
    run, schedule = runs["ramp"], make_schedule(global_batch_size=16, rampup_batch_size=(4, 4, 64))
    # 64 and 128 samples as above; the largest is that of the flags.
    assert batches(run) == [4] * 16 + [8] * 8 + [16] * 8 and run["read"] == list(range(256))
    consumed, changed = 0, 0
    for _, batch, _, rate in run["log"]:
        changed = consumed if consumed in (64, 128) else changed
        rule = 1e-3 * (batch / schedule.at(consumed)) ** 0.5 if consumed >= 16 else None
        if rule is not None:
            assert 7e-4 <= rate <= max(rule, 7e-4) * (1 + 1e-12), consumed
            # Three steps of the way up behind a change.
            if not changed or consumed - changed >= 3 * batch:
                assert rate == pytest.approx(max(rule, 7e-4), rel=1e-12), consumed
        consumed += batch


def test_a_rate_that_needs_no_factor_any_more_is_the_schedules(runs: dict[str, Any]) -> None:
    rates = [row[3] for row in runs["ramp"]["log"]]
    # The ramp of the flags is at 12 there, and the batch at 4: --min-lr is above the rule's rate.
    assert set(rates[12:16]) == {7e-4}
    assert set(rates[-5:]) == {1e-3}, "both are at 16"


def test_the_journal_can_be_decided_again(
    runs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(runs["folder"] / "new")]) == 0
    assert "0 different" in capsys.readouterr().out
    lines = (runs["folder"] / "new" / "journal.jsonl").read_text().splitlines()
    decisions = [r for r in map(json.loads, lines) if r["kind"] == "decision"]
    assert decisions[-1]["situation"]["noise"]["grad_norm_sq"] is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataloader_type": "cyclic"}, "--dataloader-type single"),
        ({"context_parallel_size": 2}, "--context-parallel-size 1"),
        ({"use_megatron_fsdp": True}, "FSDP"),
        ({"step_batch_size_schedule": "0:8 1K:16"}, "--step-batch-size-schedule"),
    ],
)
def test_what_does_not_go_with_it_is_said(change: dict[str, Any], words: str) -> None:
    good, flags = {"train_samples": 100}, CopusConfig(copus=True)
    check(SimpleNamespace(**good), flags)
    with pytest.raises(UsageError, match=words):
        check(SimpleNamespace(**{**good, **change}), flags)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dist_ckpt_optim_fully_reshardable": False}, "--dist-ckpt-optim-fully-reshardable"),
        ({"ckpt_format": "torch"}, "--ckpt-format torch_dist"),
    ],
)
def test_layouts_change_where_each_can_load_the_others_checkpoints(
    change: dict[str, Any], words: str
) -> None:
    flags = CopusConfig(copus=True, copus_layouts="all")
    good = {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
    good |= {"save": "checkpoints", "ckpt_format": "torch_dist"}
    check(SimpleNamespace(**good), flags)
    check(SimpleNamespace(**{**good, **change, "save": None}), flags)
    check(SimpleNamespace(**{**good, **change}), CopusConfig(copus=True))
    with pytest.raises(UsageError, match=words):
        check(SimpleNamespace(**{**good, **change}), flags)


def test_a_schedule_of_the_batch_can_be_watched() -> None:
    args = SimpleNamespace(step_batch_size_schedule="0:8 1K:16")
    check(args, CopusConfig(copus=True, copus_mode="observe"))
