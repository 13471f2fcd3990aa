"""What single terms of a step cost: collectives that hide, tied embeddings, plain torch, links that
parts of a step share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from copus_ext.cost_model import correct
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.constants import Constants, PartFactors
from copus_ext.cost_model.correct import Steps
from copus_ext.cost_model.kernels import collective_s, hidden_s
from copus_ext.cost_model.layer_time import MicroBatch, boundaries_between_nodes, tied_s
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.rows import ConfigBatch, bucket_parameters
from copus_ext.cost_model.step import end_of_step, stage_work, step_time
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import steps_of
from copus_ext.planner.space import points_of, to_config_batch
from megatron.trainer.config.layout import Layout

MODEL, C = PRESETS["llama-2-13b"], Constants()


def rows_of(
    layouts: list[tuple[int, int]],
    cluster: str = "a100-80g:32",
    micro: int = 2,
    *,
    parallel: bool = True,
    **model: Any,
) -> ConfigBatch:
    """A row for each (tp, pp)."""
    what = preset(cluster)
    some = [
        Configuration(
            layout=Layout(tp=tp, pp=pp, dp=what.world_size // (tp * pp)),
            micro_batch_size=micro,
            global_batch_size=256,
            sequence_parallel=parallel and tp > 1,
        )
        for tp, pp in layouts
    ]
    return to_config_batch(dataclasses.replace(MODEL, **model), what, points_of(some)).full()


EVERY = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)]


def test_longer_messages_reach_more_of_a_link() -> None:
    rows = rows_of([(8, 1)])
    sizes = np.geomspace(1e4, 1e10, 30)
    seconds = np.array([collective_s(rows, C, size, 8)[0] for size in sizes])
    assert (np.diff(seconds) > 0).all()
    reached = 7 / 8 * sizes / seconds / C.tp_bytes_per_s
    assert (np.diff(reached) > 0).all() and 0.99 < reached[-1] < 1.0
    # A ring of eight needs some 10 MB to reach half. A longer ring is slower with short messages.
    assert 5e6 < np.interp(0.5, reached, sizes) < 15e6
    steps = [collective_s(rows, C, 1e4, ranks)[0] for ranks in (2, 4, 8)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("parallel", [True, False])
def test_what_hides_never_costs_more_than_what_does_not(parallel: bool) -> None:
    rng = np.random.default_rng(0)
    rows = rows_of(EVERY, parallel=parallel)
    seconds, behind = rng.exponential(1e-3, (2, 200))
    one = rows.take(np.zeros(200, dtype=int))
    hidden = hidden_s(one, seconds, behind)
    assert (hidden <= seconds).all() and (hidden >= np.maximum(seconds - behind, 0)).all()
    assert (hidden_s(one, seconds, 2 * behind) <= hidden).all()
    # A longer product never makes the two together shorter.
    assert (hidden_s(one, seconds, 2 * behind) + behind >= hidden).all()
    for name in ("tp_overlap", "on_cpu"):
        without = one.change(**{name: name == "on_cpu"})
        np.testing.assert_array_equal(hidden_s(without, seconds, behind), seconds)
    exposed = rows.change(tp_overlap=False)
    better, worse = (MicroBatch.of(r, C).tp_layer for r in (rows, exposed))
    alone = rows.tp == 1
    assert (better.backward[~alone] < worse.backward[~alone]).all()
    assert (better.backward[alone] == 0).all() and (worse.backward[alone] == 0).all()
    np.testing.assert_array_equal(better.forward, worse.forward)
    assert (step_time(rows, C).step_s <= step_time(exposed, C).step_s).all()


def test_sequence_parallelism_exposes_what_it_gathers_for_gradients_of_outputs() -> None:
    """Of its six halves backward, four hide; without it, all of four do."""
    rows = rows_of([(4, 1)]).change(tp_overlap=False)
    parts, whole = (MicroBatch.of(r, C).tp_layer for r in (rows, rows_of([(4, 1)], parallel=False)))
    assert parts.backward == pytest.approx(1.5 * parts.forward)
    assert whole.backward < whole.forward == pytest.approx(parts.forward)
    assert MicroBatch.of(rows_of([(4, 1)]), C).tp_layer.backward > parts.forward / 2


def test_a_tied_embedding_is_added_up_once_on_both_ends() -> None:
    rows = rows_of(EVERY, tied=True)
    seconds = tied_s(rows, C)
    assert ((seconds > 0) == (rows.pp > 1)).all()
    assert not tied_s(rows_of(EVERY, tied=False), C).any()
    # All ranks of a node send theirs at once; each has its columns.
    at = EVERY.index((4, 4))
    size = 4 * rows.padded_vocab_size[at] / 4 * rows.hidden_size[at]
    lane = 0.5 * rows.nic_bytes_per_s[at] / 8
    assert seconds[at] == pytest.approx(size / lane + C.tp_latency_s)
    four = rows.take(np.array([at]))
    *_, end = stage_work(four, C, 4, 1)
    assert (end.tied_s[[0, 3], 0] == seconds[at]).all() and not end.tied_s[1:3].any()
    # A step has it once, in its gradients.
    without = dataclasses.replace(end, tied_s=0.0).seconds(lambda size: 1e-12 * size)
    with_it = end.seconds(lambda size: 1e-12 * size)
    np.testing.assert_allclose(with_it[1] - without[1], end.tied_s)


def test_embeddings_within_a_node_are_added_up_over_its_links() -> None:
    near, far = rows_of([(2, 4)], "a100-80g:8", tied=True), rows_of([(2, 4)], tied=True)
    assert not boundaries_between_nodes(near).any() and boundaries_between_nodes(far).all()
    assert tied_s(near, C)[0] < tied_s(far, C)[0]


def test_plain_torch_costs_time_that_tensor_ranks_share_only_in_parts() -> None:
    layouts = [(tp, 1) for tp in (1, 2, 4, 8)]

    def more(*, parallel: bool) -> Any:
        slow, fast = (
            MicroBatch.of(rows_of(layouts, parallel=parallel, norm=norm), small).layer.forward
            for norm in ("torch", "fused")
        )
        return slow - fast

    small = dataclasses.replace(C, launch_s=1e-12)
    whole, parts = more(parallel=False), more(parallel=True)
    np.testing.assert_allclose(whole, whole[0], rtol=1e-6)
    np.testing.assert_allclose(parts * [1, 2, 4, 8], parts[0], rtol=1e-6)
    # Two norms of 2 samples, 52 bytes of each element.
    assert whole[0] == pytest.approx(104 * 2 * MODEL.seq_length * 5120 / 2.039e12, rel=1e-6)


def test_whole_logits_cost_every_rank_the_whole_loss() -> None:
    layouts = [(1, 1), (4, 1)]
    parts, whole = (
        MicroBatch.of(rows_of(layouts, logits_sharded=is_cut), C) for is_cut in (True, False)
    )
    assert whole.head.forward[0] == parts.head.forward[0]
    loss = 14 * 2 * MODEL.seq_length * 32000 * 3 / 4 / 2.039e12
    assert whole.head.forward[1] - parts.head.forward[1] == pytest.approx(loss)
    assert whole.tp_last[0] == parts.tp_last[0] == 0 and whole.tp_last[1] > parts.tp_last[1]


def test_unfused_scores_move_what_their_softmax_does() -> None:
    flash, half, single = (
        MicroBatch.of(rows_of([(2, 1)], fused_attention=f, softmax_in_fp32=s), C).layer.forward[0]
        for f, s in ((True, False), (False, False), (False, True))
    )
    dropped = MicroBatch.of(rows_of([(2, 1)], fused_attention=False, dropout=True), C)
    assert flash < half < dropped.layer.forward[0] < single


NAMES = ("compute", "pp", "dp")


def part_steps(shares: list[tuple[float, float, float]], across: list[float]) -> Steps:
    """Configurations that are no kin."""
    keys = [(2**i, 3**i, 1) for i in range(len(shares))]
    both = np.array([across, across])
    return Steps.of(keys, 4.0, dict(zip(NAMES, np.transpose(shares))), across=both)


@pytest.mark.parametrize(("taught", "asked"), [(2, 1), (1, 2)])
def test_gradients_teach_of_pipeline_messages_between_nodes_and_the_other_way_round(
    taught: int, asked: int
) -> None:
    def of(part: int) -> tuple[float, float, float]:
        seconds = [1.0, 0.0, 0.0]
        seconds[part] = 1.0
        return seconds[0], seconds[1], seconds[2]

    shares = [of(taught), of(asked), (2.0, 0.0, 0.0)]
    found = {}
    for where in (1.0, 0.0):
        steps = part_steps(shares, [where] * 3)
        # Computation takes what was predicted.
        got = correct.correct(steps, steps.take([0, 2]), np.log([2.0, 1.0]))
        found[where] = float(got.factor[1])
    assert found[1.0] > 1.1 and found[1.0] > found[0.0] + 0.05


def test_a_slow_network_is_no_news_of_links_within_nodes() -> None:
    shares = [(1.0, 0.0, 2.0), (1.0, 0.0, 2.0), (1.0, 0.0, 2.0)]
    steps = part_steps(shares, [1.0, 1.0, 0.0])
    got = correct.correct(steps, steps.take([0]), np.log([2.0]))
    assert got.factor[1] > got.factor[2] > 1.0
    assert got.part_factors["across"] > 1.0


def test_pipelines_learn_from_each_other() -> None:
    keys = [(1, 2, 1), (1, 4, 1), (2, 1, 1), (2, 8, 1)]
    steps = Steps.of(keys)
    got = correct.correct(steps, steps.take([0]), np.log([1.14]))
    assert got.factor[3] > got.factor[2] > 1.0


def test_a_step_says_what_goes_between_nodes() -> None:
    rows = rows_of([(8, 1), (8, 4), (4, 1), (2, 2)])
    across = step_time(rows, C).across
    assert across.tolist() == [[0, 1, 0, 1], [1, 0, 1, 1]]
    inside = step_time(rows_of([(2, 2), (1, 4)], "a100-80g:8"), C).across
    assert not inside.any()


def late(stage: int, pp: int, vpp: int, buckets: int, bucket_s: float, chunk_s: float) -> float:
    """Seconds by which a stage is late with its first passes, because it gathers its weights from
    the start, one bucket after the other. The first stage computes as its buckets come."""
    gathered, worst = 0.0, 0.0
    for chunk in range(vpp):
        begins = (chunk * pp + stage) * chunk_s
        if begins > 0:
            gathered += buckets * bucket_s
            worst = max(worst, gathered - begins)
            continue
        done = 0.0
        for _ in range(buckets):
            gathered += bucket_s
            done = max(done, gathered) + chunk_s / buckets
        worst = done - chunk_s
    return worst


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (4, 1), (2, 2), (4, 3)])
def test_weights_that_come_late_hold_stages_back(pp: int, vpp: int, overlap: bool) -> None:
    rows = rows_of([(1, pp)], "a100-80g:64").change(
        vpp=np.array([vpp]), overlap_param_gather=np.array([overlap])
    )
    bucket, bucket_s = float(bucket_parameters(rows.copies)[0]), 0.05

    def ring(num_bytes: Any) -> Any:
        return bucket_s / bucket / rows.element_bytes * num_bytes

    for buckets, forward in [(1, 0.3), (2, 1e-3), (5, 0.4), (5, 0.1), (5, 3.0)]:
        held = np.full((pp, 1), float(vpp * buckets * bucket))
        behind = end_of_step(rows, C, held, np.ones((pp, 1)), np.array([forward]))
        found = behind.seconds(ring)[1]
        whole = vpp * buckets * bucket_s
        by_hand = [late(s, pp, vpp, buckets, bucket_s, forward / vpp) for s in range(pp)]
        expected = np.array(by_hand)[:, None] if overlap else np.full((pp, 1), whole)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("overlap", [True, False])
def test_weights_of_experts_come_over_their_own_copies(overlap: bool) -> None:
    """A bucket of other weights and three of experts, which take twice as long."""
    layout = Layout(tp=1, pp=2, dp=16, ep=4)
    what = Configuration(layout=layout, micro_batch_size=1, global_batch_size=256)
    model = PRESETS["mixtral-8x7b"]
    rows = to_config_batch(model, preset("a100-80g:32"), points_of([what])).full()
    rows = rows.change(overlap_param_gather=np.array([overlap]))
    bucket, of_experts = bucket_parameters(rows.copies), bucket_parameters(rows.expert_copies)
    routed = np.broadcast_to(3 * of_experts, (2, 1))
    held, forward = routed + bucket, np.array([0.1])
    end = end_of_step(rows, C, held, np.ones((2, 1)), forward, routed)

    def ring(num_bytes: Any) -> Any:
        return 0.05 * num_bytes / rows.element_bytes / bucket

    def expert_ring(num_bytes: Any) -> Any:
        return 0.1 * num_bytes / rows.element_bytes / of_experts

    found = end.seconds(ring, expert_ring)[1][:, 0]
    share = (bucket + of_experts) / held[0]
    hidden = forward[0] * np.array([1 - share[0], 1.0]) if overlap else 0.0
    np.testing.assert_allclose(found, 0.35 - hidden)


@pytest.mark.parametrize(
    ("name", "cluster", "layout"),
    [
        ("llama-3-70b", "h100-80g:512", "tp8.pp4.dp16"),
        ("llama-3-70b", "h100-80g:512", "tp8.pp4.vpp4.dp16"),
        ("llama-3-70b", "h100-80g:512", "tp8.pp4.vpp10.dp16"),
        ("llama-2-13b", "h100-80g:64", "tp2.pp1.dp32"),
        ("mixtral-8x7b", "h100-80g:64", "tp1.pp4.ep8.dp16"),
    ],
)
@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_a_correction_of_replicas_is_the_model_with_slower_ones(
    name: str, cluster: str, layout: str, factor: float
) -> None:
    """What hides comes out as the cost model has it, by gradients and by weights."""
    what = Layout.from_text(layout)
    one = Configuration(
        layout=what, micro_batch_size=1, global_batch_size=256, sequence_parallel=what.tp > 1
    )
    points = points_of([one])
    rows = to_config_batch(PRESETS[name], preset(cluster), points)
    usual = step_time(rows, C)
    steps = steps_of(points, usual)
    theta = np.zeros(len(correct._NAMES) + 1)
    theta[correct._NAMES.index("dp")] = np.log(factor)
    found = usual.step_s * np.exp(correct._Parts(constant_s=0.0).log_factors(steps, theta))
    slower = step_time(rows, C.under(PartFactors(dp=factor))).step_s
    # Another stage may be the last one then, of which the correction knows nothing.
    np.testing.assert_allclose(found, slower, rtol=0.01)
