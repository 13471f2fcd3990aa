"""Starting a run again in new processes: requests, what a run asks for as it ends, and the flags
that follow."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.reshard import relaunch
from copus_ext.reshard.relaunch import (
    Request,
    exit_code,
    merged,
    read_request,
    report_exit,
    resumed,
    write_request,
)
from megatron.trainer.checkpoint.files import TRACKER
from megatron.trainer.common.errors import Relaunch, TrainingFailure
from megatron.trainer.common.signals import StopReason
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.relayout import with_layout
from megatron.trainer.resilience.exit_status import RunOutcome
from tests.helpers.jobs import EIGHT, TINY

LAYOUTS = [
    Layout(),
    Layout(dp=4),
    Layout(tp=2, dp=2),
    Layout(tp=4),
    Layout(pp=2, dp=2),
    Layout(pp=2, vpp=2, dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, vpp=2),
    Layout(pp=4),
    Layout(pp=2, dp=2, layer_partition=(3, 1)),
    Layout(pp=2, vpp=2, dp=2, layer_partition=(0, 2, 1, 1)),
    Layout(cp=2, dp=2),
    Layout(tp=2, cp=2),
]


def asked(**fields: Any) -> Request:
    values: dict[str, Any] = {
        "launch": "job.0.1",
        "kind": "relayout",
        "iteration": 12,
        "consumed_samples": 96,
        "reason": "faster",
        "layout": Layout(pp=2),
        "checkpoint": "saved",
    }
    return Request(**{**values, **fields})


numbers = st.integers(0, 1 << 53)
sizes = st.none() | st.integers(1, 1 << 20)
requests = st.builds(
    Request,
    launch=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True),
    kind=st.sampled_from(["done", "relayout", "requeue", "abort"]),
    iteration=numbers,
    consumed_samples=numbers,
    reason=st.text(max_size=50),
    layout=st.sampled_from(LAYOUTS),
    micro_batch_size=sizes,
    global_batch_size=sizes,
    checkpoint=st.sampled_from(["saved", "/a/b c", "ä/ö"]),
)


@settings(max_examples=40)
@given(requests)
def test_a_request_comes_back_as_it_was(tmp_path_factory: Any, request_: Request) -> None:
    run = tmp_path_factory.getbasetemp() / "round"
    assert request_.line.isprintable() and request_.line
    write_request(run, request_)
    assert read_request(run, launch=request_.launch) == request_
    assert read_request(run, launch=request_.launch + "x") is None, "stale"
    assert os.listdir(run / "control") == ["request.json"]


GOOD = asked().to_json()
DAMAGED = {
    "empty": b"",
    "torn": json.dumps(GOOD).encode()[:60],
    "no text": b"\xff\xfe{}",
    "a list": b"[1]",
    "deep": b"[" * 60000,
    "long": b" " * 70000,
    "a long number": b'{"iteration": ' + b"9" * 5000 + b"}",
    "nothing in it": b"{}",
    **{
        f"{name} {str(value)[:12]!r}": json.dumps({**GOOD, name: value}).encode()
        for name, value in [
            ("launch", 7),
            ("launch", None),
            ("kind", "sell"),
            ("kind", ["done"]),
            ("iteration", -1),
            ("iteration", True),
            ("iteration", 1.5),
            ("iteration", 10**30),
            ("iteration", float("nan")),
            ("consumed_samples", "8"),
            ("reason", None),
            ("reason", "x" * 5000),
            ("layout", None),
            ("layout", 4),
            ("layout", {"tp": 2}),
            ("layout", {"tp": 0, "pp": 1, "vpp": 1, "dp": 1}),
            ("layout", {"tp": 1, "pp": 1, "vpp": 2, "dp": 1}),
            ("layout", {"tp": 1, "pp": 1, "vpp": 1, "dp": 10**400}),
            ("layout", {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "a\nb\x1b": 1}),
            ("micro_batch_size", 0),
            ("global_batch_size", "4"),
            ("checkpoint", None),
            ("checkpoint", ""),
            ("checkpoint", "--finetune"),
            ("checkpoint", "a\x00b"),
            ("checkpoint", "a\nb"),
            ("a\nb", 1),
        ]
    },
}


def test_what_is_damaged_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / relaunch.REQUEST_FILE
    assert read_request(tmp_path, launch="a") is None
    assert read_request(tmp_path / "nowhere", launch="a") is None
    (tmp_path / "control").write_text("a file")
    assert read_request(tmp_path, launch="a") is None
    (tmp_path / "control").unlink()
    path.parent.mkdir()
    for name, data in DAMAGED.items():
        path.write_bytes(data)
        with pytest.raises(ValueError) as raised:
            read_request(tmp_path, launch="job.0.1")
        message = str(raised.value)
        assert str(path) in message and message.isprintable() and len(message) < 600, name
    path.unlink()
    path.mkdir()
    outside = tmp_path / "outside"
    outside.write_text(json.dumps(GOOD))
    for make in (lambda: None, lambda: os.mkfifo(path), lambda: path.symlink_to(outside)):
        make()
        with pytest.raises(ValueError, match=r"request\.json"):
            read_request(tmp_path, launch="job.0.1")
        path.rmdir() if path.is_dir() else path.unlink()


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=4))
def test_any_json_is_a_request_or_an_error(value: Any) -> None:
    for data in (value, *({**GOOD, name: value} for name in GOOD)):
        try:
            assert isinstance(Request.from_json(data), Request)
        except ValueError as error:
            assert len(str(error)) < 300


USERS = {
    "plain": "",
    "layers of a chunk": "--pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1",
    "virtual stages": "--pipeline-model-parallel-size=2 --num-virtual-stages-per-pipeline-rank=2",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "another start": "--load elsewhere --ckpt-step 7 --finetune --no-load-optim",
    "twice": "--load=x --tensor-model-parallel-size 4 --tensor-model-parallel-size=1",
    "no overlap": "--no-overlap-p2p-communication",
    "groups": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--microbatch-group-size-per-virtual-pipeline-stage 3",
    "further token": "--mtp-num-layers 1",
    "cut": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout=Et|t*3L",
    "ends": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 "
    "--account-for-loss-in-pipeline-split",
    "context": "--context-parallel-size 2 --context-parallel-size=4",
    "two levels": "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2 "
    "--cp-comm-type a2a+p2p",
}
STAYS = ("groups", "further token")
"""Of these at least a part belongs to no layout."""
BASE = [*TINY.split(), "--train-iters", "9", "--save", "saved", "--save-interval", "3"]


@pytest.mark.parametrize("user", USERS.values(), ids=USERS.keys())
def test_the_parser_takes_every_change(user: str) -> None:
    argv = [*BASE, *user.split(), "--seed", "5"]
    for layout in LAYOUTS:
        if layout.cp > 1 and "--mtp-num-layers" in argv:
            continue  # refused
        micro = 2 if layout.dp < 4 else 1
        wanted = asked(layout=layout, micro_batch_size=micro, global_batch_size=16)
        flags = merged(argv, wanted)
        config = resolve(parse_args(flags), layout.world_size)
        assert config.layout == layout
        loading = config.checkpoint
        assert (loading.load, loading.ckpt_step, loading.finetune) == ("saved", None, False)
        assert not loading.no_load_optim
        assert (config.batch.micro_batch_size, config.batch.global_batch_size) == (micro, 16)
        assert config.runtime.seed == 5 and loading.save_interval == 3
        again = merged(flags, wanted)
        assert sorted(again) == sorted(flags), "nothing piles up"


@given(
    st.permutations([text for name, text in USERS.items() if name not in STAYS]),
    st.sampled_from(LAYOUTS),
)
def test_other_flags_stay_in_their_order(parts: list[str], layout: Layout) -> None:
    argv = [word for part in parts for word in [*part.split(), "--data-path", "0.3", "a=b", "--x"]]
    flags = merged([*argv, "--save=s/../saved"], asked(layout=layout))
    own = flags.index("--tensor-model-parallel-size")
    kept = flags[:own]
    assert "--load" in flags[own:]
    assert kept.count("--data-path") == kept.count("a=b") == kept.count("--x") == len(parts)
    theirs = {"--sequence-parallel", "--no-overlap-p2p-communication", "--save=s/../saved"}
    assert [w for w in kept if w not in theirs] == ["--data-path", "0.3", "a=b", "--x"] * len(parts)


def test_sequence_parallelism_follows_the_flags() -> None:
    wanted = asked(layout=Layout(tp=2))
    tensor = ["--tensor-model-parallel-size", "2"]
    assert "--sequence-parallel" in merged(BASE, wanted), "as in the same processes"
    assert "--sequence-parallel" not in merged([*BASE, *tensor], wanted)
    assert merged([*BASE, "--sequence-parallel"], wanted).count("--sequence-parallel") == 1


def every_layout(*, has_experts: bool) -> list[Layout]:
    """Sizes that the small models can take in any combination."""
    found = []
    for tp, cp, (pp, vpp), dp, ep, etp in itertools.product(
        (1, 2), (1, 2, 4), ((1, 1), (2, 1), (2, 2)), (1, 2), (1, 2, 4), (None, 1, 2)
    ):
        is_dense = ep == 1 and etp is None
        if (has_experts or is_dense) and tp * cp * dp % (ep * (etp or tp)) == 0:
            found.append(Layout(tp=tp, cp=cp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=etp))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("user", ["plain", "context", "two levels"])
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_a_restart_has_every_layout_that_is_asked_for(model: str, user: str) -> None:
    more = EIGHT.replace("alltoall", "allgather") if model == "experts" else ""
    argv = [*BASE, "--global-batch-size", "32", *more.split(), *USERS[user].split()]
    layouts = every_layout(has_experts=model == "experts")
    assert len(layouts) > (100 if model == "experts" else 30)
    for layout in layouts:
        config = resolve(parse_args(merged(argv, asked(layout=layout))), layout.world_size)
        assert config.layout == layout
        if user == "plain":
            # As after a change in the same processes.
            lived = with_layout(resolve(parse_args(argv), layout.world_size), layout)
            assert config.parallel.sequence_parallel == lived.parallel.sequence_parallel, layout
            assert config.batch == lived.batch


def test_an_exchange_on_two_levels_stays_where_its_sizes_fit() -> None:
    argv = [*BASE, *USERS["two levels"].split(), "--seed", "5"]
    for cp, exchange in ((4, ("a2a+p2p", [2, 2])), (2, ("p2p", None)), (1, ("p2p", None))):
        flags = merged(argv, asked(layout=Layout(cp=cp)))
        parallel = resolve(parse_args(flags), cp, cuda_available=True).parallel
        assert ("--hierarchical-context-parallel-sizes" in flags) is (cp == 4)
        assert flags[flags.index("--seed") + 1] == "5"
        told = parse_args(flags)
        assert (told.cp_comm_type[0], told.hierarchical_context_parallel_sizes) == (
            exchange[0],
            exchange[1] and tuple(exchange[1]),
        )
        assert parallel.context_parallel_size == cp


def test_a_restart_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    start = ["--load", "base", "--finetune", "--lr", "1", "--ckpt-step=3", "--save", str(tmp_path)]
    assert resumed(start) == start, "nothing is saved yet"
    assert resumed(start[:5]) == start[:5]
    (tmp_path / TRACKER).write_text("4")
    assert resumed(start) == ["--lr", "1", "--save", str(tmp_path), "--load", str(tmp_path)]


def test_another_folder_is_refused() -> None:
    for argv in (["--save", "other"], []):
        with pytest.raises(ValueError, match="saves in"):
            merged(argv, asked())


def test_blocked_layouts_are_read_and_nonsense_is_skipped() -> None:
    env = {relaunch.BLOCKED_VARIABLE: "tp2.pp1.dp4,,tp0.pp1.dp1,no,tp1.pp2.vpp2.dp1"}
    assert relaunch.blocked_layouts(env) == [Layout(tp=2, dp=4), Layout(pp=2, vpp=2)]
    assert relaunch.blocked_layouts({}) == []


def test_who_is_supervised() -> None:
    name = relaunch.LAUNCH_VARIABLE
    assert relaunch.is_supervised({name: "job.0.1"})
    assert not any(relaunch.is_supervised(env) for env in ({}, {name: ""}, {name: "a b"}))


LAUNCH = "job.0.3"
SIGNAL = StopReason(kind="signal", signal="SIGUSR1")
FULL = TrainingFailure("the disk is full")
ENDS = [
    (None, None, "saved", "done", 0, "complete"),
    (StopReason(kind="interval"), None, "saved", "done", 0, "--exit-interval"),
    (StopReason(kind="duration"), None, None, "done", 0, "--exit-duration-in-mins"),
    (StopReason(kind="callback", text="enough"), None, "saved", "done", 0, "enough"),
    (SIGNAL, None, "saved", "requeue", 85, "SIGUSR1"),
    (StopReason(kind="file"), None, "saved", "requeue", 85, "control/stop"),
    (StopReason(kind="time-limit"), None, "saved", "requeue", 85, "time limit"),
    (SIGNAL, None, None, "done", 0, "nothing of it is kept without --save"),
    (None, FULL, "saved", "abort", None, "the disk is full"),
    (None, TrainingFailure("a link", restart_helps=True), "saved", None, None, ""),
    (None, Relaunch("a rank is dead"), "saved", None, None, ""),
    (StopReason(kind="relayout", text="to tp2"), None, "saved", None, 0, ""),
]


@pytest.mark.parametrize(("reason", "failure", "save", "kind", "code", "words"), ENDS)
def test_a_supervisor_is_told_why_a_run_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: StopReason | None,
    failure: TrainingFailure | None,
    save: str | None,
    kind: str | None,
    code: int | None,
    words: str,
) -> None:
    outcome = RunOutcome(
        state=TrainState(iteration=7, consumed_samples=56),
        run_dir=tmp_path,
        layout=Layout(tp=2),
        save=save,
        reason=reason,
        failure=failure,
    )
    monkeypatch.delenv("COPUS_LAUNCH", raising=False)
    report_exit(outcome)
    assert not (tmp_path / relaunch.REQUEST_FILE).exists() and exit_code(outcome) == 0
    monkeypatch.setenv("COPUS_LAUNCH", LAUNCH)
    monkeypatch.setenv("RANK", "1")
    report_exit(outcome)
    assert not (tmp_path / relaunch.REQUEST_FILE).exists(), "rank 0 writes"
    monkeypatch.setenv("RANK", "0")
    report_exit(outcome)
    found = read_request(tmp_path, launch=LAUNCH)
    assert (found and found.kind) == kind
    if found is not None:
        assert words in found.line and found.iteration == 7 and found.consumed_samples == 56
        assert found.checkpoint == outcome.save and found.layout == outcome.layout
    if failure is None:
        assert exit_code(outcome) == code


def test_a_controllers_own_request_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPUS_LAUNCH", LAUNCH)
    own = asked(launch=LAUNCH)
    write_request(tmp_path, own)
    reason = StopReason(kind="relayout", text="faster")
    outcome = RunOutcome(
        state=TrainState(), run_dir=tmp_path, layout=Layout(), save="saved", reason=reason
    )
    report_exit(outcome)
    assert read_request(tmp_path, launch=LAUNCH) == own


def test_a_request_that_cannot_be_written_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COPUS_LAUNCH", LAUNCH)
    (tmp_path / "control").write_text("no directory")
    report_exit(RunOutcome(state=TrainState(), run_dir=tmp_path, layout=Layout(), save=None))
    assert "complete" in caplog.text
