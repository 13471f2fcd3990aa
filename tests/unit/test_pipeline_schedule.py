"""The vectorised schedules equal a slow reference that plays every message by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from copus_ext.cost_model import schedule
from copus_ext.cost_model.schedule import pipeline_time


def simulate(f: Any, g: Any, c: Any, count: int, vpp: int) -> list[float]:
    """Plays the stages as processes that block on messages; plain Python, one configuration."""
    pp = len(f)
    return _interleaved(f, g, c, count, vpp) if vpp > 1 else _plain(f, g, c, count, pp)


def _plain(f: Any, g: Any, c: Any, count: int, pp: int) -> list[float]:
    def stage(r: int) -> Iterator[tuple[str, float]]:
        first, last = r == 0, r == pp - 1
        warm = min(pp - 1 - r, count)
        for _ in range(warm):
            if not first:
                yield "up", 0.0
            yield "work", f[r][0]
            yield "down", 0.0
        if count > warm and not first:
            yield "up", 0.0
        for _ in range(count - warm):
            yield "work", f[r][0]
            if not last:
                yield "down", 0.0
            yield "work", g[r][0]
            if not first:
                yield "up", 0.0
        for _ in range(warm):
            yield "down", 0.0
            yield "work", g[r][0]
            if not first:
                yield "up", 0.0

    clocks, processes = [0.0] * pp, [stage(r) for r in range(pp)]
    waiting: list[str | None] = [None] * pp
    alive = set(range(pp))
    while alive:
        for r in sorted(alive):
            while waiting[r] is None:
                try:
                    kind, seconds = next(processes[r])
                except StopIteration:
                    alive.discard(r)
                    break
                clocks[r] += seconds
                waiting[r] = None if kind == "work" else kind
        for r in range(pp - 1):
            if waiting[r] == "down" and waiting[r + 1] == "up":
                clocks[r] = clocks[r + 1] = max(clocks[r], clocks[r + 1]) + c[r]
                waiting[r] = waiting[r + 1] = None
    return clocks


def _interleaved(f: Any, g: Any, c: Any, count: int, vpp: int) -> list[float]:
    """Each pass starts when its stage is free and its message is there (fixed point over time). A
    message leaves when its stage's link is free, and holds it until it is there."""
    pp, total = len(f), count * vpp
    order = [
        (chunk, m)
        for group in range(0, count, pp)
        for chunk in range(vpp)
        for m in range(group, group + pp)
    ]
    programs = []
    for r in range(pp):
        warm = min(2 * (pp - r - 1) + (vpp - 1) * pp, total)
        forwards = [("f", k, m) for k, m in order]
        backwards = [("b", vpp - 1 - k, m) for k, m in order]
        program = forwards[:warm]
        for i in range(total - warm):
            program += [forwards[warm + i], backwards[i]]
        programs.append(program + backwards[total - warm :])
    there: dict[Any, float] = {}
    clocks, links, at = [0.0] * pp, [0.0] * pp, [0] * pp
    while any(at[r] < len(programs[r]) for r in range(pp)):
        for r in range(pp):
            if at[r] == len(programs[r]):
                continue
            kind, k, m = programs[r][at[r]]
            ready = arrival(there, kind, r, k, m, pp, vpp)
            if ready is None:
                continue
            clocks[r] = max(clocks[r], ready) + (f if kind == "f" else g)[r][k]
            at[r] += 1
            # Backward over the boundary before the stage, forward over the one behind it.
            boundary = (r if kind == "f" else r - 1) % pp
            is_end = k == (vpp - 1 if kind == "f" else 0) and boundary == pp - 1
            there[kind, r, k, m] = clocks[r]
            if not is_end:
                links[r] = max(links[r], clocks[r]) + c[boundary]
                there[kind, r, k, m] = links[r]
    return clocks


def arrival(there: Any, kind: str, r: int, k: int, m: int, pp: int, vpp: int) -> float | None:
    if kind == "f":
        source = ("f", r - 1, k, m) if r else ("f", pp - 1, k - 1, m)
        if r == 0 and k == 0:
            return 0.0
    elif r < pp - 1:
        source = ("b", r + 1, k, m)
    elif k < vpp - 1:
        source = ("b", 0, k + 1, m)
    else:
        source = ("f", r, k, m)
    return there.get(source)


def test_a_slow_link_bounds_the_interleaved_schedule() -> None:
    """A stage sends its results one after the other, so that more chunks take longer there."""
    pp, count = 4, np.array([32])
    for hop in (0.01, 3.0):
        found = {}
        for vpp in (1, 2, 4):
            f, g = np.full((pp, vpp, 1), 1.0 / vpp), np.full((pp, vpp, 1), 2.0 / vpp)
            found[vpp] = pipeline_time(f, g, np.full((pp, 1), hop), count, vpp=vpp).max()
            sent = 2 * vpp * 32 * hop  # of a stage in the middle
            assert vpp == 1 or found[vpp] >= sent
        assert (found[2] > found[1] and found[4] > found[2]) == (hop == 3.0)


