"""Commands of Megatron-LM's functional tests, one for each flag that no other test trains, on four
CPU ranks: sizes and lengths scaled down, all other flags as they are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.trainer.config.layout import Layout
from tests.helpers.nightly import case, words_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.scaled_commands import GLOBAL_BATCH_SIZE, STEPS, goes_on, read_commands

RANKS = 4
_OVERLAPPED = "gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce"
COMMANDS = {
    # Name of the test -> its layout on four ranks, after a change if it makes one.
    "gpt/gpt3_15b_8t_release": Layout(tp=4),
    "gpt/gpt3_mcore_reruns_reshard": Layout(tp=2, pp=2),
    "gpt/gpt3_mcore_te_tp1_pp1_uniform_full_recompute": Layout(dp=4),
    "gpt/gpt3_mcore_te_tp1_pp2_cp4_a2a_p2p_nondeterministic": Layout(cp=2, pp=2),
    "gpt/gpt3_mcore_te_tp1_pp2_rope_embeddings": Layout(pp=2, dp=2),
    "gpt/gpt3_mcore_te_tp1_pp4_persistent_ckpt_disable_bias_linear": Layout(pp=4),
    f"{_OVERLAPPED}_param_gather_overlap_optimizer": Layout(pp=4, vpp=2),
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap": Layout(pp=4, vpp=2),
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline": Layout(pp=4, layer_partition=(2, 1, 1, 2)),
    "gpt/gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split": Layout(
        pp=4, vpp=2, layer_partition=(0, 1, 1, 1, 1, 1, 1, 0)
    ),
    "gpt/gpt3_mcore_te_tp2_pp2_cp2_etp4_dp_last": Layout(cp=2, pp=2),
    "gpt/gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion": Layout(tp=2, pp=2),
    "gpt/gpt3_mcore_te_tp2_pp2_defer_embedding_wgrad_compute": Layout(tp=2, pp=2),
    "gpt/gpt3_mcore_te_tp2_pp2_resume_torch_dist_reshard_1x4xNone": Layout(pp=4),
    "gpt/gpt3_mcore_te_tp4_pp1_qk_layernorm_test_mode": Layout(tp=4),
    "gpt/gpt3_mcore_tp4_pp1_resume_torch": Layout(tp=4),
    "mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release_sm": Layout(pp=4),
    "moe/gpt3_mcore_tp2_cp2_pp2_ep2_te_4experts2parallel_dp_last": Layout(cp=2, pp=2, ep=2),
    "moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer": Layout(
        tp=2, ep=2, dp=2
    ),
}
_DAILY = (
    *("cp4_a2a_p2p_nondeterministic", f"{_OVERLAPPED[4:]}_param_gather", "pp1_resume_torch"),
    *("defer_embedding_wgrad_compute", "te_8experts2parallel_dist_optimizer"),
)
DAILY = [name for name in COMMANDS if any(part in name for part in _DAILY)]
"""What every commit trains; the others, with flags that hardly do anything here, are nightly."""
NAMES = [case(name, daily=name in DAILY) for name in COMMANDS]
pytestmark = pytest.mark.timeout(840)


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    names = COMMANDS if words_of(request) else DAILY
    folder = tmp_path_factory.mktemp("commands")
    return on_ranks("worker_megatron_commands", folder, RANKS, *names, timeout_s=800)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains(record: dict[str, Any], name: str) -> None:
    steps = record[name]["steps"]
    last = STEPS * (2 if goes_on(name) else 1)
    iterations, samples, losses = map(list, zip(*steps))
    assert iterations == list(range(1, len(steps) + 1))
    assert samples[-1] == last * GLOBAL_BATCH_SIZE and samples == sorted(samples)
    assert len(steps) == last or "--rampup-batch-size" in read_commands()[name]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_its_ranks_are_laid_out_as_asked(record: dict[str, Any], name: str) -> None:
    layout, run = COMMANDS[name], record[name]
    assert run["layout"] == str(layout)
    for rank in run["ranks"]:
        assert [rank[size] for size in ("tp", "pp", "vpp", "dp")] == list(layout.sizes)
    flags = read_commands()[name]
    assert run["dtype"] == ("torch.float16" if "--fp16" in flags else "torch.bfloat16")


def test_what_it_goes_without_is_said(record: dict[str, Any]) -> None:
    said = {name: "\n".join(run["notes"]) for name, run in record.items()}
    assert all(
        "transformer_engine becomes local" in text
        for name, text in said.items()
        if "transformer_engine" in read_commands()[name]
    )
    for flag in (
        "--defer-embedding-wgrad-compute",
        "--ckpt-format torch",
        "--dist-ckpt-strictness",
    ):
        assert any(flag in text for text in said.values())
