"""The atlas of small runs: its search, its file, and what it reads from its runs."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from bench.time_to_loss import atlas
from bench.time_to_loss.atlas import LONG, MIDDLE, SHORT, WARMUPS, Cell, Spec, pieces

BEST_RATE, BEST_WARMUP = -3, 0.3


def _loss(spec: Spec) -> float:
    warmups = WARMUPS.index(spec.warmup) - WARMUPS.index(BEST_WARMUP)
    return 1.5 + 0.01 * (spec.rate - BEST_RATE) ** 2 + 0.02 * warmups**2


def _row(spec: Spec) -> str:
    return json.dumps({"key": spec.key, "loss": _loss(spec), "spec": {"seed": spec.seed}}) + "\n"


def test_the_search_ends_at_the_optimum_after_few_runs() -> None:
    cell = Cell(kind="cosine", total_samples=SHORT, schedule=pieces(32))
    done: dict[str, float] = {}
    while missing := list(cell.wanted(done)):
        done[missing[0].key] = _loss(missing[0])
        assert len(done) <= 20
    best = cell.spec(BEST_RATE, BEST_WARMUP)
    assert min(done.values()) == done[best.key]
    assert {cell.spec(BEST_RATE, BEST_WARMUP, seed).key for seed in (1, 2)} <= done.keys()


def test_a_line_that_was_cut_off_is_trained_again(tmp_path: Path) -> None:
    path, claims = tmp_path / "atlas.jsonl", tmp_path / "atlas.claims"
    first = atlas._claim(path, claims)
    assert first is not None
    line = _row(first)
    path.write_text(line[: len(line) // 2])
    assert atlas._claim(path, claims.with_name("anew")) == first
    path.write_text(line)
    assert atlas._claim(path, claims.with_name("again")) != first


def test_a_run_that_a_living_process_trains_is_left_to_it(tmp_path: Path) -> None:
    path, claims = tmp_path / "atlas.jsonl", tmp_path / "atlas.claims"
    first = atlas._claim(path, claims)
    assert first is not None
    claims.write_text(json.dumps({first.key: os.getppid()}))
    second = atlas._claim(path, claims)
    assert second is not None and second.key != first.key
    claims.write_text(json.dumps({first.key: 2**30}))
    assert atlas._claim(path, claims) == first


def test_the_table_has_the_best_trial_of_a_cell_and_the_mean_of_its_seeds() -> None:
    cell = Cell(kind="wsd", total_samples=SHORT, schedule=pieces(16, 0.1, 64))
    trials = [(cell.spec(2, 0.1), 1.7), (cell.spec(0, 0.2), 1.5), (cell.spec(0, 0.2, 1), 1.6)]
    rows = [
        {"key": spec.key, "loss": loss, "steps": 9, "spec": dataclasses.asdict(spec)}
        for spec, loss in trials
    ]
    lines = atlas.table(rows).splitlines()
    assert lines[2:] == ["| wsd | 32768 | 16,0.1:64 | 9 | 1.550 | 2 | 0.0080, 20% |"]


def test_samples_between_lengths_follow_a_curve_over_the_loss() -> None:
    """Losses 1 + 200 / sqrt(samples): a power law, as of real runs."""

    def loss_at(samples: float) -> float:
        return 1.0 + 200 / math.sqrt(samples)

    lengths = (SHORT, MIDDLE, LONG)
    best = {f"cosine {n} [64]": {"mean_loss": loss_at(n)} for n in lengths}
    best |= {f"cosine {n} [256]": {"mean_loss": loss_at(n)} for n in lengths[:2]}
    for length in lengths:
        assert atlas.samples_to(best, 64, loss_at(length)) == pytest.approx(length)
    for length in (40_000, 58_000):
        found = atlas.samples_to(best, 64, loss_at(length))
        assert found is not None and found == pytest.approx(length, rel=2e-3)
        line = atlas.samples_to(best, 256, loss_at(length))
        assert line is None if length > MIDDLE else line is not None and line > found
    for length in (20_000, 75_000):
        found = atlas.samples_to(best, 64, loss_at(length), beyond=True)
        assert found is not None and found < length, "the static batch looks better than it is"
    assert atlas.samples_to(best, 64, 1.3) is None
    assert atlas.samples_to(best, 32, 1.6) is None


def test_the_figure_tells_what_was_trained_from_what_was_not() -> None:
    losses = {(8, SHORT): 1.5, (32, SHORT): 1.6, (32, LONG): 1.4, (64, SHORT): 1.7, (64, LONG): 1.6}
    losses |= {(128, SHORT): 1.9, (128, MIDDLE): 1.75, (128, LONG): 1.65, (256, SHORT): 2.0}
    best = {f"cosine {n} [{batch}]": {"mean_loss": loss} for (batch, n), loss in losses.items()}
    found = {batch: (samples, kind) for batch, samples, kind in atlas._needed(best, 1.6)}
    assert found[8] == (SHORT, "most")
    assert found[32] == (pytest.approx(SHORT), "between")
    assert found[64] == (pytest.approx(LONG), "between")
    assert found[128][1] == "beyond" and 256 not in found


def test_the_figure_is_drawn_before_there_are_several_lengths(tmp_path: Path) -> None:
    path, drawn = tmp_path / "atlas.jsonl", tmp_path / "atlas.svg"
    cells = [Cell(kind="cosine", total_samples=SHORT, schedule=pieces(b)) for b in (8, 16, 32)]
    path.write_text("".join(_row(cell.spec(0, 0.1)) for cell in cells))
    atlas.draw(path, drawn)
    assert f"samples to a loss of {_loss(cells[0].spec(0, 0.1)):.3f}" in drawn.read_text()
