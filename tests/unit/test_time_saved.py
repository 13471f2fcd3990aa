"""What a run has gained so far against staying in its first configuration."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from copus_ext.commands import pretrain
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.monitor.report import report_of
from copus_ext.monitor.run_files import RunHistory, RunReader
from copus_ext.monitor.run_status import read_status
from copus_ext.monitor.terminal import screen
from copus_ext.monitor.time_saved import Segment, segments_of, so_far, time_saved
from megatron.trainer.logging.log_line import StepReport
from megatron.trainer.logging.tracker import Tracker
from tests.helpers.recorded import noise, row, situation
from tests.helpers.written_runs import rewrite

LAYOUT, LENGTH = "tp1.pp1.dp2", 128
FIRST = f"batch 4 in micro-batches of 2 on {LAYOUT}"
AWAY = Segment(
    samples=320.0,
    seconds=32.0,
    overhead_s=2.0,
    batch=16,
    first_batch=4,
    is_first=False,
    critical_batch_size=8.0,
    first_samples_per_s=4.0,
)
UNCHANGED = "nothing yet: no step follows a change that is recorded here; the last was made at "
AT_FIRST = dataclasses.replace(
    AWAY,
    samples=40.0,
    seconds=11.0,
    overhead_s=1.0,
    batch=4,
    is_first=True,
    critical_batch_size=None,
)


def brute_force(
    steps: list[tuple[int, float]], *, first: int, speed: float, phi: float
) -> tuple[float, float]:
    """Seconds that steps took, and those of the first batch to the same progress, in tiny steps.

    Args:
        steps: batch and seconds of each.
        first: batch of the first configuration.
        speed: samples per second of it.
        phi: critical batch size.
    """
    progress = sum(batch / (1.0 + batch / phi) for batch, _ in steps)
    done = staying_s = 0.0
    while done < progress:
        done += 0.001 / (1.0 + first / phi)
        staying_s += 0.001 / speed
    return sum(seconds for _, seconds in steps), staying_s


def test_the_estimate_is_that_of_a_spelled_out_race() -> None:
    found = time_saved([AWAY])
    # 320 samples in batches of 16 are 320 / (1 + 16/8) = 106.7 units of progress. Batch 4 needs
    # 106.7 (1 + 4/8) = 160 samples for them, at 4 samples/s 40 s.
    assert found is not None
    assert (found.taken_s, found.staying_s) == (32.0, pytest.approx(40.0))
    assert found.share == pytest.approx(0.2)
    taken_s, staying_s = brute_force([(16, 1.6)] * 20, first=4, speed=4.0, phi=8.0)
    assert taken_s == pytest.approx(found.taken_s)
    assert staying_s == pytest.approx(found.staying_s, rel=1e-4)


@pytest.mark.parametrize("phi", [1.0, 5.0, 40.0, 1000.0])
@pytest.mark.parametrize("batch", [2, 4, 64])
def test_any_stretch_is_that_of_a_race(phi: float, batch: int) -> None:
    steps = [(batch, 0.25 + 0.01 * batch)] * 12
    taken_s, staying_s = brute_force(steps, first=8, speed=16.0, phi=phi)
    segment = dataclasses.replace(
        AWAY,
        samples=12.0 * batch,
        seconds=taken_s,
        batch=batch,
        first_batch=8,
        critical_batch_size=phi,
        first_samples_per_s=16.0,
    )
    found = time_saved([segment])
    assert found is not None and found.staying_s == pytest.approx(staying_s, rel=1e-3)


def test_the_range_is_that_of_half_and_twice_the_critical_batch_size() -> None:
    found = time_saved([AT_FIRST, AWAY])
    assert found is not None

    def share(phi: float) -> float:
        staying_s = 10.0 + 320.0 * (1.0 + 4.0 / phi) / (1.0 + 16.0 / phi) / 4.0
        return 1.0 - 43.0 / staying_s

    assert found.share == pytest.approx(share(8.0))
    assert (found.low, found.high) == (pytest.approx(share(4.0)), pytest.approx(share(16.0)))


FAR_START = [
    (256, 256, 0.76, 0.0, 42),
    (32, 768, 2.36, 0.13, 42),
    (16, 320, 1.95, 0.05, 24),
    (32, 640, 2.62, 0.5, 42),
    (32, 1280, 6.57, 0.77, 37),
    (32, 3200, 12.02, 1.87, 96),
    (32, 1984, 6.36, 0.7, 118),
    (32, 3360, 9.66, 0.89, 137),
    (32, 2400, 6.71, 0.62, 155),
    (128, 2560, 5.5, 0.26, 164),
    (32, 640, 2.44, 0.29, 177),
    (128, 2560, 7.57, 0.33, 180),
    (128, 5632, 13.51, 1.4, 222),
]
"""A run on real text that began with a batch of 256: batch, samples, seconds, those of pauses and
decisions, and the critical batch size that decisions went by."""
STATIC_AT = {6464: 70.0, 8448: 87.0, 11808: 120.2, 14208: 146.5, 25600: 175.6}
"""Samples of that run, and the seconds after which batch 256 alone, at 315.5 samples a second, had
the same loss. It took 55,400 samples in place of 25,600."""


def test_a_start_that_is_far_off_is_paid_for_by_who_stays() -> None:
    """The steps that a batch of 256 has too few of count, as a run of it shows."""
    segments, told = [], {}
    for batch, samples, seconds, overhead_s, phi in FAR_START:
        segments.append(
            Segment(
                samples=float(samples),
                seconds=seconds,
                overhead_s=overhead_s,
                batch=batch,
                first_batch=256,
                is_first=batch == 256,
                critical_batch_size=float(phi),
                first_samples_per_s=315.5,
            )
        )
        found = time_saved(segments)
        assert found is not None
        told[int(found.samples)] = found
    for samples, static_s in STATIC_AT.items():
        found = told[samples]
        true = 1.0 - found.taken_s / static_s
        assert found.low < true < found.high and abs(found.share - true) < 0.05, samples
    assert told[25600].staying_samples == pytest.approx(55_400, rel=0.05)


def test_the_samples_that_staying_lacks_are_told(tmp_path: Path) -> None:
    run = Run(tmp_path, batch=32)
    run.step(10, 1.0)
    run.speeds[32] = 32.0, "measured"
    run.decide(4)
    run.step(40, 0.5)
    # 160 samples in batches of 4 are (1 + 32/8) / (1 + 4/8) = 3.33 times as many in batches of 32.
    more = (320.0 + 160.0 * 5.0 / 1.5) / 480.0
    assert run.line.endswith(f"; staying would need {more:.1f} times the samples")
    assert "samples" not in grown(tmp_path / "grown").line


def test_a_speed_that_was_not_measured_widens_the_range() -> None:
    sure = time_saved([AWAY])
    unsure = time_saved([dataclasses.replace(AWAY, first_sd=0.1)])
    assert sure is not None and unsure is not None
    assert unsure.share == sure.share and unsure.low < sure.low < sure.high < unsure.high


def test_in_the_first_configuration_only_pauses_and_decisions_are_lost() -> None:
    found = time_saved([AT_FIRST])
    assert found is not None and (found.taken_s, found.staying_s) == (11.0, 10.0)
    assert found.low == found.high == found.share == pytest.approx(-0.1)


def test_only_another_batch_needs_a_critical_batch_size() -> None:
    same = dataclasses.replace(AWAY, batch=4, critical_batch_size=None)
    found = time_saved([same])
    assert found is not None and found.staying_s == pytest.approx(80.0)
    assert found.low == found.high == found.share
    assert time_saved([dataclasses.replace(AWAY, critical_batch_size=None)]) is None
    assert time_saved([dataclasses.replace(AWAY, first_samples_per_s=None)]) is None
    assert time_saved([]) is None


def test_a_short_stretch_that_cannot_be_compared_is_left_out() -> None:
    odd = dataclasses.replace(AWAY, seconds=3.0, first_samples_per_s=None)
    assert time_saved([AWAY, odd]) == time_saved([AWAY])
    assert time_saved([AWAY, dataclasses.replace(odd, seconds=4.0)]) is None


# From the files of a run.


class Run:
    """Writes the steps and the decisions of a run, as the trainer and the controller do.

    Args:
        path: its directory.
        batch: of the first step.
        mode: of the controller.
        ratio: samples in which the run counts that a sample of the present phase is.
    """

    def __init__(
        self, path: Path, *, batch: int = 4, mode: str = "act", ratio: int = 1, **config: Any
    ) -> None:
        self.path, self.mode, self.ratio = path, mode, ratio
        self.config = {"seq_length": LENGTH, **config}
        self.batch, self.iteration, self.samples, self.number = batch, 0, 0, 0
        self.speeds: dict[int, tuple[float, str]] = {}
        self.phi: float | None = 8.0
        self.launch("job.0.0")

    def launch(self, name: str, *, layout: str = LAYOUT) -> None:
        self.tracker, self.log = Tracker(self.path, launch=name), DecisionLog(self.path)
        self.layout = layout
        at = self.iteration, self.samples
        self.tracker.event("run.start", *at, layout=layout, config=self.config)
        where = {"iteration": self.iteration, "consumed_samples": self.samples}
        self.log.write("start", **where, mode=self.mode, flags={}, layout=layout)

    def step(self, num: int, seconds: float) -> None:
        for _ in range(num):
            self.iteration += 1
            self.samples += self.batch * self.ratio
            report = StepReport(
                iteration=self.iteration,
                train_iterations=1000,
                consumed_samples=self.samples,
                elapsed_per_iteration_ms=1000.0 * seconds,
                learning_rate=1e-3,
                global_batch_size=self.batch,
                losses={"lm loss": 3.0},
                seq_length=LENGTH * self.ratio,
            )
            self.tracker.step(report, micro_batch_size=2 // self.ratio, updated=True)

    def decide(self, to: int | None = None, *, seconds: float = 0.0) -> None:
        """A decision, and the change to a batch if there is one."""
        inputs = self.inputs()
        decision = dataclasses.replace(decide(inputs), critical_batch_size=self.phi)
        decision = dataclasses.replace(decision, kind="stay", to=inputs.now)
        if to is not None:
            wanted = next(r for r in inputs.rows if r.global_batch_size == to)
            decision = dataclasses.replace(decision, kind="batch", to=wanted)
        self.number += 1
        self.log.record_decision(
            inputs,
            decision,
            number=self.number,
            applied=to is not None and self.mode == "act",
            seconds=seconds,
        )
        if to is not None and self.mode == "act":
            self.batch = to

    def inputs(self) -> DecisionInputs:
        sizes = sorted({2, 4, 8, 16, 32, self.batch})
        rows = [self.row(size) for size in sizes]
        known = situation(self.iteration)
        return dataclasses.replace(
            known,
            rules=dataclasses.replace(known.rules, length_ratio=self.ratio),
            noise=noise(self.phi),
            rows=tuple(rows),
            current=sizes.index(self.batch),
            consumed_samples=self.samples,
        )

    def row(self, size: int) -> ConfigThroughput:
        speed, source = self.speeds.get(size, (10.0, "predicted"))
        dp = 2 if self.layout == LAYOUT else 1
        made = row(
            size, speed, micro=2 // self.ratio, dp=dp, sd=0.0 if source == "measured" else 0.1
        )
        return dataclasses.replace(made, source=source)

    @property
    def history(self) -> RunHistory:
        reader = RunReader(self.path)
        reader.refresh()
        return reader.history()

    @property
    def line(self) -> str:
        return so_far(self.history)[0]


def grown(path: Path, **options: Any) -> Run:
    """40 samples in batches of 4, 1 s each, and then 320 in batches of 16, in 30 s."""
    run = Run(path, **options)
    run.step(10, 1.0)
    run.speeds[4] = 4.0, "measured"
    run.decide(16)
    run.step(10, 1.5)
    run.decide()
    run.step(10, 1.5)
    return run


def test_a_run_that_grew_has_saved_what_the_race_says(tmp_path: Path) -> None:
    run = grown(tmp_path)
    first, *rest = segments_of(run.history)
    assert first.is_first and (first.samples, first.seconds) == (40.0, 10.0)
    assert [(s.samples, s.seconds, s.is_first) for s in rest] == [(160.0, 15.0, False)] * 2
    # 10 s and 40 s of staying; 10 s and 30 s were taken.
    staying = [10.0 + 80.0 * (1 + 4 / phi) / (1 + 16 / phi) for phi in (4.0, 16.0)]
    low, high = (100 * (1.0 - 40.0 / s) for s in staying)
    assert run.line == (
        f"20 % less time than staying at {FIRST} ({low:.1f} to {high:.0f} %, "
        "depending on the critical batch size)"
    )


def test_a_loss_is_said_as_plainly(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(10, 1.0)
    run.speeds[4] = 4.0, "measured"
    run.decide(16)
    run.step(20, 6.0)
    # 10 s and 40 s of staying; 10 s and 120 s were taken.
    assert run.line.startswith(f"160 % more time than staying at {FIRST} (")
    assert run.line.endswith(" %, depending on the critical batch size)")
    assert "less" not in run.line


def test_gain_and_loss_are_told_apart_in_the_range(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(10, 1.0)
    run.speeds[4] = 4.0, "measured"
    run.decide(16)
    run.step(20, 1.7)
    share = {phi: 1.0 - 44.0 / (10.0 + 80.0 * (1 + 4 / phi) / (1 + 16 / phi)) for phi in (4, 16)}
    more, less = -100 * share[4], 100 * share[16]
    assert more > 0 and less > 0
    assert (
        f"({more:.1f} % more to {less:.0f} % less, depending on the critical batch size)"
        in run.line
    )


def test_pauses_and_decisions_count(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(10, 1.0)
    run.speeds[4] = 4.0, "measured"
    run.decide(16, seconds=0.25)
    moved = {"kind": "rolled_back", "pause_s": 2.0}
    run.log.write("relayout", number=1, iteration=10, outcome=moved)
    run.step(10, 1.5)
    run.decide()
    run.step(10, 1.5)
    run.decide()
    found = time_saved(segments_of(run.history))
    assert found is not None
    assert found.taken_s == pytest.approx(40.0 + 0.25 + 2.0)
    assert found.staying_s == pytest.approx(50.0)


def test_steps_that_a_restart_did_again_count_once(tmp_path: Path) -> None:
    run = grown(tmp_path)
    line = run.line
    run.decide(32)  # undone below
    run.step(4, 9.0)
    run.batch, run.iteration, run.samples = 16, 20, 200
    run.number = 2
    run.launch("job.0.1")
    run.step(10, 1.5)
    assert run.line == line, "the restart went back to after the second decision"
    run.decide()
    assert run.line == line


@pytest.mark.parametrize("batch", [4, 8])
def test_another_run_in_the_same_directory_is_compared_with_its_own_start(
    batch: int, tmp_path: Path
) -> None:
    """As with `--finetune`: from the first step on."""
    run = grown(tmp_path)
    run.log.write("relayout", number=1, iteration=10, outcome={"kind": "moved", "pause_s": 2.0})
    run.batch, run.iteration, run.samples, run.number = batch, 0, 0, 0
    run.launch("job.0.1")
    assert run.line == "not known: no step is recorded"
    run.step(10, 1.0)
    run.speeds = {batch: (batch / 1.0, "measured")}
    run.decide()
    first = f"batch {batch} in micro-batches of 2 on {LAYOUT}"
    assert run.line == f"{UNCHANGED}{first}"
    told = report_of(RunReader(tmp_path))
    assert "COPUS changed nothing in 1 decision" in told.verdict and first in told.decision
    controller = read_status(tmp_path).controller
    assert controller is not None and controller.so_far == run.line
    run.decide(16)
    run.step(20, 1.5)
    assert run.line.endswith(f" time than staying at {first}" + run.line.partition(first)[2])
    assert {s.first_batch for s in segments_of(run.history)} == {batch}


def test_flags_that_a_restart_changed_before_any_decision_stands_are_no_gain(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.step(10, 1.0)
    run.decide(16)  # undone below
    run.step(5, 1.5)
    run.batch, run.iteration, run.samples, run.number = 8, 8, 32, 0
    run.launch("job.0.1")
    run.step(10, 1.0)
    run.decide()
    assert all(s.is_first and s.first_batch == 8 for s in segments_of(run.history))
    assert run.line.startswith(f"{UNCHANGED}batch 8")


def test_ranks_that_changed_without_the_controller_are_no_gain(tmp_path: Path) -> None:
    """Steps of several configurations are not said to be of one."""
    run = Run(tmp_path)
    run.step(10, 1.0)
    run.decide()
    run.launch("job.0.1", layout="tp1.pp1.dp1")
    line = run.line
    assert line.startswith(UNCHANGED) and line.endswith(LAYOUT), "no step was made there yet"
    run.step(10, 2.0)
    run.decide()
    assert run.line.startswith(UNCHANGED) and run.line.endswith(" on tp1.pp1.dp1")


def test_a_last_step_of_what_is_left_is_no_change(tmp_path: Path) -> None:
    run = Run(tmp_path, train_samples=43)
    run.step(10, 1.0)
    run.decide(seconds=0.5)
    line = run.line
    assert line.startswith("nothing yet")
    run.batch = 3
    run.step(1, 1.0)
    assert run.samples == 43 and run.line == line
    elsewhere = Run(tmp_path / "chosen", train_samples=430)
    elsewhere.step(10, 1.0)
    elsewhere.speeds[4] = 4.0, "measured"
    elsewhere.decide(2, seconds=0.5)
    elsewhere.step(1, 1.0)
    assert "time than" in elsewhere.line, "a smaller batch before the end is one that was chosen"


def test_a_run_that_goes_on_elsewhere_counts_from_its_first_decision_there(tmp_path: Path) -> None:
    run = Run(tmp_path / "before")
    run.step(10, 1.0)
    run.path = tmp_path / "after"
    run.launch("job.0.0")
    run.speeds[4] = 4.0, "measured"
    run.decide(16)
    run.step(20, 1.5)
    (only,) = segments_of(run.history)
    assert (only.samples, only.seconds, only.is_first) == (320.0, 30.0, False)


def test_longer_samples_are_counted_in_their_own_length(tmp_path: Path) -> None:
    run = grown(tmp_path)
    run.decide()
    run.ratio, run.batch = 2, 8
    run.speeds = {2: (1.5, "corrected")}
    run.phi = 4.0
    run.step(10, 2.0)
    run.decide()
    last = segments_of(run.history)[-1]
    # Batch 4 is 2 samples of twice the length.
    assert (last.samples, last.seconds, last.batch, last.first_batch) == (80.0, 20.0, 8, 2)
    assert not last.is_first and last.first_samples_per_s == 1.5 and last.first_sd == 0.1
    found = time_saved(segments_of(run.history))
    assert found is not None
    # The batch went by a critical batch size of 8 samples of the first length when this began.
    phi = 8.0 / 2
    assert found.staying_s == pytest.approx(50.0 + 80.0 * (1 + 2 / phi) / (1 + 8 / phi) / 1.5)


def test_a_layout_that_the_user_changed_is_no_gain(tmp_path: Path) -> None:
    run = grown(tmp_path)
    run.decide()
    run.launch("job.0.1", layout="tp1.pp2.dp1")
    run.speeds = {4: (3.0, "corrected")}
    run.step(10, 2.0)
    run.decide()
    last = segments_of(run.history)[-1]
    assert last.first_samples_per_s == 3.0 and not last.is_first
    assert "staying at batch 4 in micro-batches of 2 on tp1.pp2.dp1" in run.line
    assert "depending on the critical batch size and the predicted speed" in run.line


def test_steps_before_a_launch_elsewhere_keep_the_layout_that_they_ran_on(tmp_path: Path) -> None:
    run = grown(tmp_path)
    run.launch("job.0.1", layout="tp1.pp2.dp1")
    run.speeds = {4: (1.0, "corrected")}
    run.step(2, 3.0)
    run.decide()
    *_, before, after = segments_of(run.history)
    # 10 steps of 1.5 s on the old layout, where the first batch trains 4 samples in a second, and 2
    # of 3 s on the new one, where it trains one.
    assert (before.samples, before.first_samples_per_s) == (160.0, 4.0)
    assert (after.samples, after.first_samples_per_s) == (32.0, 1.0)
    assert (before.seconds, after.seconds) == pytest.approx((15.0, 6.0))
    found = time_saved(segments_of(run.history))
    assert found is not None
    assert found.staying_s == pytest.approx(10.0 + (320 / 4.0 + 32 / 1.0) * (1 + 0.5) / (1 + 2.0))


def test_without_a_record_of_steps_nothing_is_claimed(tmp_path: Path) -> None:
    run = grown(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert run.line == "not known: no step is recorded"


def test_what_was_timed_counts_more_than_what_was_derived_later(tmp_path: Path) -> None:
    run = grown(tmp_path)
    line = run.line
    run.speeds[4] = 400.0, "corrected"
    run.decide()
    assert run.line == line
    assert [s.first_samples_per_s for s in segments_of(run.history)] == [4.0] * 3


@pytest.mark.parametrize(("speeds", "known"), [((3.5, 4.0, 4.5), True), ((1.0, 4.0, 9.0), False)])
def test_what_others_tell_of_a_speed_counts_if_they_agree(
    speeds: tuple[float, ...], known: bool, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    run.step(1, 1.0)
    run.decide(16)
    for speed in speeds:
        run.speeds[4] = speed, "corrected"
        run.step(10, 1.5)
        run.decide()
    assert ("depending on the critical batch size and the predicted speed" in run.line) == known
    assert ("is not sure enough" in run.line) != known
    if known:
        _, *others = segments_of(run.history)
        scatter = 1.4826 * abs(math.log(4.5 / 4.0))
        told = [(s.first_samples_per_s, pytest.approx(s.first_sd)) for s in others]
        assert told == [(4.0, scatter)] * 3


def test_a_launch_ends_with_the_line_if_anything_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(run: Run, *, code: int = 0, reason: Any = None) -> str:
        outcome: Any = SimpleNamespace(run_dir=run.path, reason=reason, failure=None, save=None)
        pretrain.tell_time_saved(outcome, code)
        return capsys.readouterr().out

    run = grown(tmp_path / "grown")
    assert told(run) == f"copus: so far: {run.line}\n"
    assert told(run, code=85) == ""
    assert told(run, reason=SimpleNamespace(kind="signal", is_urgent=True)) == ""
    assert told(unchanged(tmp_path / "unchanged")) == ""
    (run.path / "journal.jsonl").unlink()
    (run.path / "journal.jsonl").mkdir()
    assert told(run) == "", "the run is done all the same"


def test_status_and_report_show_the_line(tmp_path: Path) -> None:
    run = grown(tmp_path)
    controller = read_status(tmp_path).controller
    assert controller is not None and controller.so_far == run.line
    assert controller.time_saved is not None
    assert controller.time_saved.share == pytest.approx(0.2)
    out = io.StringIO()
    Console(file=out, width=200, highlight=False).print(screen(read_status(tmp_path)))
    assert run.line in " ".join(out.getvalue().split())
    assert run.line in report_of(RunReader(tmp_path)).verdict


def unchanged(path: Path) -> Run:
    run = Run(path)
    run.step(10, 1.0)
    run.decide()
    return run


def observed(path: Path) -> Run:
    return grown(path, mode="observe")


def undecided(path: Path) -> Run:
    run = Run(path)
    run.step(1, 1.0)
    return run


def without_noise(path: Path) -> Run:
    run = Run(path)
    run.phi, run.speeds[4] = None, (4.0, "measured")
    run.step(10, 1.0)
    run.decide(16)
    run.step(10, 1.5)
    return run


def never_timed(path: Path) -> Run:
    run = Run(path)
    run.step(1, 1.0)
    run.decide(16)
    run.step(10, 1.5)
    return run


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            unchanged,
            f"{UNCHANGED}{FIRST}",
        ),
        (observed, "nothing: the controller only observes"),
        (undecided, "nothing yet: the controller has only begun"),
        (without_noise, "not known: no decision knew a critical batch size"),
        (
            never_timed,
            f"not known: {FIRST} was not timed, and what others tell of its speed is not sure "
            "enough",
        ),
    ],
)
def test_what_cannot_be_known_is_said_in_words(make: Any, line: str, tmp_path: Path) -> None:
    assert make(tmp_path).line == line


def test_a_run_without_a_controller_has_no_line(tmp_path: Path) -> None:
    with Tracker(tmp_path, launch="a") as tracker:
        tracker.event("run.start", 0, 0, layout=LAYOUT)
    reader = RunReader(tmp_path)
    reader.refresh()
    assert so_far(reader.history()) == ("", None)


@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl"])
def test_of_files_whose_beginning_was_not_read_nothing_is_claimed(
    name: str, tmp_path: Path
) -> None:
    run = grown(tmp_path)
    reader = RunReader(run.path, max_bytes=(tmp_path / name).stat().st_size - 100)
    reader.refresh()
    line, _ = so_far(reader.history())
    assert line == "not known: the record is too long to read here; the report reads all of it"


def test_steps_whose_record_is_lost_are_counted(tmp_path: Path) -> None:
    run = grown(tmp_path)
    rewrite(
        tmp_path / "metrics.jsonl",
        lambda records: [r for r in records if r.get("iteration") != 21],
    )
    assert sum(s.samples for s in segments_of(run.history)) == 344.0
    assert run.line.endswith("; of 29 of 30 steps")


def test_another_micro_batch_needs_no_critical_batch_size(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(10, 1.0)
    run.speeds[4] = 4.0, "measured"
    run.decide(4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for i in range(11, 21):
            step = {"v": 1, "kind": "step", "launch": "job.0.0", "iteration": i}
            step |= {"consumed_samples": 4 * i, "elapsed_per_iteration_ms": 500.0}
            file.write(json.dumps(step | {"global_batch_size": 4, "micro_batch_size": 4}) + "\n")
    # 15 s were taken, and staying takes 20 s.
    assert run.line == f"25 % less time than staying at {FIRST}"
