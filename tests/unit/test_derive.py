"""Derived defaults and the checks behind them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.checkpoint.resume import merge_resume_config, vocabulary_line
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import GROUPS, Config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.fields import option_specs
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.relayout import with_layout
from megatron.trainer.config.vocabulary import pad_vocab_size, padding_unit
from tests.helpers.examples import SMALL, config_of, names_a_way_on

DERIVED = (
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "global_batch_size",
    "train_samples",
    "eval_samples",
    "split",
    "lr_decay_samples",
    "lr_warmup_samples",
    "data_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "tokenizer_type",
    "dataloader_type",
    "start_weight_decay",
    "end_weight_decay",
    "params_dtype",
    "distributed_backend",
)


def refusal(flags: str, world: int = 1, **environment: bool) -> str:
    with pytest.raises(UsageError) as error:
        config_of(flags, world, **environment)
    return str(error.value)


@pytest.mark.parametrize("required", ["--num-layers", "--lr", "--seq-length", "--micro-batch-size"])
def test_required_flags(required: str) -> None:
    before, after = f" {SMALL}".split(f" {required} ")
    rest = after.split()[1:]
    with pytest.raises(UsageError, match=f"{required} is required"):
        resolve(parse_args([*before.split(), *rest]), 1)


def test_all_missing_flags_at_once() -> None:
    with pytest.raises(UsageError) as error:
        resolve(parse_args([]), 1)
    specs = [spec for group in GROUPS.values() for spec in option_specs(group)]
    for spec in specs:
        assert (f"{spec.strings[0]} is required" in str(error.value)) == spec.required


def test_nothing_is_left_open_that_megatron_derives() -> None:
    flat = config_of().flat()
    assert [name for name in DERIVED if flat[name] is None] == []
    assert flat["device"] == "cpu"
    assert flat["num_workers"] == 0


@given(st.integers(1, 128))
def test_widths(eighths: int) -> None:
    hidden = 8 * eighths
    flags = f"--hidden-size {hidden} --num-attention-heads 8"
    assert config_of(flags).model.ffn_hidden_size == 4 * hidden
    assert config_of(flags).model.kv_channels * 8 == hidden
    if hidden >= 24:
        width = config_of(f"{flags} --swiglu").model.ffn_hidden_size
        assert width % 64 == 0
        assert 8 * hidden / 3 - 64 < width <= 8 * hidden / 3


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        ("", 4, {"data_parallel_size": 4, "global_batch_size": 8}),
        ("--sequence-parallel", 1, {"sequence_parallel": False}),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2, {"sequence_parallel": True}),
        ("--bf16", 1, {"accumulate_allreduce_grads_in_fp32": True, "params_dtype": "bf16"}),
        ("--bf16 --grad-reduce-in-bf16", 1, {"accumulate_allreduce_grads_in_fp32": False}),
        ("--use-rotary-position-embeddings", 1, {"position_embedding_type": "rope"}),
        ("--recompute-activations", 1, {"recompute_granularity": "selective"}),
        ("--recompute-activations", 1, {"recompute_modules": ["core_attn"]}),
        ("--group-query-attention --num-query-groups 2", 1, {"num_query_groups": 2}),
        ("--num-query-groups 2", 1, {"num_query_groups": 4}),
        ("--apply-query-key-layer-scaling", 1, {"attention_softmax_in_fp32": True}),
        ("--weight-decay 0.3", 1, {"start_weight_decay": 0.3, "end_weight_decay": 0.3}),
        ("--num-workers 3", 1, {"num_workers": 3}),
        ("--run-dir a --save b", 1, {"run_dir": "a"}),
        ("--save b --tensorboard-dir c", 1, {"run_dir": "b"}),
        ("--tensorboard-dir c", 1, {"run_dir": "c"}),
        ("--pipeline-model-parallel-size 2", 2, {"overlap_p2p_comm": False}),
    ],
)
def test_derived_defaults(flags: str, world: int, expected: dict) -> None:
    flat = config_of(flags, world).flat()
    assert {name: flat[name] for name in expected} == expected


@pytest.mark.parametrize(
    "flags",
    ["--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank 2"],
)
def test_virtual_pipeline(flags: str) -> None:
    config = config_of(f"--pipeline-model-parallel-size 2 --global-batch-size 4 {flags}", 2)
    assert config.layout == Layout(pp=2, vpp=2)
    assert config.parallel.overlap_p2p_comm
    text = refusal(
        f"--pipeline-model-parallel-size 2 --global-batch-size 4 {flags} "
        "--no-overlap-p2p-communication",
        2,
    )
    assert "--no-overlap-p2p-communication" in text


def test_a_batch_that_micro_batches_do_not_divide() -> None:
    flags = "--global-batch-size 10 --micro-batch-size 4"
    assert "--allow-uneven-micro-batches" not in refusal(flags, 2)
    assert config_of(f"{flags} --allow-uneven-micro-batches", 2).batch.global_batch_size == 10
    assert "data parallel size 3" in refusal(f"{flags} --allow-uneven-micro-batches", 3)
    pipeline = f"{flags} --allow-uneven-micro-batches --pipeline-model-parallel-size 2"
    assert "not divisible by --micro-batch-size" in refusal(pipeline, 2)


EIGHT = "--num-layers 8 --pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ("2 --pipeline-model-parallel-layout Et*5|tttL", Layout(pp=2, layer_partition=(5, 3))),
        ("2 --pipeline-model-parallel-layout Etttt|ttttL", Layout(pp=2)),
        (
            "2 --pipeline-model-parallel-layout E|(t*4|)*2L",
            Layout(pp=2, vpp=2, layer_partition=(0, 4, 4, 0)),
        ),
        ("2 --decoder-first-pipeline-num-layers 5", Layout(pp=2, layer_partition=(5, 3))),
        ("4 --decoder-last-pipeline-num-layers 2", Layout(pp=4)),
        ("4 --decoder-last-pipeline-num-layers 5", Layout(pp=4, layer_partition=(1, 1, 1, 5))),
        (
            "2 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            Layout(pp=2, vpp=2, layer_partition=(3, 1, 3, 1)),
        ),
        (
            "3 --account-for-loss-in-pipeline-split --global-batch-size 6",
            Layout(pp=3, layer_partition=(3, 3, 2)),
        ),
        (
            "5 --account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 10",
            Layout(pp=5, vpp=2, layer_partition=(0, 1, 1, 1, 1, 1, 1, 1, 1, 0)),
        ),
    ],
)
def test_cuts(flags: str, layout: Layout) -> None:
    config = config_of(f"--global-batch-size 4 {EIGHT} {flags}", layout.pp)
    assert config.layout == layout
    again = type(config).from_flat(json.loads(json.dumps(config.flat())))
    assert again.layout == layout
    assert with_layout(config, Layout(dp=layout.pp)).layout == Layout(dp=layout.pp)
    assert with_layout(config, layout).layout == layout


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("2 --pipeline-model-parallel-layout Et*5|ttL", ["--num-layers 8", "7 t"]),
        ("2 --pipeline-model-parallel-layout Et*8L", ["1 chunks", "-size 2"]),
        ("2 --pipeline-model-parallel-layout Ett|t*6", ["L last"]),
        ("2 --pipeline-model-parallel-layout Et*7x|tL", ["x is none of"]),
        ("2 --pipeline-model-parallel-layout Et*7|(tL", ["bracket"]),
        ("2 --pipeline-model-parallel-layout *3Et*7|tL", ["nothing before"]),
        ("2 --pipeline-model-parallel-layout Et*99999999|tL", ["use E, t"]),
        ("2 --pipeline-model-parallel-layout Et*4||t*4|L", ["every chunk"]),
        (
            "2 --pipeline-model-parallel-layout Et*5|tttL --decoder-first-pipeline-num-layers 5",
            ["--pipeline-model-parallel-layout and --decoder-first", "exclude"],
        ),
        (
            "2 --pipeline-model-parallel-layout Et|ttt|t|tttL "
            "--num-virtual-stages-per-pipeline-rank 2",
            ["exclude"],
        ),
        (
            "2 --decoder-first-pipeline-num-layers 5 --account-for-loss-in-pipeline-split",
            ["exclude"],
        ),
        ("1 --decoder-first-pipeline-num-layers 5", ["--pipeline-model-parallel-size"]),
        ("4 --decoder-first-pipeline-num-layers 4", ["leaves 4", "3 other stages"]),
        ("2 --decoder-first-pipeline-num-layers 8", ["leaves 0"]),
        ("2 --decoder-first-pipeline-num-layers 0", ["must be at least 1"]),
        ("2 --account-for-loss-in-pipeline-split", ["9, no multiple of 2"]),
        (
            "2 --decoder-first-pipeline-num-layers 5 --num-virtual-stages-per-pipeline-rank 2",
            ["not a multiple of 2 virtual stages"],
        ),
    ],
)
def test_cuts_that_are_refused(flags: str, parts: list[str]) -> None:
    text = refusal(f"--global-batch-size 4 {EIGHT} {flags}", int(flags.split()[0]))
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_on_cpu_and_on_gpu() -> None:
    cpu = config_of("--position-embedding-type rope")
    assert cpu.kernels.transformer_impl == "local"
    assert any("transformer_engine becomes local" in note for note in cpu.runtime.notes)
    on = ("masked_softmax_fusion", "gradient_accumulation_fusion", "bias_dropout_fusion")
    assert not any(getattr(cpu.kernels, name) for name in on)

    flags = "--position-embedding-type rope"
    full = config_of(
        flags, cuda_available=True, transformer_engine_available=True, apex_available=True
    )
    assert (full.runtime.device, full.parallel.distributed_backend) == ("cuda", "nccl")
    assert full.kernels.transformer_impl == "transformer_engine"
    assert all(getattr(full.kernels, name) for name in (*on, "apply_rope_fusion"))
    assert full.runtime.notes == ()
    assert full.data.num_workers == 2

    bare = config_of(flags, cuda_available=True)
    assert bare.kernels.transformer_impl == "local"
    assert not bare.kernels.gradient_accumulation_fusion
    assert bare.kernels.bias_dropout_fusion

    forced = config_of("--device cpu", cuda_available=True)
    assert forced.parallel.distributed_backend == "gloo"
    assert forced.kernels.transformer_impl == "local"
    with pytest.raises(UsageError, match=r"--device cpu .* Transformer Engine"):
        config_of("--device cpu", cuda_available=True, transformer_engine_available=True)
    gloo = config_of("--distributed-backend gloo", cuda_available=True)
    assert gloo.parallel.distributed_backend == "gloo"


def test_a_gated_activation_is_fused_without_a_bias_too() -> None:
    def is_fused(flags: str) -> bool | None:
        return config_of(f"{ROPE} {flags}", **GPU).kernels.bias_activation_fusion

    assert is_fused("--swiglu") and is_fused("--swiglu --disable-bias-linear") and is_fused("")
    assert not is_fused("--disable-bias-linear"), "the kernel of a GELU needs a bias"
    assert not is_fused("--swiglu --disable-bias-linear --no-bias-swiglu-fusion")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--recompute-activations --recompute-num-layers 1", "needs --recompute-granularity full"),
        (
            "--bf16 --fp8-format hybrid --recompute-activations --recompute-modules layernorm",
            "--fp8-recipe delayed excludes --recompute-modules layernorm",
        ),
    ],
)
def test_what_megatron_core_refuses_to_compute_again_is_said_at_the_start(
    flags: str, part: str
) -> None:
    with pytest.raises(UsageError, match=part):
        config_of(f"{ROPE} {flags}", **GPU)
    config_of(f"{ROPE} --recompute-num-layers 1", **GPU)


GPU = {"cuda_available": True, "transformer_engine_available": True, "apex_available": True}
LATENT = "--multi-latent-attention --kv-lora-rank 12 --qk-pos-emb-head-dim 4"


def test_eight_bits_reach_megatron_core() -> None:
    from megatron.trainer.model.gpt import core_config

    flags = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-history-len 1024"
    more = "--fp8-amax-compute-algo max --fp8-margin 1 --no-fp8-wgrad --first-last-layers-bf16"
    config = config_of(f"{flags} {more} --num-layers-at-end-in-bf16 2 --fp8-param-gather", **GPU)
    core = core_config(config)
    assert (core.fp8, core.fp8_recipe, core.fp8_margin) == ("hybrid", "tensorwise", 1)
    assert (core.fp8_amax_history_len, core.fp8_amax_compute_algo) == (1024, "max")
    assert (core.num_layers_at_start_in_bf16, core.num_layers_at_end_in_bf16) == (1, 2)
    assert core.first_last_layers_bf16 and not core.fp8_wgrad and not core.fp8_param
    notes = " ".join(config.runtime.notes)
    assert "nobody has run" in notes and "--fp8-param-gather: " in notes and "anew" not in notes
    assert "begins anew" in " ".join(config_of("--fp8-format e4m3", **GPU).runtime.notes)
    plain = config_of("--bf16 --fp8-recipe mxfp8", **GPU)
    assert core_config(plain).fp8 is None
    assert any("no effect of --fp8-recipe" in note for note in plain.runtime.notes)


@pytest.mark.parametrize(
    ("flags", "environment", "part"),
    [
        ("--fp8-format hybrid", {}, "use --bf16"),
        ("--fp8-format hybrid", {"cuda_available": True}, "use --bf16"),
        ("--fp8-format hybrid --transformer-impl local", GPU, "use --bf16"),
        ("--fp8-format e4m3 --fp8-recipe custom", GPU, "--fp8-recipe custom"),
        ("--fp8-param-gather", GPU, "--fp8-format"),
        ("--fp8-format e4m3 --first-last-layers-bf16", GPU, "--fp8-recipe delayed"),
        ("--fp8-format e4m3 --fp8-amax-history-len 0", GPU, "--fp8-amax-history-len 0"),
        (
            "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 "
            "--num-layers-at-start-in-bf16 5",
            GPU,
            "above the 4 layers",
        ),
    ],
)
def test_eight_bits_that_are_refused(flags: str, environment: dict, part: str) -> None:
    text = refusal(flags, **environment)
    assert part in text and names_a_way_on(text)


@pytest.mark.parametrize(
    ("flags", "world", "parts"),
    [
        ("--device cuda", 1, ["--device cuda", "GPU"]),
        ("--bf16 --fp16", 1, ["--bf16", "--fp16"]),
        ("--hidden-size 66", 1, ["--hidden-size 66", "--num-attention-heads 4"]),
        ("--seq-length 64", 1, ["--seq-length 64", "--max-position-embeddings 32"]),
        ("--tensor-model-parallel-size 2", 3, ["world size 3", "--tensor-model-parallel-size 2"]),
        ("--tensor-model-parallel-size 0", 1, ["--tensor-model-parallel-size 0"]),
        ("--pipeline-model-parallel-size 3", 3, ["--num-layers 4"]),
        ("--tensor-model-parallel-size 3", 3, ["--num-attention-heads 4"]),
        ("--global-batch-size 9", 2, ["--global-batch-size 9", "use 8 or 12"]),
        ("--micro-batch-size 0", 1, ["--micro-batch-size 0"]),
        ("--tokenizer-type NullTokenizer --vocab-size 0", 1, ["--vocab-size"]),
        ("--train-samples 100", 1, ["--train-iters and --train-samples"]),
        ("--lr-decay-samples 100", 1, ["--lr-decay-samples 100", "--train-iters"]),
        ("--lr-warmup-iters 100", 1, ["warm-up of 200", "decay of 200"]),
        ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", 1, ["--lr-warmup-fraction"]),
        ("--lr-decay-style WSD", 1, ["--lr-wsd-decay-iters"]),
        ("--min-lr 1", 1, ["--min-lr 1.0", "--lr 0.001"]),
        ("--overlap-param-gather", 1, ["--use-distributed-optimizer"]),
        ("--recompute-granularity full", 1, ["--recompute-method"]),
        ("--recompute-method uniform", 1, ["--recompute-granularity full"]),
        ("--recompute-granularity selective --recompute-modules moe", 1, ["moe"]),
        ("--data-path x", 1, ["--data-path", "--mock-data"]),
        ("--exit-signal SIGFOO", 1, ["--exit-signal SIGFOO"]),
        ("--hidden-dropout 1.5", 1, ["--hidden-dropout 1.5"]),
        ("--no-position-embedding", 1, ["--position-embedding-type"]),
        ("--save-interval 4 --save-retain-interval 6", 1, ["--save-retain-interval 6"]),
        (
            "--pad-vocab-for-tensor-parallel-size 1 --make-vocab-size-divisible-by 1 "
            "--tensor-model-parallel-size 2",
            2,
            ["--pad-vocab"],
        ),
        ("--padded-vocab-size 257 --tensor-model-parallel-size 2", 2, ["--padded-vocab-size 257"]),
        (
            "--padded-vocab-size 512 --pad-vocab-for-tensor-parallel-size 2",
            1,
            ["--padded-vocab-size", "--pad-vocab-for-tensor-parallel-size"],
        ),
        ("--rampup-batch-size 2 2 10", 1, ["--global-batch-size"]),
        ("--global-batch-size 16 --rampup-batch-size 2 2 10", 2, ["--global-batch-size 2 is"]),
    ],
)
def test_problems_name_flag_and_values(flags: str, world: int, parts: list[str]) -> None:
    text = refusal(flags, world)
    for part in parts:
        assert part in text
    assert all(line.strip() == line and names_a_way_on(line) for line in text.split("\n"))


def test_problems_of_one_stage_come_together() -> None:
    text = refusal("--tensor-model-parallel-size 3 --ffn-hidden-size 100", 3)
    assert len(text.split("\n")) == 3


def test_no_data() -> None:
    with pytest.raises(UsageError, match="--data-path"):
        resolve(parse_args(SMALL.replace("--mock-data", "").split()), 1)


@given(st.integers(1, 10**6), st.integers(1, 256), st.lists(st.integers(1, 16), max_size=4))
def test_padded_vocabulary(rows: int, divisible_by: int, sizes: list[int]) -> None:
    unit = padding_unit(divisible_by, sizes)
    padded = pad_vocab_size(rows, unit)
    assert rows <= padded < rows + unit
    assert all(padded % n == 0 for n in [divisible_by, *sizes])
    if all(divisible_by % n == 0 for n in sizes):
        assert padded == pad_vocab_size(rows, divisible_by), "as without tensor parallelism"
    as_theirs = padding_unit(divisible_by, sizes, padded_for=8)
    assert as_theirs == 8 * divisible_by


def settled(flags: str, vocab_size: int, sizes: tuple[int, ...] = (), world: int = 1) -> Config:
    return merge_resume_config(
        config_of(flags, world), None, vocab_size=vocab_size, tensor_parallel_sizes=sizes
    )


@given(st.integers(1, 10**6))
def test_the_padded_vocabulary_does_not_depend_on_the_layout(vocab_size: int) -> None:
    rows = {
        settled(f"--tensor-model-parallel-size {tp}", vocab_size, world=8).model.padded_vocab_size
        for tp in (1, 2, 4)
    }
    assert len(rows) == 1
    assert 0 <= rows.pop() - vocab_size < 128


@pytest.mark.parametrize(
    ("flags", "sizes", "rows"),
    [
        ("", (), 384),
        ("", (1, 2, 3, 6), 384),
        ("", (5,), 640),
        ("--make-vocab-size-divisible-by 1 --tensor-model-parallel-size 4", (), 260),
        ("--pad-vocab-for-tensor-parallel-size 4", (), 512),
        ("--pad-vocab-for-tensor-parallel-size 1 --tensor-model-parallel-size 2", (), 384),
        ("--padded-vocab-size 260 --tensor-model-parallel-size 2", (), 260),
    ],
)
def test_rows_of_257_tokens(flags: str, sizes: tuple[int, ...], rows: int) -> None:
    assert settled(flags, 257, sizes, world=4).model.padded_vocab_size == rows


def test_a_padded_vocabulary_without_room_for_all_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="256 is less than the 257 tokens"):
        settled("--padded-vocab-size 256", 257)


def test_the_line_of_the_vocabulary_names_the_rows_of_megatron_lm_where_they_differ() -> None:
    def line(flags: str) -> str:
        return vocabulary_line(settled(flags, 257, world=2), None, vocab_size=257)

    assert line("") == "vocabulary: 257 tokens, padded to 384 rows"
    assert "--padded-vocab-size 512" in line("--tensor-model-parallel-size 2")
    assert "--padded-vocab-size" not in line("--padded-vocab-size 384")


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer sgd",
        "--position-embedding-type mrope",
        "--transformer-impl inference_optimized",
        "--ckpt-format fsdp_dtensor",
        "--fp8-recipe custom",
        "--dataloader-type cyclic",
    ],
)
def test_values_that_are_not_supported(flags: str) -> None:
    text = refusal(flags)
    assert flags in text
    assert "use " in text and names_a_way_on(text)


ROPE = "--position-embedding-type rope"


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        ("", 1, {"rope_type": "rope", "mtp_num_layers": None}),
        (LATENT, 1, {"rope_type": "yarn", "sequence_parallel": False}),
        (f"{LATENT} --tensor-model-parallel-size 2", 2, {"sequence_parallel": True}),
        (f"{LATENT} --attention-backend unfused", 1, {"attention_backend": "auto"}),
        ("--attention-backend unfused", 1, {"attention_backend": "unfused"}),
        ("--mtp-num-layers 0", 1, {"mtp_num_layers": None}),
        ("--quick-geglu", 1, {"ffn_hidden_size": 256, "bias_activation_fusion": False}),
        ("--decoupled-lr 1e-4 --min-lr 1e-5", 1, {"decoupled_lr": 1e-4, "decoupled_min_lr": None}),
        (
            f"{ROPE} --mtp-num-layers 1 --untie-embeddings-and-output-weights "
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|tmL",
            2,
            {"layers_of_chunks": [3, 1]},
        ),
    ],
)
def test_derived_values_of_further_models(flags: str, world: int, expected: dict) -> None:
    flat = config_of(flags, world).flat()
    assert {name: flat[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "world", "part"),
    [
        ("--qk-layernorm --qk-l2-norm", 1, "--qk-l2-norm exclude each other"),
        ("--softmax-type learnable", 1, "--softmax-type learnable is refused"),
        ("--swiglu --quick-geglu", 1, "--quick-geglu exclude each other"),
        ("--glu-linear-offset 1", 1, "--glu-linear-offset 1.0 goes with --quick-geglu"),
        ("--swiglu --activation-func-clamp-value 7", 1, "goes with --quick-geglu"),
        ("--quick-geglu --activation-func-clamp-value 0", 1, "must be above 0"),
        ("--rope-type yarn", 1, "needs --multi-latent-attention"),
        (f"{LATENT} --group-query-attention", 1, "excludes --group-query-attention"),
        (f"{LATENT} --qk-l2-norm", 1, "excludes --qk-l2-norm"),
        (f"{LATENT} {ROPE} --use-rope-scaling", 1, "excludes --use-rope-scaling"),
        (f"{LATENT} --softmax-type off-by-one", 1, "excludes --softmax-type"),
        (f"{LATENT} --qk-pos-emb-head-dim 3", 1, "--qk-pos-emb-head-dim 3 must be even"),
        (f"{LATENT} --rotary-scaling-factor 0", 1, "--rotary-scaling-factor 0.0"),
        (
            f"{LATENT} --tensor-model-parallel-size 2 --q-lora-rank 15",
            2,
            "--q-lora-rank 15 is not divisible by 2",
        ),
        (
            f"{LATENT} --tensor-model-parallel-size 2 --kv-lora-rank 13",
            2,
            "--kv-lora-rank + --qk-pos-emb-head-dim 17 is not divisible by 2",
        ),
        ("--rotary-interleaved", 1, "needs --position-embedding-type rope"),
        (f"{ROPE} --no-rope-freq 3", 1, "--num-layers 4 is not divisible by --no-rope-freq 3"),
        ("--mtp-num-layers 1", 1, "--position-embedding-type learned_absolute"),
        (f"{ROPE} --mtp-num-layers 1 --no-rope-freq 2", 1, "excludes --no-rope-freq"),
        (
            f"{ROPE} --mtp-num-layers 1 --pipeline-model-parallel-size 2",
            2,
            "needs --untie-embeddings-and-output-weights",
        ),
        (
            f"{ROPE} --mtp-num-layers 1 --allow-uneven-micro-batches",
            1,
            "give --calculate-per-token-loss",
        ),
        (
            f"{ROPE} --mtp-num-layers 1 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 2",
            1,
            "needs --recompute-num-layers 1",
        ),
        (
            f"{ROPE} --mtp-num-layers 1 --untie-embeddings-and-output-weights "
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL",
            2,
            "as --mtp-num-layers says, 1",
        ),
        ("--decoupled-min-lr 1e-4", 1, "--decoupled-min-lr needs --decoupled-lr"),
        ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-3", 1, "--decoupled-lr 0.0001 is below"),
        ("--decoupled-lr -1", 1, "--decoupled-lr -1.0 must not be negative"),
        (
            "--pipeline-model-parallel-size 4 --global-batch-size 8 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3 --num-layers 8 "
            "--num-virtual-stages-per-pipeline-rank 2",
            4,
            "--microbatch-group-size-per-virtual-pipeline-stage 3 is below",
        ),
    ],
)
def test_flags_of_further_models_that_do_not_go_together(flags: str, world: int, part: str) -> None:
    assert part in refusal(flags, world)


def test_several_distributed_optimizers_are_one() -> None:
    notes = config_of("--num-distributed-optimizer-instances 2", 2).runtime.notes
    assert any("one optimizer spans all data-parallel ranks" in note for note in notes)
