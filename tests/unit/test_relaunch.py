"""Starting a run again in new processes: requests, the flags that follow, and what follows a
launch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.launch import verdict
from copus_ext.launch.local import end_launch
from copus_ext.launch.ranks import code_of
from copus_ext.launch.verdict import Judge
from copus_ext.reconfigure import relaunch
from copus_ext.reconfigure.relaunch import Request, flags_for, merged, read_request, write_request
from megatron.training import checkpoint_files as files
from megatron.training.arguments import parse_args, resolve
from megatron.training.errors import TrainingFailure
from megatron.training.layout import Layout
from tests.helpers.jobs import TINY

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


@given(requests)
def test_a_request_is_plain_json(request_: Request) -> None:
    assert Request.from_json(json.loads(json.dumps(request_.to_json()))) == request_
    assert request_.line.isprintable() and request_.line


@settings(max_examples=8)
@given(requests)
def test_a_request_comes_back_as_it_was(tmp_path_factory: Any, request_: Request) -> None:
    run = tmp_path_factory.getbasetemp() / "round"
    write_request(run, request_)
    assert read_request(run, launch=request_.launch) == request_
    assert read_request(run, launch=request_.launch + "x") is None, "stale"
    assert os.listdir(run / "control") == ["request.json"]


def test_no_request_is_none(tmp_path: Path) -> None:
    assert read_request(tmp_path, launch="a") is None
    assert read_request(tmp_path / "nowhere", launch="a") is None
    (tmp_path / "control").write_text("a file")
    assert read_request(tmp_path, launch="a") is None


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


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_what_is_damaged_is_said_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / relaunch.REQUEST_FILE
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(ValueError) as raised:
        read_request(tmp_path, launch="job.0.1")
    message = str(raised.value)
    assert str(path) in message and message.isprintable() and len(message) < 600


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / relaunch.REQUEST_FILE
    path.parent.mkdir()
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
}
BASE = [*TINY.split(), "--train-iters", "9", "--save", "saved", "--save-interval", "3"]


@pytest.mark.parametrize("user", USERS.values(), ids=USERS.keys())
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_parser_takes_every_change(user: str, layout: Layout) -> None:
    argv = [*BASE, *user.split(), "--seed", "5"]
    micro = 2 if layout.dp < 4 else 1
    wanted = asked(layout=layout, micro_batch_size=micro)
    flags = merged(argv, wanted)
    config = resolve(parse_args(flags), layout.world_size)
    assert config.layout == layout
    loading = config.checkpoint
    assert (loading.load, loading.ckpt_step, loading.finetune) == ("saved", None, False)
    assert not loading.no_load_optim
    assert (config.batch.micro_batch_size, config.batch.global_batch_size) == (micro, 8)
    assert config.runtime.seed == 5 and loading.save_interval == 3
    again = merged(flags, wanted)
    assert sorted(again) == sorted(flags), "nothing piles up"


@given(st.permutations(list(USERS.values())), st.sampled_from(LAYOUTS))
def test_other_flags_stay_in_their_order(parts: list[str], layout: Layout) -> None:
    argv = [word for part in parts for word in [*part.split(), "--data-path", "0.3", "a=b", "--x"]]
    flags = merged([*argv, "--save=s/../saved"], asked(layout=layout))
    kept = flags[: -len(flags_for(asked(layout=layout)))]
    assert kept.count("--data-path") == kept.count("a=b") == kept.count("--x") == len(parts)
    theirs = {"--sequence-parallel", "--no-overlap-p2p-communication", "--save=s/../saved"}
    assert [w for w in kept if w not in theirs] == ["--data-path", "0.3", "a=b", "--x"] * len(parts)


def test_sequence_parallelism_follows_the_flags() -> None:
    wanted = asked(layout=Layout(tp=2))
    tensor = ["--tensor-model-parallel-size", "2"]
    assert "--sequence-parallel" in merged(BASE, wanted), "as in the same processes"
    assert "--sequence-parallel" not in merged([*BASE, *tensor], wanted)
    assert merged([*BASE, "--sequence-parallel"], wanted).count("--sequence-parallel") == 1


def test_flags_of_a_request_win_over_those_before() -> None:
    wanted = asked(layout=Layout(pp=2, vpp=2), micro_batch_size=2, global_batch_size=16)
    before = [*BASE, "--tensor-model-parallel-size", "2", "--load", "x"]
    config = resolve(parse_args([*before, *flags_for(wanted)]), 2)
    assert config.layout == wanted.layout and config.checkpoint.load == "saved"
    assert (config.batch.micro_batch_size, config.batch.global_batch_size) == (2, 16)


def test_another_folder_is_refused() -> None:
    for argv in (["--save", "other"], []):
        with pytest.raises(ValueError, match="saves in"):
            merged(argv, asked())


def test_who_is_supervised() -> None:
    name = relaunch.LAUNCH_VARIABLE
    assert relaunch.is_supervised({name: "job.0.1"})
    assert not any(relaunch.is_supervised(env) for env in ({}, {name: ""}, {name: "a b"}))


def save(root: Path, iteration: int) -> None:
    files.begin(root, iteration)
    (files.folder_of(root, iteration) / files.CORE_MARK).touch()
    files.finish(root, iteration, {})


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Of a run that saved iteration 3 before this command."""
    monkeypatch.chdir(tmp_path)
    save(Path("saved"), 3)
    return Judge([*BASE, "--load", "saved"], 4)


