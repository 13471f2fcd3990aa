"""Stop requests: a signal is a flag, and all ranks leave for the same reason."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.common.control import TIME_LIMIT
from megatron.training.common.signals import STOP_SIGNALS, StopReason, StopSignals, stop_reason

reasons = st.sampled_from(
    [
        StopReason(kind="interval"),
        StopReason(kind="duration"),
        StopReason(kind="file"),
        StopReason(kind="time-limit"),
        *(StopReason(kind="signal", signal=name) for name in ("SIGTERM", "SIGUSR1", "SIGINT")),
    ]
)


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
