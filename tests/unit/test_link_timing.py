"""What is timed by itself scatters less than what counts as a change."""

import math

import pytest
import torch

from copus_ext.controller import link_timing


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
    found = [link_timing._product_s("cpu") for _ in range(50)]
    scatter = max(abs(math.log(s / once_s)) for s in found)
    assert scatter < 0.15, "counts as a change of the machine"
    assert now[0] / 50 < max(1.0, 6 * once_s), "takes long"