def test_the_file_decides_and_then_the_code(judge: Judge) -> None:
    assert [judge.after(code, None).leave for code in (0, 1, 2, 7)] == [0, 1, 2, 7]
    ends = {"done": 0, "requeue": 85, "abort": 1}
    assert [judge.after(85, asked(kind=k)).leave for k in ends] == list(ends.values())


def test_a_relaunch_starts_the_ranks_of_its_layout(judge: Judge) -> None:
    save(Path("saved"), 12)
    following = judge.after(85, asked(reason="  faster\n\x1b[2J "))
    assert (following.leave, following.ranks) == (None, 2)
    assert following.line == "start again under tp1.pp2.dp1 from iteration 12: faster [2J"
    assert resolve(parse_args(following.flags), 2).layout == Layout(pp=2)


def test_two_relaunches_need_a_checkpoint_between_them(judge: Judge) -> None:
    for iteration in (12, 13):
        save(Path("saved"), iteration)
        assert judge.after(85, asked()).leave is None
    following = judge.after(85, asked())
    assert following.leave == 85 and "twice" in following.line and "\n" not in following.line


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"layout": Layout(dp=5)}, "-n"),
        ({"checkpoint": "other"}, "saves in"),
    ],
    ids=["too many ranks", "another folder"],
)
def test_a_relaunch_that_cannot_be_ends_the_run(
    judge: Judge, wanted: dict[str, Any], said: str
) -> None:
    following = judge.after(0, asked(**wanted))
    assert following.leave == 1 and said in following.line


def test_relaunches_are_counted(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "MAX_LAUNCHES", 3)
    left = []
    for iteration in (12, 13, 14):
        save(Path("saved"), iteration)
        left.append(judge.after(85, asked()).leave)
    assert left == [None, None, 1]


STORED = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": 1,
    "data_parallel_size": 4,
    "global_batch_size": 8,
    "micro_batch_size": 4,
}


def test_a_crash_goes_on_under_the_layout_of_the_checkpoint(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "stored_arguments", lambda save: STORED)
    first = judge.after(137, None)
    assert (first.flags, first.ranks) == (judge.flags, 4), "nothing of this run is saved"
    save(Path("saved"), 6)
    for code in (85, 86):
        following = judge.after(code, None)
        assert following.leave is None and "from iteration 6" in following.line
        config = resolve(parse_args(following.flags), following.ranks)
        assert config.layout == Layout(dp=4)
        assert config.batch.micro_batch_size == 2, "the largest that fits"
    last = judge.after(139, None)
    assert last.leave == 139 and "3 crashes" in last.line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_parallel_size": 8}, "more than the 4 ranks"),
        ({"micro_batch_size": None}, "does not say micro_batch_size"),
    ],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_ends_the_run(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(verdict, "stored_arguments", lambda save: {**STORED, **changes})
    save(Path("saved"), 6)
    following = judge.after(137, None)
    assert following.leave == 137 and words in following.line and "ended with 137" in following.line


def test_an_unreadable_checkpoint_ends_the_run(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(save: Path) -> dict[str, Any]:
        raise TrainingFailure("cannot be\nread")

    monkeypatch.setattr(verdict, "stored_arguments", broken)
    save(Path("saved"), 6)
    following = judge.after(137, None)
    assert (following.leave, following.line) == (137, "cannot be read")
    (Path("saved") / files.TRACKER).write_text("x")
    assert "should hold" in judge.after(137, None).line


def test_without_a_folder_nothing_can_go_on() -> None:
    judge = Judge(TINY.split(), 2)
    assert judge.after(137, None).ranks == 2
    assert judge.after(85, asked()).leave == 85
    from_scratch = asked(iteration=0, checkpoint=None)
    assert judge.after(85, from_scratch).leave is None
    assert judge.after(85, from_scratch).leave == 85


def test_one_code_for_all_ranks() -> None:
    killed, ended = -signal.SIGKILL, -signal.SIGTERM
    assert code_of([85, 85, ended]) == 85
    assert code_of([1, 1, killed]) == 137, "the cause of the others"
    assert code_of([1, 85]) == 85 and code_of([2, ended]) == 2
    assert code_of([ended]) == 143 and code_of([7, 1]) == 7


def test_what_is_left_of_a_launch_is_ended() -> None:
    name = f"test-{os.getpid()}.0.0"
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
    env = {**os.environ, relaunch.LAUNCH_VARIABLE: name}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        end_launch(name + "0")
        assert child.poll() is None, "of another launch"
        end_launch(name)
        child.wait(timeout=20)
