"""Flags of a mixture of experts: what is derived, what is refused and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from copus_ext.commands.pretrain import resolve_run
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import check_run, observe_note
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.moe_flags import changed_by_batch_or_layout, layers_with_experts
from megatron.trainer.config.relayout import with_layout
from tests.helpers.jobs import EIGHT, MOE, TINY, TINY_GPT2


def config_of(more: str = "", world_size: int = 4, base: str = MOE) -> Config:
    args = parse_args([*base.split(), "--train-iters", "2", *more.split()])
    return resolve(args, world_size)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1", (1, 1, 1, 1)),
        ("2", (1, 0, 1, 0)),
        ("3", (1, 0, 0, 1)),
        ("[0]*1+[1]*3", (0, 1, 1, 1)),
        ("([0]*1+[1]*1)*2", (0, 1, 0, 1)),
        ("[1,0,0,1]", (1, 0, 0, 1)),
    ],
)
def test_layers_with_experts(text: str, found: tuple[int, ...]) -> None:
    assert layers_with_experts(text, 4) == found
    assert config_of(f"--moe-layer-freq {text}").moe.moe_layers == found


@pytest.mark.parametrize(
    "text", ["0", "[1]*3", "[0]*4", "[2]*4", "x", "1+1", "[1]*10**9", "__import__('os')", "[[1]]*4"]
)
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"layer|number|at least|list"):
        layers_with_experts(text, 4)
    with pytest.raises(UsageError, match="--moe-layer-freq"):
        config_of(f"--moe-layer-freq {text}")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--expert-model-parallel-size 3 --world 6", "--num-experts 8 is not divisible by 3"),
        ("--expert-model-parallel-size 8", "not divisible by --expert-model-parallel-size 8"),
        (
            "--expert-tensor-parallel-size 4 --moe-ffn-hidden-size 22",
            "--moe-ffn-hidden-size 22 is not divisible by 4",
        ),
        (
            "--tensor-model-parallel-size 2 --moe-shared-expert-intermediate-size 15",
            "--moe-shared-expert-intermediate-size 15 is not divisible by 2",
        ),
        (
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
            "gloo has no all-to-all .* --moe-token-dispatcher-type allgather",
        ),
        (
            "--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 "
            "--expert-model-parallel-size 2",
            "--use-tp-pp-dp-mapping in a pipeline needs as many copies",
        ),
        ("--moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8"),
        ("--moe-router-topk 1", "--moe-router-topk 1 with softmax needs --moe-router-pre-softmax"),
        ("--moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        (
            "--moe-shared-expert-intermediate-size 8 --base gpt2",
            "--moe-shared-expert-intermediate-size 8 needs --disable-bias-linear",
        ),
        ("--moe-router-num-groups 2", "--moe-router-num-groups and --moe-router-group-topk go"),
        (
            "--moe-router-num-groups 3 --moe-router-group-topk 1",
            "--num-experts 8 is not divisible by --moe-router-num-groups 3",
        ),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1",
            "names 2 and --moe-aux-loss-coeff 1; give as many",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
            "sinkhorn has no loss",
        ),
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-balance lagged",
            "--moe-balance lagged needs --moe-router-load-balancing-type aux_loss",
        ),
        ("--moe-pad-expert-input-to-capacity", "needs --moe-expert-capacity-factor"),
        ("--moe-token-dispatcher-type flex", "flex needs a GPU; use alltoall or allgather"),
        ("--fp16", "--num-experts excludes --fp16"),
        ("--moe-aux-loss-coeff=-0.1", "--moe-aux-loss-coeff -0.1 must not be negative"),
        (
            "--moe-layer-recompute --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            "--moe-layer-recompute excludes --recompute-granularity full",
        ),
        ("--moe-latent-size 8", "--moe-latent-size 8 is refused"),
        ("--moe-use-legacy-grouped-gemm", "--moe-use-legacy-grouped-gemm is refused"),
        ("--moe-something-new", "--moe-something-new is refused"),
    ],
)
def test_what_cannot_be_is_refused_by_name(more: str, told: str) -> None:
    flags, _, world = more.partition(" --world ")
    flags, _, name = flags.partition(" --base ")
    base = f"{TINY_GPT2} {EIGHT}" if name else MOE
    with pytest.raises(UsageError, match=told):
        config_of(flags, int(world or 4), base)


def test_defaults_are_those_of_megatron_lm() -> None:
    moe = config_of(base=MOE.replace("--moe-ffn-hidden-size 24", "")).moe
    assert moe.moe_ffn_hidden_size == 64, "--ffn-hidden-size"
    assert moe.moe_router_load_balancing_type == ("aux_loss",) and moe.moe_aux_loss_coeff == (0.0,)
    assert (moe.moe_balance, moe.moe_router_dtype) == (None, "fp32")
    layout = config_of("--tensor-model-parallel-size 2").layout
    assert layout == Layout(tp=2, dp=2) and layout.expert_tensor_parallel_size == 2


def test_a_dense_model_says_what_has_no_effect() -> None:
    config = config_of("--moe-router-topk 4", base=TINY)
    assert "without --num-experts: no effect of --moe-router-topk" in config.runtime.notes
    assert config.moe.num_experts is None and config.moe.moe_layers is None
    with pytest.raises(UsageError, match="sizes of experts and the model has none"):
        config_of("--expert-model-parallel-size 2", base=TINY)


@pytest.mark.parametrize(
    ("more", "idle"),
    [
        ("--moe-shared-expert-gate", "--moe-shared-expert-gate"),
        ("--moe-token-drop-policy position", "--moe-token-drop-policy"),
        ("--moe-router-bias-update-rate 0.1", "--moe-router-bias-update-rate"),
        (
            "--moe-balance exact --moe-aux-loss-coeff 1 --moe-balance-samples 8",
            "--moe-balance-samples",
        ),
        ("--moe-balance lagged", "--moe-balance"),
        (
            "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff",
        ),
    ],
)
def test_a_flag_that_means_nothing_beside_the_others_is_noted(more: str, idle: str) -> None:
    notes = config_of(more).runtime.notes
    assert any(note.startswith(f"no effect of {idle} without") for note in notes), notes


def test_the_controller_refuses_experts_that_see_parts_of_samples() -> None:
    flags = CopusConfig(copus=True)
    for more, is_fine in (
        ("--expert-model-parallel-size 2", True),
        ("", False),
    ):
        config = config_of(f"--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 {more}")
        assert config.layout.experts_see_whole_samples is is_fine
        if is_fine:
            check_run(flags, config)
        else:
            with pytest.raises(UsageError, match="--expert-tensor-parallel-size 1 a multiple of"):
                check_run(flags, config)
            check_run(dataclasses.replace(flags, copus_mode="observe"), config)


AUX = "--moe-aux-loss-coeff 0.1"


def run_of(more: str, base: str = MOE) -> Config:
    """As `pretrain_gpt.py` resolves it."""
    given = [*base.split(), "--train-iters", "2", *more.split()]
    return resolve_run(parse_args(given, {"copus controller": CopusConfig}), 4)


@pytest.mark.parametrize("mode", ["observe", "off"])
@pytest.mark.parametrize(
    ("more", "base"),
    [
        ("", MOE),
        (AUX, MOE),
        (f"{AUX} --expert-model-parallel-size 2 --moe-balance-samples 64", MOE),
        (f"{AUX} --moe-balance exact", MOE),
        (f"{AUX} --moe-balance lagged", MOE),
        (f"{AUX} --moe-expert-capacity-factor 1.0 --moe-input-jitter-eps 0.1", MOE),
        ("--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1 1", MOE),
        ("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1", MOE),
        ("--rampup-batch-size 4 4 8 --lr-warmup-iters 1", TINY),
        ("--attention-dropout 0.1 --tensor-model-parallel-size 2", TINY),
    ],
)
def test_a_mode_that_does_not_act_leaves_every_flag(mode: str, more: str, base: str) -> None:
    plain, observed = run_of(more, base), run_of(f"{more} --copus --copus-mode {mode}", base)
    assert observed.flat() == plain.flat()


def test_a_mode_that_acts_says_that_it_takes_the_lagged_balance() -> None:
    acting = run_of(f"{AUX} --copus")
    assert acting.moe.moe_balance == "lagged"
    (note,) = [note for note in acting.runtime.notes if "--moe-balance" in note]
    assert note.startswith("--copus: --moe-balance becomes lagged")
    for given in (f"{AUX} --moe-balance lagged", "", "--moe-aux-loss-coeff 0"):
        assert not [n for n in run_of(f"{given} --copus").runtime.notes if "--moe-balance" in n]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (AUX, "--moe-balance megatron counts micro-batches; use --moe-balance lagged"),
        (f"{AUX} --moe-balance exact", "the samples of a batch together"),
        (f"{AUX} --moe-balance lagged", None),
        ("--moe-expert-capacity-factor 1.0", "depends on the tokens of a rank"),
    ],
)
def test_a_noise_scale_that_is_of_one_micro_batch_is_told(more: str, said: str | None) -> None:
    flags = CopusConfig(copus=True, copus_mode="observe")
    note = observe_note(flags, run_of(more))
    assert note is None if said is None else note is not None and said in note
    assert observe_note(CopusConfig(copus=True), run_of(more)) is None


def test_tensor_parallelism_brings_sequence_parallelism() -> None:
    config = config_of("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1")
    assert config.parallel.sequence_parallel
    assert any("--sequence-parallel" in note for note in config.runtime.notes)
    moved = with_layout(config_of(), Layout(tp=2, ep=2, etp=1, dp=2))
    assert moved.parallel.sequence_parallel and moved.layout == Layout(tp=2, ep=2, etp=1, dp=2)
    with pytest.raises(UsageError, match="--num-experts 8 is not divisible"):
        with_layout(config_of("--global-batch-size 6", 3), Layout(ep=3, dp=3))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--moe-aux-loss-coeff 0.1", "--moe-balance megatron"),
        ("--moe-aux-loss-coeff 0.1 --moe-balance lagged", None),
        ("--moe-aux-loss-coeff 0.1 --moe-balance exact", "--moe-balance exact"),
        ("", None),
        ("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1", None),
        ("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1", "global_aux"),
        ("--moe-router-load-balancing-type sinkhorn", "sinkhorn"),
        ("--moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor"),
        ("--moe-input-jitter-eps 0.1", "--moe-input-jitter-eps"),
    ],
)
def test_what_batch_or_layout_would_change_is_named(more: str, reason: str | None) -> None:
    found = changed_by_batch_or_layout(config_of(more).flat())
    assert len(found) == (reason is not None)
    assert reason is None or reason in found[0]


def test_megatron_lm_names_one_loss_without_a_list() -> None:
    arguments: dict[str, Any] = {
        "num_experts": 8,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
    }
    assert len(changed_by_batch_or_layout(arguments)) == 1
    assert changed_by_batch_or_layout({**arguments, "moe_aux_loss_coeff": 0.0}) == []


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("tp2.pp1.dp2", Layout(tp=2, dp=2)),
        ("tp2.pp1.ep2.etp1.dp2", Layout(tp=2, ep=2, etp=1, dp=2)),
        (
            "tp2.pp2.vpp2.ep2.dp2.cut1-2-3-2",
            Layout(tp=2, pp=2, vpp=2, ep=2, dp=2, layer_partition=(1, 2, 3, 2)),
        ),
    ],
)
def test_one_text_names_a_layout_with_experts(text: str, layout: Layout) -> None:
    assert str(layout) == text and Layout.from_text(text) == layout
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.of_arguments(layout.to_arguments()) == layout
    assert Layout(tp=2, etp=2, dp=2) == Layout(tp=2, dp=2)


def test_experts_fill_the_ranks_of_a_stage() -> None:
    with pytest.raises(ValueError, match="do not divide by ep x etp"):
        Layout(tp=2, ep=4, dp=2)
    assert Layout(tp=4, ep=2, etp=1).expert_data_parallel_size == 2
