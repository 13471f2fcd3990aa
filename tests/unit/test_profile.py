"""Measured times survive a kill, know their machine, and are prolonged only where that is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from copus_ext.planner.profile import ForeignProfile, ProfileStore, Timing, read_profile

MACHINE = {"model": {"num_layers": 4}, "gpu": "cpu", "torch": "2.13"}


def timing(count: int, step_s: float, pp: int = 2) -> Timing:
    sizes = {"tp": 1, "pp": pp, "dp": 2, "micro_batch_size": 2, "num_microbatches": count}
    return Timing.from_json({**sizes, "step_s": step_s, "spread_s": 0.01})


def test_what_is_added_is_read_back_and_the_last_wins(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "a" / "profile.jsonl", MACHINE)
    assert store.read() == []
    for one in (timing(2, 1.0), timing(4, 2.0), timing(2, 1.5)):
        store.add(one)
    assert store.read() == [timing(2, 1.5), timing(4, 2.0)]
    assert read_profile(store.path) == (MACHINE, store.read())


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profile.jsonl", MACHINE)
    store.add(timing(2, 1.0))
    with store.path.open("a") as file:
        file.write('{"fingerprint": "x", "step')
    assert store.read() == [timing(2, 1.0)]
    store.add(timing(4, 2.0))
    assert store.read() == [timing(2, 1.0), timing(4, 2.0)]
    other = ProfileStore(tmp_path / "header.jsonl", MACHINE)
    other.path.write_text('{"machine": {"mod')
    other.add(timing(4, 2.0))
    assert read_profile(other.path) == (MACHINE, [timing(4, 2.0)])


def test_times_of_another_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    ProfileStore(path, MACHINE).add(timing(2, 1.0))
    other = ProfileStore(path, {**MACHINE, "torch": "2.14"})
    with pytest.raises(ForeignProfile, match="measure again"):
        other.read()
    other.add(timing(2, 9.0))
    assert other.read() == [timing(2, 9.0)]
    with pytest.raises(ForeignProfile, match="mixes machines"):
        read_profile(path)
    (tmp_path / "empty").touch()
    with pytest.raises(ForeignProfile, match="not a profile"):
        read_profile(tmp_path / "empty")


def test_a_time_must_be_a_time() -> None:
    with pytest.raises(ValueError, match="positive"):
        timing(2, 0.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"tp": 1', '"tp": "one"'),
        ('"dp": 2', '"dp": 0'),
        ('"step_s": 1.0', '"step_s": "long"'),
        ('"step_s": 1.0', '"step_s": NaN'),
        ('"pp": 2, ', ""),
        ('{"machine": {', '{"machine": 7, "more": {'),
    ],
)
def test_a_profile_that_somebody_edited_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str
) -> None:
    store = ProfileStore(tmp_path / "profile.jsonl", MACHINE)
    store.add(timing(2, 1.0))
    text = store.path.read_text()
    assert old in text
    store.path.write_text(text.replace(old, new) + "\n" + "[" * 100_000 + "\n")
    with pytest.raises(ForeignProfile, match=r"profile\.jsonl"):
        read_profile(store.path)
