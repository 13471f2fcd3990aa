"""Layouts that run out of memory are passed over, and no later run of the tool dies of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.cost_model.models import PRESETS
from copus_ext.extras.profile_layouts import command as profile_layouts
from copus_ext.extras.profile_layouts.attempts import RecordedAttempts, by_memory
from copus_ext.planner.attempts import BEGUN, DONE, DROPPED, OUT_OF_MEMORY
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import ProfileStore, Timing, read_profile
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layout import Layout
from megatron.trainer.train import build
from tests.helpers.jobs import TINY
from tests.helpers.launch import ROOT, run_in_fork


def one(micro: int, **more: Any) -> Configuration:
    values: dict[str, Any] = {"layout": Layout(dp=2), "global_batch_size": 16, **more}
    return Configuration(micro_batch_size=micro, **values)


def timed(folder: Path, breaks: str, error: BaseException, *own: str) -> tuple[int, list[str]]:
    """Runs the tool on this process. Where it would time micro-batches of 2, something breaks.

    Args:
        folder: of the store.
        breaks: `step` or `build`, where; or `nothing`.
        error: what it breaks with.
        own: more flags of the tool.
    """
    build_optimizer: Any = build.build_optimizer

    def is_the_one(config: Any, where: str) -> bool:
        return breaks == where and config.batch.micro_batch_size == 2

    def steps(job: Any, args: Any) -> list[float]:
        if is_the_one(job.config, "step"):
            raise error
        return [0.5, 0.5]

    def optimizer(config: Any, *rest: Any) -> Any:
        if is_the_one(config, "build"):
            raise error
        return build_optimizer(config, *rest)

    profile_layouts.time_steps = steps
    build.build_optimizer = optimizer
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    own = ("--store", str(folder / "profile.jsonl"), "--max-micro-batch", "4", *own)
    flags = [*own, "--global-batch-size", "8", "--", *TINY.split(), "--train-iters", "9"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = profile_layouts.main(flags)
    return code, out.getvalue().splitlines()


def micro_batches(folder: Path) -> list[int]:
    _, timings = read_profile(folder / "profile.jsonl")
    return sorted({t.configuration.micro_batch_size for t in timings})


@pytest.mark.parametrize("where", ["step", "build"])
def test_one_process_goes_on_after_a_layout_without_memory_and_never_tries_it_again(
    tmp_path: Path, where: str
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    code, lines = run_in_fork(timed, tmp_path, where, error)
    assert code == 0 and micro_batches(tmp_path) == [1]
    told = [line for line in lines if "memory" in line]
    assert [line.split(": ", 1)[1] for line in told] == [
        "out of memory",
        "skipped, out of memory before with micro-batch 2 (--retry times it)",
    ]
    # It would break again.
    code, lines = run_in_fork(timed, tmp_path, where, error)
    assert code == 0 and [line.split(",")[1] for line in lines] == [
        "micro_batch=2",
        "micro_batch=4",
    ]
    assert all("skipped, out of memory before" in line for line in lines)
    code, lines = run_in_fork(timed, tmp_path, "nothing", error, "--retry")
    assert code == 0 and micro_batches(tmp_path) == [1, 2, 4]
    assert run_in_fork(timed, tmp_path, where, error) == (0, [])


def test_a_second_try_is_only_one_however_often_a_launcher_starts_the_ranks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    _, first = run_in_fork(timed, tmp_path, "step", error)
    assert sum(line.endswith(": out of memory") for line in first) == 1
    for restarts, tries in (("0", 1), ("1", 0), ("2", 0)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        _, lines = run_in_fork(timed, tmp_path, "step", error, "--retry")
        assert sum(line.endswith(": out of memory") for line in lines) == tries


def raises(*args: Any) -> str:
    try:
        timed(*args)
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def test_what_ends_two_runs_is_left_to_others_unless_the_user_ended_them(tmp_path: Path) -> None:
    for _ in range(3):
        assert run_in_fork(raises, tmp_path, "step", KeyboardInterrupt()) == "KeyboardInterrupt"
        code, lines = run_in_fork(timed, tmp_path, "build", UsageError("no such file"))
        assert code == 2 and lines[-1].endswith("error: no such file")
    # A bug, or a kill that leaves no word: another run may tell.
    for _ in range(2):
        assert run_in_fork(raises, tmp_path, "step", RuntimeError("shapes")) == "RuntimeError"
    code, lines = run_in_fork(timed, tmp_path, "step", RuntimeError("shapes"))
    assert code == 0 and micro_batches(tmp_path) == [1, 4]
    assert "micro_batch=2," in lines[0] and "2 runs have ended in the middle of it" in lines[0]


def store_of(tmp_path: Path, **parts: Any) -> ProfileStore:
    return ProfileStore(tmp_path / "profile.jsonl", {"model": "small", **parts})


def test_a_larger_micro_batch_of_the_same_layout_is_not_tried_either(tmp_path: Path) -> None:
    attempts = RecordedAttempts(store_of(tmp_path))
    attempts.note(BEGUN, one(4))
    attempts.note(OUT_OF_MEMORY, one(4))
    for again in (attempts, RecordedAttempts(store_of(tmp_path))):
        assert again.why_not(one(2)) is None
        assert again.why_not(one(4)) == "out of memory before"
        assert again.why_not(one(8)) == "out of memory before with micro-batch 4"
        assert again.why_not(one(4, recompute="full")) is None
        assert again.why_not(one(4, layout=Layout(tp=2))) is None
    # Of another model, or on another machine, nothing is known.
    assert RecordedAttempts(store_of(tmp_path, gpu="other")).why_not(one(4)) is None
    again.forget()
    assert (
        again.why_not(one(4)) is None
        and RecordedAttempts(store_of(tmp_path)).why_not(one(4)) is None
    )


def test_a_good_end_makes_good_for_the_attempts_before(tmp_path: Path) -> None:
    attempts = RecordedAttempts(store_of(tmp_path))
    for attempt in (BEGUN, DROPPED, BEGUN, OUT_OF_MEMORY, BEGUN):
        attempts.note(attempt, one(4))
    assert RecordedAttempts(store_of(tmp_path)).why_not(one(8)) is not None
    assert not attempts.has_run_out(one(4))
    attempts.note(DONE, one(4))
    assert RecordedAttempts(store_of(tmp_path)).why_not(one(8)) is None


def test_an_attempt_is_on_the_disk_before_it_begins_and_counts_from_the_second_on(
    tmp_path: Path,
) -> None:
    for expected in (None, None, "2 runs have ended in the middle of it"):
        attempts = RecordedAttempts(store_of(tmp_path))
        assert attempts.why_not(one(4)) == expected
        assert attempts.why_not(one(8)) is None
        attempts.note(BEGUN, one(4))
    lines = store_of(tmp_path).path.read_text().splitlines()
    assert [json.loads(line).get("attempt") for line in lines] == [None, BEGUN, BEGUN, BEGUN]


def test_attempts_are_no_timings(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    RecordedAttempts(store).note(OUT_OF_MEMORY, one(4))
    assert store.read() == [] and read_profile(store.path)[1] == []
    timing = Timing(configuration=one(1), step_s=0.5)
    store.add(timing)
    RecordedAttempts(store).note(BEGUN, one(8))
    with store.path.open("a") as file:
        file.write('{"fingerprint": "' + store.key + '", "attempt": "out_of_mem')
    assert store.read() == [timing] == read_profile(store.path)[1]
    store.add_attempt("of a later release", configuration=3)
    assert RecordedAttempts(store).why_not(one(2)) is None


def test_layouts_that_need_least_memory_come_first_and_hopeless_ones_have_a_reason() -> None:
    model = PRESETS["llama-2-13b"].with_seq_length(2048)
    layouts = [Layout(dp=8), Layout(tp=8), Layout(tp=2, dp=4), Layout(tp=4, pp=2)]
    some = [one(m, layout=layout, global_batch_size=64) for layout in layouts for m in (8, 1)]
    found = by_memory(model, some, 80 * 2**30)
    assert len(found) == len(some)
    order = [c for c, _ in found]
    for layout in layouts:
        small, large = (one(m, layout=layout, global_batch_size=64) for m in (1, 8))
        assert order.index(small) < order.index(large)
    assert order[-1].layout == Layout(dp=8)
    reasons = [reason for _, reason in found if reason]
    assert 0 < len(reasons) < len(some) and all("a GPU has 80.0 GiB" in r for r in reasons)
    # Those that fit are before those that cannot.
    assert [r is None for _, r in found] == sorted([r is None for _, r in found], reverse=True)
    assert all(reason is None for _, reason in by_memory(model, some, None))
    assert by_memory(model, [], None) == []


def test_a_job_of_slurm_goes_on_by_itself_while_layouts_run_out_of_memory(tmp_path: Path) -> None:
    store, calls = tmp_path / "profile.jsonl", tmp_path / "calls"
    fake = tmp_path / "bin" / "srun"
    fake.parent.mkdir()
    # Two layouts run out of memory. Then something else fails, which starting again does not mend.
    fake.write_text(
        f"""#!/bin/sh
echo "$COPUS_PROFILE_GOES_ON:$*" >>{calls}
[ "$(wc -l <{calls})" -gt 2 ] || echo '{{"attempt": "out_of_memory"}}' >>{store}
exit 143
"""
    )
    fake.chmod(0o755)
    env = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "COPUS_ROOT": str(ROOT)}
    env |= {"COPUS_STORE": str(store), "COPUS_USE_PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts/slurm/profile.sbatch"), "--", "--bf16"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 143, done.stderr
    lines = calls.read_text().splitlines()
    assert all(line.endswith(f"--store {store} -- --bf16") for line in lines)
    assert [line.split(":")[0] for line in lines] == ["", "1", "1"]


def test_what_is_timed_has_the_logits_of_the_run() -> None:
    own = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data "
    own += "--max-position-embeddings 64 --logits-chunks 4"
    args, flags = profile_layouts.parse(
        ["--store", "p.jsonl", "--global-batch-size", "8", "--", *own.split()]
    )
    model = spec_of_flags(flags)
    found = profile_layouts.lines(model, args, 2)
    assert {c.logits_chunks for c in found} == {4}
    again = Timing(configuration=found[0], step_s=1.0)
    assert Timing.from_json(again.to_json()).key == again.key
