"""What is timed by itself scatters less than what counts as a change."""

import math

import pytest
import torch

from copus_ext.controller import link_timing
from copus_ext.cost_model.conditions import Timings


@pytest.mark.parametrize("once_s", [1e-6, 1e-3, 7e-3, 0.3])
def test_disturbed_timings_give_the_undisturbed_time(monkeypatch, once_s):
    """Two in five products take up to four times as long, as on busy cores."""
    now, draws = [0.0], torch.Generator().manual_seed(3)

    def multiply(a, b, out):
        x, disturbed = torch.rand(2, generator=draws).tolist()
        is_short = once_s < 0.01
        now[0] += once_s / 2 * (1 + 3 * x * (disturbed < 0.4) * is_short)

    monkeypatch.setattr(link_timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(link_timing.torch, "mm", multiply)
    a = torch.ones(2, 2)
    found = [link_timing._product_s("cpu", a, a) for _ in range(50)]
    scatter = max(abs(math.log(s / once_s)) for s in found)
    assert scatter < 0.15, "counts as a change of the machine"
    assert now[0] / 50 < max(1.0, 6 * once_s), "takes long"


def test_where_a_rank_has_no_memory_left_nothing_is_timed(monkeypatch):
    """The others do not wait for its messages."""

    def full(*sizes, **kinds):
        raise torch.OutOfMemoryError("no room")

    one, told = [(1, True), (1, True), (1, False)], []

    def gather(own):
        told.append(own)
        return one

    monkeypatch.setattr(link_timing.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(link_timing, "all_gather_object", gather)
    assert link_timing.time_machine("cpu") == Timings()
    monkeypatch.setattr(link_timing.torch, "ones", full)
    assert link_timing.time_machine("cpu") == Timings()
    assert [has_room for _, has_room in told] == [True, False]
