"""Logits in parts, messages that hide, and points that planners share."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copus_ext.commands import plan
from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.cost_model.memory import head_bytes, peaks
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.step import step_time
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.equals import grouped
from copus_ext.planner.explain import timing_line
from copus_ext.planner.plan import Ranked
from copus_ext.planner.profile import Timing
from copus_ext.planner.request import configuration_of
from copus_ext.planner.search import MEMORY, Planner
from copus_ext.planner.space import LEGAL, Candidates, Limits, points_of, to_config_batch
from megatron.trainer.config.layout import Layout

# Much vocabulary on few layers: the logits decide what fits.
MODEL = replace(PRESETS["llama-2-7b"], num_layers=8, vocab_size=256_000).with_seq_length(8192)
CHUNKS = (1, 2, 4, 8)
BATCH = 64


@pytest.fixture(scope="module")
def cluster() -> ClusterSpec:
    spec = preset("a100-40g:8")
    return replace(spec, gpu=replace(spec.gpu, memory_bytes=24e9))


def _kin(points: Candidates) -> list[Any]:
    """One key for each point, whatever its parts."""
    some = [replace(points.configuration(i), logits_chunks=1) for i in range(len(points))]
    return [str(c) for c in some]


def test_each_point_has_the_fewest_parts_with_which_it_fits(cluster: ClusterSpec) -> None:
    found = Planner(MODEL, cluster, limits=Limits(logits_chunks=CHUNKS))._judged([BATCH]).points
    least: dict[Any, int] = {}
    for chunks in CHUNKS:
        space = Planner(MODEL, cluster, limits=Limits(logits_chunks=(chunks,)))._judged([BATCH])
        for kin, code in zip(_kin(space.points), space.points.code):
            if code != MEMORY:
                least.setdefault(kin, chunks)
    legal = found.code == LEGAL
    chosen = dict(zip(_kin(found.take(legal)), found.logits_chunks[legal]))
    assert {1, 2, 8} <= set(chosen.values())
    assert all(least[kin] == chunks for kin, chunks in chosen.items())
    refused = found.take(found.code == MEMORY)
    assert len(refused) and not set(_kin(refused)) & set(least)


def test_parts_of_the_logits_help_where_memory_is_short() -> None:
    cluster = preset("a100-40g:8")
    whole, best = (
        Planner(MODEL, cluster, limits=Limits(fixed={"tp": 1, "cp": 1}, logits_chunks=chunks))
        .rank([BATCH], top=1)[0]
        .ranked[0]
        for chunks in ((1,), CHUNKS)
    )
    assert best.configuration.logits_chunks > 1
    assert best.prediction.step_s < 0.99 * whole.prediction.step_s
    text = str(best.configuration)
    again = configuration_of(text, global_batch_size=BATCH, world_size=cluster.world_size)
    assert again == best.configuration
    explained = Planner(MODEL, cluster).explain(again)
    assert isinstance(explained, Ranked)
    assert explained.prediction.step_s == pytest.approx(best.prediction.step_s)
    assert "--logits-chunks" in again.to_flags()


def test_where_all_fits_nothing_changes() -> None:
    plain, able = (
        Planner(PRESETS["llama-2-7b"], preset("h100-80g:8"), limits=limits).rank([64], top=3)[0]
        for limits in (Limits(), Limits(logits_chunks=CHUNKS))
    )
    assert plain.ranked[0].configuration == able.ranked[0].configuration
    assert able.num_ranked >= plain.num_ranked


def test_logits_in_parts_cost_one_more_forward_pass_of_the_head() -> None:
    c = Configuration(layout=Layout(dp=8), micro_batch_size=1, global_batch_size=BATCH)
    planner = Planner(MODEL, preset("a100-40g:8"))
    one, two = (
        to_config_batch(MODEL, planner.cluster, points_of([replace(c, logits_chunks=n)]))
        for n in (1, 2)
    )
    assert head_bytes(two)[0] < 0.6 * head_bytes(one)[0]
    assert peaks(two)[0][0] < peaks(one)[0][0]
    times = [step_time(rows, planner.constants) for rows in (one, two)]
    assert times[0].parts["recompute"][0] == 0 < times[1].parts["recompute"][0]
    extra = times[1].step_s[0] - times[0].step_s[0]
    assert 0 < extra < times[0].parts["compute"][0] / 4


@pytest.mark.parametrize(
    ("kind", "vpp", "handles"), [("cpu:2", 2, True), ("cpu:2", 1, False), ("a100-40g:2", 2, False)]
)
def test_messages_that_hide_take_time_from_the_core_of_a_cpu_rank(
    kind: str, vpp: int, handles: bool
) -> None:
    model, machine = replace(MODEL, tied=False, vocab_size=32_000), preset(kind)
    c = Configuration(layout=Layout(pp=2, vpp=vpp), micro_batch_size=1, global_batch_size=16)
    rows = to_config_batch(model, machine, points_of([c]))
    constants = machine.load_constants()
    slower = replace(constants, tp_latency_s=3 * constants.tp_latency_s)
    before, after = (step_time(rows, one) for one in (constants, slower))
    more = (after.step_s[0] - before.step_s[0]) / constants.tp_latency_s
    # Half of the latency of a collective for each.
    passes = 2 * 16 * vpp
    # The passes of filling and draining the pipeline come on top.
    assert passes - 1e-6 <= more <= passes + 4 if handles else abs(more) < 1e-6
    assert after.step_s[0] == pytest.approx(sum(part[0] for part in after.parts.values()))


def test_points_of_another_planner_are_those_it_would_list() -> None:
    for model, cluster, parts in (
        (MODEL, preset("a100-40g:8"), (1,)),
        (PRESETS["llama-2-13b"], preset("a100-40g:16"), (1, 4)),
        (PRESETS["mixtral-8x7b"], preset("a100-80g:16"), (1,)),
    ):
        limits = Limits(logits_chunks=parts)
        usual = Planner(model, cluster, limits=limits)
        own, given = (Planner(model, cluster, limits=limits) for _ in range(2))
        own.constants = usual.constants.under(replace(usual.constants.factors, across=0.5))
        given.constants = own.constants
        given.take_space(usual, [BATCH])
        want, got = own._judged([BATCH]), given._judged([BATCH])
        for field in fields(want.points):
            one, other = (getattr(x.points, field.name) for x in (want, got))
            assert np.array_equal(one, other), field.name
        assert np.array_equal(want.fits, got.fits) and want.fits.any()
        assert np.array_equal(want.peaks, got.peaks, equal_nan=True)
        assert own.rank([BATCH]) == given.rank([BATCH])


def test_times_are_not_given_to_points_of_another_planner() -> None:
    cluster = preset("a100-40g:8")
    best = Planner(MODEL, cluster).rank([BATCH], top=1)[0].ranked[0]
    timed = [Timing(configuration=best.configuration, step_s=1.0)]
    with pytest.raises(AssertionError):
        Planner(MODEL, cluster).take_space(Planner(MODEL, cluster, timings=timed), [BATCH])


def test_commands_to_time_name_what_is_priced(cluster: ClusterSpec) -> None:
    limits = Limits(fixed={"tp": 1, "pp": 2, "vpp": 1}, logits_chunks=(4,))
    planner = Planner(MODEL, cluster, limits=limits)
    worth = planner.worth_timing(planner.rank([BATCH])[0])
    text = timing_line([worth], gpus_per_node=cluster.gpus_per_node)
    assert worth and text.count("--logits-chunks 4") == 2
    # A layout is timed on as many ranks as it is for.
    count = cluster.world_size
    started = f"torchrun --nproc-per-node {count} -m copus_ext.commands.main profile-layouts "
    assert count > 1 and text.count(started) == 2


def test_what_does_not_fit_is_shown_with_the_cheapest_change_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--model", "llama-2-13b", "--cluster", "h100-80g:16", "--global-batch-size", "64"]
    assert plan.main(["explain", "tp4.pp1,micro_batch=16", *where]) == 4
    text = capsys.readouterr().out
    assert "GiB too much; the cheapest change that fits is micro_batch=4, with " in text
    assert "use more GPUs" not in text
    assert "\nmemory: peak " in text and "\n  stage 0 " in text
    # Of all kinds of recomputation a part of the layers costs least.
    assert plan.main(["explain", "tp1.pp2", *where]) == 4
    changed = re.search(r"fits is (recompute=block:\d+), with (\S+) s", capsys.readouterr().out)
    assert changed is not None
    assert plan.main(["explain", f"tp1.pp2,{changed[1]}", *where]) == 0
    assert f"step {changed[2]} s" in capsys.readouterr().out
    assert plan.main(["explain", "tp1.pp2,recompute=full", *where, "--json"]) == 0
    (full,) = json.loads(capsys.readouterr().out)["explained"]
    assert full["prediction"]["step_s"] > float(changed[2])
    # Nothing helps 175 billion parameters on one rank.
    huge = ["--model", "gpt3-175b", "--cluster", "h100-80g:8", "--global-batch-size", "8"]
    assert plan.main(["explain", "tp1.pp1", *huge]) == 4
    assert "use more GPUs or memory" in capsys.readouterr().out


def test_a_single_copy_has_no_second_row_for_how_its_optimizer_is_split() -> None:
    planner = Planner(PRESETS["llama-2-13b"], preset("h100-80g:16"))
    name = "tp2.pp8.vpp{},micro_batch=1,zero={}"
    some = [
        planner.priced(configuration_of(text, global_batch_size=64, world_size=16))
        for text in (name.format(1, 1), name.format(5, 1), name.format(5, 0))
    ]
    # All take as long, so that the first stands for the others.
    alike = [replace(x, prediction=some[0].prediction) for x in some]
    (row,) = grouped(alike, 3)
    assert [x.configuration for x in row.equals] == [some[1].configuration]


def test_a_batch_that_is_too_small_is_told_by_what_comes_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = [
        "--model",
        "llama-2-13b",
        "--cluster",
        "h100-80g:1000000",
        "--global-batch-size",
        "1536",
    ]
    assert plan.main(many) == 3
    assert "use --global-batch-size 3125 or more, or fewer replicas" in capsys.readouterr().err


_WHERE = "--model llama-2-7b --seq-length 2048"


def test_an_error_of_a_batch_names_flag_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (
        ("--global-batch-size 10 --fix tp=1,cp=1,pp=1", "use --global-batch-size 8 or 16"),
        (
            "--global-batch-size 12 --fix vpp=2,pp=8,micro_batch=2",
            "gives 6; use --global-batch-size 16 or vpp=1",
        ),
    ):
        assert plan.main([*f"{_WHERE} --cluster h100-80g:8 {text}".split()]) == 3
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"plan.py: error: {' '.join(text.split()[:2])}: ")
        assert last.endswith(said)
    assert plan.main([*f"{_WHERE} --cluster h100-80g:8".split()]) == 2
    assert "give --global-batch-size, for example 512, or auto" in capsys.readouterr().err


_NODES: dict[str, Any] = {
    "gpu": "A100-80GB",
    "num_nodes": 2,
    "gpus_per_node": 8,
    "intra_bytes_per_s": 3e11,
    "nic_bytes_per_s": 1e11,
}
_BAD_CLUSTERS: tuple[tuple[Any, str], ...] = (
    ({**_NODES, "num_nodes": 0}, "cluster.num_nodes 0 must be a whole number from 1"),
    (
        {"num_node": 2, **{n: x for n, x in _NODES.items() if n != "num_nodes"}},
        "unknown cluster keys: num_node; did you mean num_nodes?",
    ),
    ({**_NODES, "colour": 1}, "unknown cluster keys: colour; known: gpu, num_nodes, gpus_per_node"),
    (
        {"gpu": "A100-80GB", "num_nodes": 2},
        "lacks gpus_per_node, intra_bytes_per_s, nic_bytes_per_s; give them, as in {.gpu.: .*}",
    ),
    ({"gpu": "A100-80GB", "nodes": 2}, "cluster.nodes lists nodes .* did you mean num_nodes"),
    ({"num_nodes": 2}, "must name a GPU or describe one, as in {"),
    ({**_NODES, "gpu": {"name": "X"}}, "gpu lacks memory_bytes, .*; give them, or a name"),
    (
        {**_NODES, "intra_bytes_per_s": "fast"},
        "cluster.intra_bytes_per_s 'fast' is not a size; write",
    ),
    ({**_NODES, "constants": "x"}, "constants 'x' are unknown; known: a100-80g"),
    ([], "a cluster is described by a JSON object"),
    ("", "not valid JSON: .*; correct it there"),
)


@pytest.mark.parametrize(("described", "said"), _BAD_CLUSTERS)
def test_an_error_of_a_cluster_file_names_flag_and_fix(
    described: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(described) if described != "" else '{"gpu": 1,')
    words = [*_WHERE.split(), "--global-batch-size", "64", "--cluster", str(path)]
    assert plan.main(words) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"plan.py: error: --cluster {path}: .*{said}", line), line


def test_a_cluster_file_that_is_not_there_is_told_with_what_to_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*_WHERE.split(), "--global-batch-size", "64", "--cluster", "none.json"]
    assert plan.main(words) == 5
    told = "--cluster none.json: No such file or directory; give the path of one, or KIND:GPUS"
    assert told in capsys.readouterr().err