def draw(rng: np.random.Generator, pp: int, vpp: int, n: int, kind: str) -> tuple[Any, Any, Any]:
    f = rng.uniform(0.5, 1.5, (pp, vpp, n)) if kind == "random" else np.ones((pp, vpp, n))
    g = 2 * f if kind != "random" else rng.uniform(0.5, 3.0, (pp, vpp, n))
    if kind == "heavy ends":
        f[0, 0] *= 1.2
        f[-1, -1] *= 1.6
        g[-1, -1] *= 1.5
    # In half of the columns a message takes longer than a pass.
    hops = rng.uniform(0.0, 1.0, (pp if kind == "random" else 1, n))
    hops = hops * np.where(np.arange(n) % 2, 0.8, 4.0)
    return f, g, np.broadcast_to(hops, (pp, n))


@pytest.mark.parametrize("kind", ["equal", "heavy ends", "random"])
@pytest.mark.parametrize("pp", [2, 3, 4, 7])
def test_plain_1f1b_equals_the_reference(kind: str, pp: int) -> None:
    rng = np.random.default_rng(pp)
    counts = np.array([1, 2, 3, pp - 1, pp, pp + 1, 2 * pp, 3 * pp + 1, 40, 61])
    counts = np.maximum(counts, 1)
    f, g, c = draw(rng, pp, 1, len(counts), kind)
    got = pipeline_time(f, g, c, counts, vpp=1)
    for i, count in enumerate(counts):
        want = simulate(f[..., i], g[..., i], c[:, i], int(count), 1)
        assert got[:, i] == pytest.approx(want, rel=1e-11), (count, kind)


@pytest.mark.parametrize("kind", ["equal", "heavy ends", "random"])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 3)])
def test_interleaved_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, kind: str, pp: int, vpp: int
) -> None:
    rng = np.random.default_rng(10 * pp + vpp)
    counts = pp * np.array([1, 2, 3, 5, 9, 14])
    f, g, c = draw(rng, pp, vpp, len(counts), kind)
    # Few columns are played one by one, many together.
    monkeypatch.setattr(schedule, "_FEW_COLUMNS", 0)
    together = pipeline_time(f, g, c, counts, vpp=vpp)
    monkeypatch.setattr(schedule, "_FEW_COLUMNS", 99)
    got = pipeline_time(f, g, c, counts, vpp=vpp)
    np.testing.assert_array_equal(got, together)
    for i, count in enumerate(counts):
        want = simulate(f[..., i], g[..., i], c[:, i], int(count), vpp)
        assert got[:, i] == pytest.approx(want, rel=1e-11), (count, kind)


def test_equal_stages_have_a_closed_form() -> None:
    """Plain 1F1B, and interleaved with hops shorter than a chunk's forward pass."""
    f, g = np.full((1, 1, 2), 1.0), np.full((1, 1, 2), 2.0)
    assert pipeline_time(f, g, np.zeros((1, 2)), np.array([1, 5]), vpp=1).tolist() == [[3.0, 15.0]]
    for pp in (2, 3, 5, 8):
        counts = np.arange(pp, 6 * pp)
        n = len(counts)
        hop = 0.3
        f, g = np.full((pp, 1, n), 1.0), np.full((pp, 1, n), 2.1)
        got = pipeline_time(f, g, np.full((pp, n), hop), counts, vpp=1).max(axis=0)
        if pp == 2:
            want = (counts + 1) * (3.1 + hop)
        else:
            want = (counts + pp - 1) * 3.1 + (2 * (counts - 1) + 2 * (pp - 1) - (counts > 1)) * hop
        assert got == pytest.approx(want, rel=1e-12)
        for vpp in (2, 4):
            some = pp * np.array([1, 2, 5, 11])
            shape = (pp, vpp, len(some))
            f, g, hop = np.full(shape, 1.0 / vpp), np.full(shape, 2.0 / vpp), 0.5 / vpp
            got = pipeline_time(f, g, np.full((pp, len(some)), hop), some, vpp=vpp).max(axis=0)
            want = some * 3.0 + (pp - 1) * 3.0 / vpp + 2 * (pp * vpp - 1) * hop
            assert got == pytest.approx(want, rel=1e-12), (pp, vpp)


def test_long_runs_are_jumped_over_exactly() -> None:
    rng = np.random.default_rng(4)
    f, g, c = draw(rng, 5, 1, 3, "random")
    a, b = (pipeline_time(f, g, c, np.full(3, count), vpp=1) for count in (10_000, 20_000))
    per_microbatch = (b - a) / 10_000
    assert np.ptp(per_microbatch, axis=0) == pytest.approx(0, abs=1e-9)
    want = simulate(f[..., 0], g[..., 0], c[:, 0], 2_000, 1)
    got = pipeline_time(f[..., :1], g[..., :1], c[:, :1], np.array([2_000]), vpp=1)
    assert math.isclose(got[0, 0], want[0], rel_tol=1e-10)


@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_a_longer_pass_never_shortens_a_step(vpp: int) -> None:
    """What leaves out configurations that recompute more."""
    rng = np.random.default_rng(vpp)
    counts = 4 * np.array([1, 2, 3, 5, 8, 8, 12, 20])
    f, g, c = draw(rng, 4, vpp, len(counts), "random")
    before = pipeline_time(f, g, c, counts, vpp=vpp)
    longer = [x * (1 + rng.random(x.shape)) for x in (f, g, c)]
    for more in ((longer[0], g, c), (f, longer[1], c), (f, g, longer[2])):
        assert (pipeline_time(*more, counts, vpp=vpp) >= before - 1e-12).all()
