"""Derived defaults: from the flags as given to a configuration without open values, checked."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable

from megatron.trainer.common.extras import extras, extras_with
from megatron.trainer.config.batch_schedule import parse_steps
from megatron.trainer.config.draft import Draft, Environment, flag_of
from megatron.trainer.config.layer_partition import partition_of_flags, virtual_size
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import (
    layout_problems,
    recompute_problems,
)
from megatron.trainer.config.lengths import derive_horizon, derive_weight_decay
from megatron.trainer.config.model_flags import derive_features
from megatron.trainer.config.moe_flags import derive_moe, derive_moe_kernels, derive_moe_layout
from megatron.trainer.config.precision_flags import derive_eight_bits, derive_precision

# Field -> (supported values, why not the others and what to do).
_SUPPORTED: dict[str, tuple[tuple[str | None, ...], str]] = {
    "position_embedding_type": (
        ("learned_absolute", "rope", "none"),
        "it is not supported; use learned_absolute, rope or none",
    ),
    "transformer_impl": (
        ("local", "transformer_engine"),
        "it cannot train; use local or transformer_engine",
    ),
    "ckpt_format": (
        ("torch", "torch_dist", "torch_dcp"),
        "it is a format of FSDP; use --ckpt-format torch_dist",
    ),
    "fp8_recipe": (
        ("tensorwise", "delayed", "mxfp8", "blockwise"),
        "it needs a program of its own; use tensorwise, delayed, mxfp8 or blockwise",
    ),
    "dataloader_type": (
        (None, "single"),
        "its sample order depends on the layout; use --dataloader-type single",
    ),
}
_AT_LEAST_ONE = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_query_groups",
    "max_position_embeddings",
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "no_rope_freq",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "make_vocab_size_divisible_by",
    "pad_vocab_for_tensor_parallel_size",
    "padded_vocab_size",
    "vocab_size",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "train_samples",
    "eval_interval",
    "eval_global_batch_size",
    "exit_interval",
    "exit_duration_in_mins",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "ddp_bucket_size",
    "num_distributed_optimizer_instances",
    "distributed_timeout_minutes",
    "recompute_num_layers",
    "logits_chunks",
    "save_interval",
    "save_retain_interval",
    "log_interval",
    "tensorboard_log_interval",
    "tensorboard_queue_size",
    "hysteresis",
    "fp8_amax_history_len",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_balance_samples",
]
_NOT_NEGATIVE = [
    "num_experts",
    "lr",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_init",
    "min_lr",
    "decoupled_lr",
    "decoupled_min_lr",
    "weight_decay",
    "clip_grad",
    "eval_iters",
    "num_workers",
    "manual_gc_interval",
    "init_method_std",
    "embedding_init_method_std",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "ckpt_step",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "moe_router_bias_update_rate",
    "moe_z_loss_coeff",
]
_CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_APEX_FUSIONS = ("masked_softmax_fusion", "gradient_accumulation_fusion")
_CPU_FUSIONS = (
    *_APEX_FUSIONS,
    "bias_gelu_fusion",
    "bias_swiglu_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "cross_entropy_loss_fusion",
)


def derive(draft: Draft, environment: Environment) -> None:
    """Fills in every open value of a draft; stops after the first stage that finds problems.

    Raises:
        UsageError: one line per problem of that stage.
    """
    stages: tuple[Callable[[Draft, Environment], None], ...] = (
        _check_values,
        _derive_optimizer,
        _derive_device,
        _derive_model,
        _derive_layout,
        derive_horizon,
        derive_precision,
        derive_eight_bits,
        _derive_kernels,
        *(check for _, check in extras_with("check")),
        _derive_recompute,
        _derive_rest,
    )
    for stage in stages:
        stage(draft, environment)
        draft.stop_if_problems()


def fill_in(draft: Draft) -> None:
    """Fills in what follows from flags alone, whatever the machine and the layout, as `derive`
    does. Raises for no flags that a launch would refuse: the draft notes the problems."""
    anywhere = Environment(world_size=1, cuda=False, transformer_engine=False, apex=False)
    _derive_model(draft, anywhere)
    derive_weight_decay(draft)
    _derive_rest(draft, anywhere)


def _derive_optimizer(draft: Draft, environment: Environment) -> None:
    given = draft["optimizer"]
    known = ["adam", *(name for extra in extras() for name in extra.optimizers)]
    draft.require(
        given in known,
        f"--optimizer {given} is refused: it is not supported; use {' or '.join(known)}",
    )
    draft["optimizer"] = name = given.removeprefix("dist_")
    if name == "adam":
        return
    whole = f"--optimizer {given} keeps its whole state on every replica"
    if draft["use_distributed_optimizer"]:
        draft.notes.append(
            f"{whole}: the numbers are the same, it takes more memory, and "
            "--use-distributed-optimizer has no effect"
        )
    elif given != name:
        draft.notes.append(f"{whole}, as --optimizer {name} does, with the same numbers")
    if draft["use_distributed_optimizer"] or given != name:
        draft["use_distributed_optimizer"] = draft["overlap_param_gather"] = False


def _check_values(draft: Draft, environment: Environment) -> None:
    for name, (allowed, reason) in _SUPPORTED.items():
        draft.require(draft[name] in allowed, f"{flag_of(name)} {draft[name]} is refused: {reason}")
    for name in _AT_LEAST_ONE:
        value = draft[name]
        draft.require(value is None or value >= 1, f"{flag_of(name)} {value} must be at least 1")
    for name in _NOT_NEGATIVE:
        value = draft[name]
        draft.require(value is None or value >= 0, f"{flag_of(name)} {value} must not be negative")
    for name in ("attention_dropout", "hidden_dropout", "adam_beta1", "adam_beta2"):
        value = draft[name]
        draft.require(0 <= value < 1, f"{flag_of(name)} {value} must be at least 0 and below 1")
    for first, second in (
        ("bf16", "fp16"),
        ("swiglu", "squared_relu"),
        ("swiglu", "quick_geglu"),
        ("squared_relu", "quick_geglu"),
    ):
        both = draft[first] and draft[second]
        draft.require(
            not both, f"{flag_of(first)} and {flag_of(second)} exclude each other; drop one"
        )
    percent = draft["rotary_percent"]
    draft.require(0 < percent <= 1, f"--rotary-percent {percent} must be above 0 and at most 1")
    try:
        signal.Signals[draft["exit_signal"]]
    except KeyError:
        draft.problem(f"--exit-signal {draft['exit_signal']} is no signal; use SIGTERM or SIGUSR1")


def _derive_device(draft: Draft, environment: Environment) -> None:
    draft.require(
        draft["device"] != "cuda" or environment.cuda,
        "--device cuda needs a GPU and this machine shows none; use --device auto or cpu",
    )
    if draft["device"] == "auto":
        draft["device"] = "cuda" if environment.cuda else "cpu"
    draft.require(
        draft["device"] == "cuda" or not (environment.transformer_engine or environment.apex),
        "--device cpu (or no GPU) does not go with Transformer Engine or apex, whose GPU kernels "
        "megatron-core then calls everywhere; use an environment without them",
    )
    if draft["device"] == "cpu" and draft["distributed_backend"] == "nccl":
        draft.notes.append("CPU run: --distributed-backend nccl becomes gloo")
        draft["distributed_backend"] = "gloo"
    draft.default("distributed_backend", "gloo" if draft["device"] == "cpu" else "nccl")
    if draft["device"] == "cpu" and draft["fp16"]:
        draft.notes.append(
            "CPU run: --fp16 is slow and meant for tests; --bf16 needs no loss scale"
        )
    if draft["transformer_impl"] == "transformer_engine" and not environment.transformer_engine:
        draft["transformer_impl"] = "local"
        why = "CPU run" if draft["device"] == "cpu" else "Transformer Engine is not installed"
        draft.notes.append(f"{why}: --transformer-impl transformer_engine becomes local")


def _derive_model(draft: Draft, environment: Environment) -> None:
    hidden, heads = draft["hidden_size"], draft["num_attention_heads"]
    if draft["use_rotary_position_embeddings"]:
        draft["position_embedding_type"] = "rope"
    draft.require(
        draft["add_position_embedding"] or draft["position_embedding_type"] != "learned_absolute",
        "--no-position-embedding needs another --position-embedding-type; add rope or none",
    )
    draft.default(
        "ffn_hidden_size", int(hidden * 8 / 3 / 64) * 64 if draft["swiglu"] else 4 * hidden
    )
    draft.require(
        draft["ffn_hidden_size"] >= 1,
        f"--hidden-size {hidden} is too small to derive the SwiGLU width; give --ffn-hidden-size",
    )
    draft.require(
        draft["kv_channels"] is not None or hidden % heads == 0,
        f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; change one of "
        "them or give --kv-channels",
    )
    draft.default("kv_channels", hidden // heads)
    if not draft["group_query_attention"]:
        if draft["num_query_groups"] not in (1, heads):
            draft.notes.append(
                f"--num-query-groups {draft['num_query_groups']} has no effect without "
                "--group-query-attention"
            )
        draft["num_query_groups"] = heads
    # megatron-core adds the bias of these projections for either flag.
    draft["add_qkv_bias"] = draft["add_qkv_bias"] or draft["add_bias_linear"]
    groups = draft["num_query_groups"]
    draft.require(
        heads % groups == 0,
        f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}; change "
        "one",
    )
    seq, positions = draft["seq_length"], draft["max_position_embeddings"]
    draft.require(
        seq <= positions,
        f"--seq-length {seq} is longer than --max-position-embeddings {positions}; raise the "
        "latter",
    )
    derive_features(draft)
    derive_moe(draft)


def _derive_layout(draft: Draft, environment: Environment) -> None:
    tp, pp = draft["tensor_model_parallel_size"], draft["pipeline_model_parallel_size"]
    further = {
        "cp": draft["context_parallel_size"],
        "ep": draft["expert_model_parallel_size"],
        "etp": draft["expert_tensor_parallel_size"],
    }
    virtual = virtual_size(draft, pp)
    layout = Layout.from_world(environment.world_size, tp, pp, virtual, **further)
    layout = dataclasses.replace(layout, layer_partition=partition_of_flags(draft, layout))
    draft["world_size"] = layout.world_size
    draft["data_parallel_size"] = layout.dp
    draft["virtual_pipeline_model_parallel_size"] = layout.vpp
    draft["layers_of_chunks"] = layout.layer_partition
    derive_moe_layout(draft, layout)
    _derive_sequence_parallel(draft, tp)
    draft.require(
        draft["overlap_p2p_comm"] or layout.vpp == 1 or pp > 2,
        "--no-overlap-p2p-communication swaps messages in a virtual pipeline over 2 ranks; drop "
        "the flag",
    )
    draft["overlap_p2p_comm"] = draft["overlap_p2p_comm"] and layout.vpp > 1
    padded_for, rows = draft["pad_vocab_for_tensor_parallel_size"], draft["padded_vocab_size"]
    draft.require(
        "pad_vocab_for_tensor_parallel_size" not in draft.explicit
        or draft["make_vocab_size_divisible_by"] * padded_for % tp == 0,
        f"--pad-vocab-for-tensor-parallel-size {padded_for} gives rows that do not divide by "
        f"--tensor-model-parallel-size {tp}; make it a multiple of {tp}",
    )
    draft.require(
        "padded_vocab_size" not in draft.explicit or rows % tp == 0,
        f"--padded-vocab-size {rows} does not divide by --tensor-model-parallel-size {tp}; round "
        "it up",
    )
    draft.require(
        not {"padded_vocab_size", "pad_vocab_for_tensor_parallel_size"} <= draft.explicit,
        "--padded-vocab-size and --pad-vocab-for-tensor-parallel-size exclude each other; drop one",
    )
    draft.problems += layout_problems(
        layout,
        draft.values,
        seq_length=draft["seq_length"],
        sequence_parallel=draft["sequence_parallel"],
        knows_vocabulary=False,
    )
    steps = draft["step_batch_size_schedule"]
    if steps is not None:
        draft.default("global_batch_size", parse_steps(steps, draft["seq_length"])[-1][1])
    draft.require(
        draft["rampup_batch_size"] is None or draft["global_batch_size"] is not None,
        "--rampup-batch-size needs --global-batch-size, the size it grows to; give it",
    )
    draft.default("global_batch_size", draft["micro_batch_size"] * layout.dp)
    draft.stop_if_problems()
    group = draft["microbatch_group_size_per_vp_stage"]
    draft.require(
        group is None or layout.vpp == 1 or group >= pp,
        f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below "
        f"--pipeline-model-parallel-size {pp}; raise it",
    )
    draft.require(
        not draft["overlap_param_gather"]
        or (draft["use_distributed_optimizer"] and draft["overlap_grad_reduce"]),
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add "
        "them",
    )
    draft.require(
        not (draft["ddp_average_in_collective"] and draft["calculate_per_token_loss"]),
        "--ddp-average-in-collective and --calculate-per-token-loss exclude each other; drop one",
    )


def _derive_sequence_parallel(draft: Draft, tp: int) -> None:
    # Without it megatron-core adds up gradients of the compressed parts that are whole, or leaves
    # apart what belongs together. With experts it refuses to train.
    for name in ("multi_latent_attention", "num_experts"):
        if draft[name] and tp > 1 and not draft["sequence_parallel"]:
            draft.notes.append(f"{flag_of(name)} under tensor parallelism: --sequence-parallel")
            draft["sequence_parallel"] = True
    draft["sequence_parallel"] = draft["sequence_parallel"] and tp > 1


def _derive_context_parallel(draft: Draft, layout: Layout) -> None:
    words, sizes = draft["cp_comm_type"], draft["hierarchical_context_parallel_sizes"]
    if len(set(words)) > 1:
        # megatron-core 0.16.1 looks one layer too far in the list.
        draft.problem("--cp-comm-type takes one word for all layers; give one")
    word = words[0]
    draft.require(
        word in _CP_COMM_TYPES,
        f"--cp-comm-type {word} does not exist; use one of {', '.join(_CP_COMM_TYPES)}",
    )
    is_hierarchical = word == "a2a+p2p"
    draft.require(
        sizes is None or math.prod(sizes) == layout.cp,
        f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes or ()))} must multiply to "
        f"--context-parallel-size {layout.cp}; change one",
    )
    draft.require(
        not is_hierarchical or layout.cp == 1 or len(sizes or ()) == 2,
        "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes; give two sizes",
    )
    if draft["transformer_impl"] == "local" and word in ("p2p", "a2a+p2p"):
        if layout.cp > 1:
            draft.notes.append(
                f"--cp-comm-type {word}: without Transformer Engine it becomes all_gather, which "
                "gives the same numbers"
            )
        word = "all_gather"
    draft["cp_comm_type"] = (word,)


def _layout_of(draft: Draft) -> Layout:
    return Layout.of_arguments(draft.values)


def _derive_kernels(draft: Draft, environment: Environment) -> None:
    cpu = draft["device"] == "cpu"
    engine = environment.transformer_engine
    if cpu:
        off = _CPU_FUSIONS
    else:
        off = () if environment.apex else _APEX_FUSIONS
        off += () if environment.apex or engine else ("apply_rope_fusion",)
    was_on = [name for name in off if draft[name]]
    for name in was_on:
        draft[name] = False
    if was_on:
        why = "CPU run" if cpu else "NVIDIA's apex is not installed"
        draft.notes.append(f"{why}: off are {', '.join(was_on)}")
    _derive_context_parallel(draft, _layout_of(draft))
    if not engine and draft["cross_entropy_fusion_impl"] == "te":
        draft["cross_entropy_fusion_impl"] = "native"
    if cpu or not environment.apex:
        draft["no_persist_layer_norm"] = True
    if draft["use_flash_attn"]:
        draft["attention_backend"] = "flash"
    if draft["apply_query_key_layer_scaling"]:
        draft["attention_softmax_in_fp32"] = True
    plain_latent = draft["multi_latent_attention"] and draft["rope_type"] == "rope"
    if draft["position_embedding_type"] != "rope" or draft["rotary_interleaved"] or plain_latent:
        draft["apply_rope_fusion"] = False
    activation = "bias_swiglu_fusion" if draft["swiglu"] else "bias_gelu_fusion"
    is_known = not (draft["squared_relu"] or draft["quick_geglu"])
    # Of a gated SiLU the kernel takes no bias as well; of a GELU it needs one.
    takes_it = draft["swiglu"] or draft["add_bias_linear"]
    draft["bias_activation_fusion"] = draft[activation] and takes_it and is_known
    derive_moe_kernels(draft, environment)
    backend, local = draft["attention_backend"], draft["transformer_impl"] == "local"
    if draft["multi_latent_attention"] and local and backend in ("unfused", "local"):
        draft.notes.append(
            f"--multi-latent-attention: --attention-backend {backend} becomes auto, since "
            "megatron-core's own attention knows one width of heads only"
        )
        draft["attention_backend"] = "auto"
    for name in ("use_flash_attn", "cross_entropy_loss_fusion"):
        draft.require(
            not (draft["deterministic_mode"] and draft[name]),
            f"--deterministic-mode excludes {flag_of(name)}; drop one",
        )


def _derive_recompute(draft: Draft, environment: Environment) -> None:
    if draft["recompute_activations"]:
        draft["recompute_granularity"] = "selective"
    granularity, method = draft["recompute_granularity"], draft["recompute_method"]
    if granularity == "full":
        draft.require(
            method is not None and draft["recompute_num_layers"] is not None,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; "
            "give both",
        )
    else:
        draft.require(
            method is None,
            f"--recompute-method {method} needs --recompute-granularity full; add it or drop the "
            "method",
        )
        draft.require(
            granularity is None or draft["recompute_num_layers"] is None,
            f"--recompute-num-layers {draft['recompute_num_layers']} needs "
            "--recompute-granularity full; add it or drop the number of layers",
        )
    if granularity == "full" and draft["recompute_num_layers"] is not None:
        draft.problems += recompute_problems(
            _layout_of(draft),
            num_layers=draft["num_layers"],
            method=method,
            recompute_num_layers=draft["recompute_num_layers"],
        )
    allowed = ("core_attn", "layernorm", "mlp")
    allowed += ("mla_up_proj",) if draft["multi_latent_attention"] else ()
    allowed += ("moe", "moe_act", "shared_experts") if draft["num_experts"] else ()
    given = draft["recompute_modules"]
    modules = ("core_attn",) if given is None else given
    draft["recompute_modules"] = modules if granularity == "selective" else ()
    bad = [name for name in draft["recompute_modules"] if name not in allowed]
    draft.require(
        not bad,
        f"--recompute-modules {' '.join(bad)} is not supported; choose from {', '.join(allowed)}",
    )
    delayed = draft["fp8"] and draft["fp8_recipe"] == "delayed"
    draft.require(
        not (delayed and {"layernorm", "moe_act"} & {*draft["recompute_modules"]}),
        "--fp8-recipe delayed excludes --recompute-modules layernorm and moe_act; drop them",
    )


def _derive_rest(draft: Draft, environment: Environment) -> None:
    per_split = [n for n in ("train_data_path", "valid_data_path", "test_data_path") if draft[n]]
    sources = bool(draft["data_path"]) + bool(per_split) + draft["mock_data"]
    draft.require(sources > 0, "no training data: give --data-path PREFIX, or --mock-data")
    draft.require(
        sources < 2, "--data-path, --train-data-path and --mock-data exclude each other; keep one"
    )
    draft.require(
        not (per_split and draft["split"]),
        "--split does not go with separate data paths; drop --split or use --data-path",
    )
    draft.require(
        not per_split or bool(draft["train_data_path"]) or draft["skip_train"],
        "separate data paths lack --train-data-path; give it",
    )
    if not per_split:
        draft.default("split", "969, 30, 1")
    if draft["ckpt_format"] != "torch_dist":
        draft.notes.append(
            f"--ckpt-format {draft['ckpt_format']}: checkpoints are saved and loaded as torch_dist"
        )
        draft["ckpt_format"] = "torch_dist"
    draft["dataloader_type"] = "single"
    draft.default("tokenizer_type", "GPT2BPETokenizer")
    if draft["device"] == "cpu" and "num_workers" not in draft.explicit:
        draft["num_workers"] = 0
    instances = draft["num_distributed_optimizer_instances"]
    if instances > 1:
        draft.notes.append(
            f"--num-distributed-optimizer-instances {instances}: one optimizer spans all "
            "data-parallel ranks and gives the same numbers"
        )
    every, keep = draft["save_interval"], draft["save_retain_interval"]
    draft.require(
        keep is None or (every is not None and 0 in (keep % every, every % keep)),
        f"--save-retain-interval {keep} must be a multiple of --save-interval {every} or divide "
        "it; change one",
    )
    draft.default("run_dir", draft["save"] or draft["tensorboard_dir"])
