"""What one timed batch says of the others, on recorded steps of small models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Measured, Timing
from copus_ext.planner.space import points_of
from megatron.trainer.config.layout import Layout

RUNS = json.loads((Path(__file__).parent / "data" / "step_ends.json").read_text())["runs"]
FURTHER: dict[str, Any] = {"precision": "fp32", "vocab_size": 257, "gated": True, "bias": False}
FURTHER |= {"normalization": "RMSNorm", "tied": False}


def predicted(run: dict[str, Any], *, with_end: bool) -> list[tuple[float, float]]:
    """ln(measured / predicted) and the stated doubt of each batch of a micro-batch, by the time of
    a batch of 4 or of 8 alone."""
    cluster = replace(preset("cpu:1"), gpus_per_node=2).resize(run["world_size"])
    model, known = ModelSpec(**run["model"], **FURTHER), cluster.load_constants()
    timings = []
    for layout, micro, batch, step_s, end_s in run["rows"]:
        c = Configuration(
            layout=Layout.from_text(layout), micro_batch_size=micro, global_batch_size=batch
        )
        share = end_s / step_s if with_end else None
        timings.append(
            Timing(configuration=replace(c, overlap=False), step_s=step_s, end_share=share)
        )
    found = []
    for one in (t for t in timings if t.configuration.global_batch_size <= 8):
        own = one.configuration
        alike = [t for t in timings if t.configuration.micro_batch_size == own.micro_batch_size]
        points = points_of([t.configuration for t in alike])
        measured = Measured(model, cluster, known, [one])
        times = measured.predict(points)
        seconds, _, _ = measured.corrected(points, times)
        doubts = measured.against(points, times, own)
        errors = np.log([t.step_s for t in alike] / seconds)
        found += [(e, sd) for t, e, sd in zip(alike, errors, doubts) if t is not one]
    return found


def all_runs(*, with_end: bool) -> Any:
    """[n, 2] the same of all runs."""
    return np.array([x for run in RUNS for x in predicted(run, with_end=with_end)])


def test_other_batches_take_what_is_predicted_within_the_stated_doubt() -> None:
    errors, doubts = all_runs(with_end=True).T
    assert abs(errors.mean()) < 0.02 and np.abs(errors).mean() < 0.045
    assert (np.abs(errors) <= doubts).mean() > 0.8


def test_the_end_of_a_step_is_what_makes_them_right() -> None:
    blind, seen = (np.abs(all_runs(with_end=end)[:, 0]).mean() for end in (False, True))
    assert seen < 0.5 * blind
