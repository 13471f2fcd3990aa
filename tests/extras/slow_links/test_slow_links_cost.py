"""Short messages between stages, as the planner prices them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.layer_time import hop_bytes, p2p_time_s
from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.models import PRESETS
from copus_ext.planner.better_machine import what_would_help
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.explain import help_line
from copus_ext.planner.run_flags import notes_on
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits, may_overlap, points_of, to_config_batch
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.slow_links.feature import SlowLinks
from tests.helpers.jobs import TINY

MODEL = replace(PRESETS["llama-2-7b"], num_layers=8, vocab_size=256_000).with_seq_length(8192)
SHORT = replace(MODEL, extras={"pipeline_message_bits": 8, "grad_compression_rank": 0})
BATCH = 64


def _rows(model: ModelSpec, vpp: int = 1, tp: int = 1) -> Any:
    layout = Layout(tp=tp, pp=2, vpp=vpp, dp=4 // tp)
    c = Configuration(
        layout=layout,
        micro_batch_size=1,
        global_batch_size=BATCH,
        sequence_parallel=tp > 1,
    )
    return to_config_batch(model, preset("a100-40g:8"), points_of([c])).full()


@pytest.mark.parametrize(("tp", "vpp"), [(1, 1), (2, 1), (1, 2)])
def test_short_messages_have_a_byte_for_each_number_and_four_for_each_row(
    tp: int, vpp: int
) -> None:
    rows = _rows(SHORT, vpp, tp)
    tokens = MODEL.seq_length / tp
    assert hop_bytes(rows)[0] == tokens * (MODEL.hidden_size + 4)
    assert hop_bytes(_rows(MODEL, tp=tp))[0] == 2 * tokens * MODEL.hidden_size


def test_short_messages_pay_on_slow_links_only() -> None:
    fast = preset("a100-40g:8")
    slow = replace(fast, num_nodes=4, gpus_per_node=2, nic_bytes_per_s=1e8, nic_is_measured=True)
    c = Configuration(layout=Layout(pp=8), micro_batch_size=1, global_batch_size=BATCH)
    for cluster, pays in ((fast, False), (slow, True)):
        constants = Planner(MODEL, cluster).constants
        hops = [
            np.max(p2p_time_s(to_config_batch(model, cluster, points_of([c])).full(), constants))
            for model in (MODEL, SHORT)
        ]
        assert (hops[1] < hops[0]) == pays
    only = Limits(fixed={"tp": 1, "pp": 4, "vpp": 1, "cp": 1})
    planner = Planner(MODEL, slow, limits=only)
    found = what_would_help(planner, BATCH)
    saved, best = found["--pipeline-message-bits 8"]
    whole, short = (
        Planner(model, slow, limits=only).rank([BATCH], top=1)[0].ranked[0]
        for model in (MODEL, SHORT)
    )
    assert best == short.configuration and saved > 0.1
    at_once = [r.prediction.samples_per_s for r in (whole, short)]
    assert saved == pytest.approx(1 - at_once[0] / at_once[1])
    line = help_line(found, use_tp_pp_dp_mapping=False)
    assert "--pipeline-message-bits 8, which may cost loss, would save" in line
    assert not any("--" in name for name in what_would_help(planner.on(slow, model=SHORT), BATCH))


def test_what_is_suggested_changes_neither_points_nor_memory() -> None:
    usual, own, given = (Planner(model, preset("a100-40g:8")) for model in (MODEL, SHORT, SHORT))
    given.take_space(usual, [BATCH])
    want, got = own._judged([BATCH]), given._judged([BATCH])
    for field in fields(want.points):
        one, other = (getattr(x.points, field.name) for x in (want, got))
        assert np.array_equal(one, other), field.name
    assert np.array_equal(want.fits, got.fits) and want.fits.any()
    assert np.array_equal(want.peaks, got.peaks, equal_nan=True)
    assert own.rank([BATCH]) == given.rank([BATCH])


def test_a_plan_says_which_flags_it_does_not_price() -> None:
    flags = f"{TINY} --grad-compression-rank 4"
    told = " ".join(notes_on(flags, no_overlap=False))
    assert "does not know --grad-compression-rank: priced as if not" in told
    assert "priced without --overlap-grad-reduce" in told
    model = spec_of_flags(flags.split())
    assert not may_overlap(model) and may_overlap(SHORT)
    bits = spec_of_flags(f"{TINY} --pipeline-message-bits 8".split())
    assert bits.extras["pipeline_message_bits"] == 8
    told = " ".join(notes_on(f"{TINY} --pipeline-message-bits 8", no_overlap=False))
    assert "does not know" not in told


def test_a_change_of_layout_finds_room_for_what_is_not_sent() -> None:
    def bytes_of(flags: str, world: int) -> tuple[float, float]:
        config = resolve(parse_args(f"{TINY} --train-iters 1 {flags}".split()), world)
        feature = object.__new__(SlowLinks)
        feature._flags = config.extras["slow_links"]
        return feature.relayout_bytes(config, 100)

    assert bytes_of("--grad-compression-rank 4", 2) == (400.0, 0.0)
    assert bytes_of("--grad-compression-rank 4", 1) == (0.0, 0.0)
    assert bytes_of("--pipeline-message-bits 8", 2) == (0.0, 0.0)
