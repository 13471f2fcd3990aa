"""Stop requests: a signal is a flag, and all ranks leave for the same reason."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.common.control import TIME_LIMIT
from megatron.trainer.common.signals import (
    SAME_S,
    STOP_SIGNALS,
    StopReason,
    StopSignals,
    stop_reason,
)

reasons = st.sampled_from(
    [
        StopReason(kind="interval"),
        StopReason(kind="duration"),
        StopReason(kind="file"),
        StopReason(kind="time-limit"),
        *(StopReason(kind="signal", signal=name) for name in ("SIGTERM", "SIGUSR1", "SIGINT")),
    ]
)


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """A runner in the background may ignore what a terminal sends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_a_signal_sets_the_flag_and_the_process_lives(name: str) -> None:
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.Signals[name])
        assert stop.received == name


def test_a_second_signal_changes_nothing() -> None:
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert stop.received == "SIGUSR1"


BUSY = """
import hashlib, signal
from megatron.trainer.common.signals import StopSignals
signal.signal(signal.SIGINT, signal.default_int_handler)
with StopSignals(is_told=True) as stop:
    stop.defers = {defers}
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # as a collective: no handler runs
"""


@contextlib.contextmanager
def child(text: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is ready."""
    command = [sys.executable, "-c", text]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_ctrl_c_leaves_at_once_wherever_the_process_is(second: str) -> None:
    """torchrun hands the second one on as SIGTERM."""
    with child(BUSY.format(defers=True)) as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert "finishes the step" in process.stderr.readline()
        time.sleep(2 * SAME_S)
        process.send_signal(signal.Signals[second])
        assert process.wait(60) == 130
        assert process.stderr.read().splitlines() == [
            "Ctrl-C again: leaves at once, without a checkpoint of this step"
        ]


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_a_signal_before_there_is_anything_to_save_leaves_at_once(name: str) -> None:
    with child(BUSY.format(defers=False)) as process:
        assert process.stderr is not None
        process.send_signal(signal.Signals[name])
        assert process.wait(60) == 128 + signal.Signals[name]
        shown = "Ctrl-C" if name == "SIGINT" else name
        assert process.stderr.read() == f"{shown}: leaves before training has begun\n"


EARLY = """
import signal
from megatron.trainer.common.signals import StopSignals
print("ready", flush=True)
with StopSignals() as stop:
    signal.raise_signal(signal.SIGTERM)
    stop.defers = False
    print("goes on")
"""


def test_a_signal_that_came_before_that_leaves_too() -> None:
    with child(EARLY) as process:
        assert process.stdout is not None
        assert process.wait(60) == 128 + signal.SIGTERM and process.stdout.read() == ""


ALONE = """
import os
from megatron.trainer.common.signals import StopSignals
with StopSignals(is_told=True) as stop:
    stop.defers = False
    import datetime, torch.distributed as dist
    print("ready", flush=True)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
"""


@pytest.mark.waits
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_can_be_ended(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch's store, where no handler runs: rank 0 waits for a client, rank 1 for a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in {**where, "RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with child(ALONE) as process:
        time.sleep(2.0)
        assert process.poll() is None, "it waits"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


IMPORTING = """
import signal, time
from megatron.trainer.common.signals import leave_on_interrupt
signal.signal(signal.SIGINT, {before})
leave_on_interrupt(is_told=True)
print("ready", flush=True)
time.sleep({seconds})
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_during_the_imports_leaves_without_a_traceback(ignored: bool) -> None:
    before = "signal.SIG_IGN" if ignored else "signal.default_int_handler"
    with child(IMPORTING.format(before=before, seconds=1 if ignored else 600)) as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == (0 if ignored else 130)
        assert process.stderr.read() == ("" if ignored else "Ctrl-C: leaves\n")


def test_the_first_ctrl_c_may_come_twice() -> None:
    """From the terminal, and from a launcher in the same process group."""
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert stop.received == "SIGINT"


def test_what_a_child_gets_does_not_count() -> None:
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        time.sleep(2 * SAME_S)
        pid = os.fork()
        if pid == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, "nor does it end it"
        time.sleep(0.2)
    assert stop.received == "SIGINT" and signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_what_is_ignored_below_nohup_stays_ignored(name: str) -> None:
    signal.signal(signal.Signals[name], signal.SIG_IGN)
    with StopSignals() as stop:
        signal.raise_signal(signal.Signals[name])
        assert signal.getsignal(signal.Signals[name]) == signal.SIG_IGN
    assert stop.received is None


def test_previous_handlers_return_also_after_an_exception() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(KeyError), StopSignals(("SIGUSR1",)) as stop:
            signal.raise_signal(signal.SIGUSR1)
            raise KeyError
        assert seen == []
        signal.raise_signal(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] and stop.received == "SIGUSR1"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_exit_signal_joins_the_default_ones() -> None:
    with StopSignals((*STOP_SIGNALS, "SIGUSR2", "SIGTERM")) as stop:
        signal.raise_signal(signal.SIGUSR2)
    assert stop.received == "SIGUSR2"


def test_construction_alone_installs_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    StopSignals()
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_the_main_thread_may_install() -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            StopSignals().__enter__()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "main thread" in str(errors[0])


@pytest.mark.parametrize("name", ["SIGNONE", "SIGKILL", "SIGSTOP", "15"])
def test_bad_signal_names_are_refused_with_a_better_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*SIGTERM"):
        StopSignals((name,))


@given(
    iteration=st.integers(1, 10_000),
    elapsed_s=st.floats(0, 1e6),
    interval=st.none() | st.integers(1, 100),
    minutes=st.none() | st.floats(0, 1e4),
    received=st.none() | st.sampled_from(STOP_SIGNALS),
    stop_file=st.none() | st.sampled_from(["", "maintenance", "time limit", "signal"]),
)
def test_a_rank_leaves_exactly_when_something_asks_for_it(
    iteration: int,
    elapsed_s: float,
    interval: int | None,
    minutes: float | None,
    received: str | None,
    stop_file: str | None,
) -> None:
    reason = stop_reason(
        iteration=iteration,
        elapsed_s=elapsed_s,
        exit_interval=interval,
        exit_duration_in_mins=minutes,
        received=received,
        stop_file=stop_file,
    )
    causes = {
        "signal": received is not None,
        "duration": minutes is not None and elapsed_s > minutes * 60,
        "interval": interval is not None and iteration % interval == 0,
        "file": stop_file in ("", "maintenance"),
        "signalled": stop_file == "signal",
        "time-limit": stop_file == TIME_LIMIT,
    }
    if reason is None:
        assert not any(causes.values())
    else:
        assert causes[reason.kind] and reason.signal == received
        assert reason.is_urgent == (received is not None or stop_file is not None)


@given(st.lists(st.none() | reasons, min_size=1, max_size=8))
def test_all_ranks_agree_and_one_wish_is_enough(local: list[StopReason | None]) -> None:
    reason = StopReason.from_code(max(r.code if r else 0 for r in local))
    assert (reason is None) == all(r is None for r in local)
    if reason is not None:
        assert reason in local
        if any(r is not None and r.kind == "signal" for r in local):
            assert reason.kind == "signal"
        assert reason.is_urgent == any(r is not None and r.is_urgent for r in local)


@given(reasons)
def test_codes_keep_the_reason(reason: StopReason) -> None:
    assert reason.code > 0 and StopReason.from_code(reason.code) == reason
    words = {"interval": "--exit-interval", "duration": "--exit-duration-in-mins"}
    words |= {"file": "control/stop", "time-limit": "control/stop: time limit"}
    words |= {"signalled": "control/stop: signal"}
    assert str(reason) == words.get(reason.kind, reason.signal)
