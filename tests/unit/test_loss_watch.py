"""A loss spike after a change of the batch, told from the scatter of a few samples' losses."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import asdict
from typing import Any

import pytest

from copus_ext.goodput.loss_watch import WATCHED_STEPS, LossWatch
from copus_ext.goodput.state import TIMED_STEPS

RUNS = 400
LOSS = 1.7
ONE_SAMPLE_SD = 0.47
"""Of the loss of a sample of 128 bytes of text, nats a byte."""


def watched(
    seed: int,
    *,
    before: int = 4,
    after: int = 4,
    rise: float = 0.0,
    steps: int = WATCHED_STEPS,
    known_steps: int = TIMED_STEPS,
) -> LossWatch:
    """After a change between two batches, with a rise that dies out within some ten steps.

    The losses have the skew and the tail of those of real text, and fall meanwhile.
    """
    rng, shape = random.Random(seed), 1.5

    def loss(step: int, batch: int) -> float:
        scatter = (rng.gammavariate(shape, 1.0) - shape) / math.sqrt(shape)
        return LOSS - 0.001 * step + ONE_SAMPLE_SD / math.sqrt(batch) * scatter

    known = [loss(step, before) for step in range(known_steps)]
    watch = LossWatch(
        decision=1,
        from_batch=before,
        to_batch=after,
        loss_before=statistics.fmean(known),
        loss_sd_before=statistics.stdev(known) if len(known) > 1 else None,
        num_losses_before=len(known),
    )
    for step in range(steps):
        watch.add(loss(TIMED_STEPS + step, after) + rise * math.exp(-step / 10))
    return watch


def share_of_spikes(**how: Any) -> float:
    """Of many runs."""
    return statistics.fmean(watched(seed, **how).has_spiked for seed in range(RUNS))


@pytest.mark.parametrize(
    ("before", "after"), [(2, 8), (4, 16), (16, 4), (8, 2), (2, 1), (64, 128), (1024, 512)]
)
def test_the_scatter_of_a_few_samples_is_no_spike(before: int, after: int) -> None:
    assert share_of_spikes(before=before, after=after) <= 0.02


@pytest.mark.parametrize(
    ("before", "after", "rise"), [(2, 8, 2.0), (4, 16, 1.5), (16, 32, 1.0), (1024, 2048, 0.2)]
)
def test_a_spike_that_stands_out_is_found(before: int, after: int, rise: float) -> None:
    assert share_of_spikes(before=before, after=after, rise=rise) >= 0.95


@pytest.mark.parametrize("known_steps", [1, 2, 3, 5])
def test_few_losses_before_call_for_a_larger_rise(known_steps: int) -> None:
    ordinary = share_of_spikes(before=4, after=16, known_steps=known_steps)
    assert ordinary <= 0.02
    assert share_of_spikes(before=64, after=128, rise=8.0, known_steps=known_steps) >= 0.95


def test_a_large_rise_is_seen_at_once_and_a_small_one_never() -> None:
    assert watched(0, before=1024, after=2048, rise=1.0, steps=1).has_spiked
    assert not watched(0, before=10**9, after=10**9, rise=0.04).has_spiked


def test_a_loss_that_is_no_number_is_a_spike_where_others_were_known() -> None:
    watch = watched(0, steps=3)
    watch.add(math.nan)
    assert watch.has_spiked
    unknown = LossWatch(
        decision=1,
        from_batch=4,
        to_batch=8,
        loss_before=None,
        loss_sd_before=None,
        num_losses_before=1,
    )
    for loss in (math.nan, 5.0, 100.0):
        unknown.add(loss)
    assert not unknown.has_spiked and unknown.steps == 3


def test_a_resumed_watch_goes_on_as_if_it_had_not_stopped() -> None:
    for seed in range(20):
        watch = LossWatch(**json.loads(json.dumps(asdict(watched(seed, rise=0.8, steps=5)))))
        whole = watched(seed, rise=0.8, steps=5)
        for loss in (2.0, 2.5, 3.0, 3.5):
            watch.add(loss)
            whole.add(loss)
        assert watch == whole
