"""Reads the shape of a model from Megatron's flags, parsed or resolved."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from copus_ext.cost_model.extras import planned_flags
from copus_ext.cost_model.model_spec import ATTENTION, EXPERT_FIELDS, ModelSpec
from copus_ext.cost_model.spec_file import SpecError
from megatron.trainer.config.model_shape import LatentShape
from megatron.trainer.config.vocabulary import padding_unit


def spec_of_flags(flags: list[str]) -> ModelSpec:
    """Reads the flags of a Megatron-LM command line.

    Raises:
        SpecError: a flag of the shape is missing.
        UsageError: an unknown or refused flag.
    """
    from megatron.trainer.config.arguments import parse_args

    return spec_of_arguments(parse_args(flags))


def spec_of_arguments(args: Any) -> ModelSpec:
    """Reads parsed flags, or anything with the same attributes. The padded vocabulary of a
    configuration that ran stands for the vocabulary under every tensor size.

    Raises:
        SpecError: a flag of the shape is missing.
        UsageError: a value of an extra that no launch takes.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(args, name) is None:
            raise SpecError(f"--{name.replace('_', '-')} is required in --megatron-args")
    learned = args.position_embedding_type == "learned_absolute"
    geglu, ffn = getattr(args, "quick_geglu", False), args.ffn_hidden_size
    if ffn is None and geglu:
        ffn = 4 * args.hidden_size
    elif ffn is None and args.swiglu:
        ffn = int(8 * args.hidden_size / 3 / 64) * 64
    latent = LatentShape.of(vars(args))
    # Once it is known a run holds its padded vocabulary under every tensor size.
    rows = getattr(args, "padded_vocab_size", None)
    padded_for = getattr(args, "pad_vocab_for_tensor_parallel_size", None)
    unit = padding_unit(args.make_vocab_size_divisible_by, (), padded_for=padded_for)
    extras = planned_flags(args)
    implementation = extras.pop("transformer_impl", args.transformer_impl)
    return ModelSpec(
        name="megatron-args",
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        seq_length=args.seq_length,
        ffn_hidden_size=ffn,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        vocab_size=rows or _vocab_size(args),
        make_vocab_size_divisible_by=1 if rows else unit,
        gated=args.swiglu or bool(geglu),
        bias=args.add_bias_linear,
        qkv_bias=bool(getattr(args, "add_qkv_bias", False)),
        qk_layernorm=bool(getattr(args, "qk_layernorm", False)),
        normalization=args.normalization,
        tied=not args.untie_embeddings_and_output_weights,
        mtp_num_layers=getattr(args, "mtp_num_layers", None) or 0,
        **_experts(args),
        **(asdict(latent) if latent is not None else {}),
        learned_positions=(args.max_position_embeddings or args.seq_length) if learned else 0,
        dropout=args.hidden_dropout > 0,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        gradient_bytes=_gradient_bytes(args),
        extras=extras,
        **ATTENTION[attention_of(args)],
        implementation="local" if implementation == "local" else "te",
        implementation_given=True,
    )


def _gradient_bytes(args: Any) -> int:
    """Bytes of a gradient element: Megatron keeps fp32 ones with bf16 unless told otherwise, and
    half ones with fp16."""
    if args.bf16:
        return 2 if args.grad_reduce_in_bf16 else 4
    return 2 if args.fp16 and not args.accumulate_allreduce_grads_in_fp32 else 4


def attention_of(args: Any) -> str:
    """A key of `ATTENTION`. Without a flash kernel megatron-core runs its fused softmax where that
    is on, and else torch's, in fp32 where a flag says so. (Past the lengths of the fused softmax
    the cost model takes fp32, too.)"""
    if args.attention_backend != "unfused":
        return "flash"
    scaled = getattr(args, "apply_query_key_layer_scaling", False)
    in_fp32 = getattr(args, "attention_softmax_in_fp32", False) or scaled
    return "torch" if in_fp32 and not getattr(args, "masked_softmax_fusion", True) else "unfused"


def _experts(args: Any) -> dict[str, Any]:
    """The fields of a mixture of experts; none of a dense model."""
    if not getattr(args, "num_experts", None):
        return {}
    names = (name for name in EXPERT_FIELDS if name != "moe_layer_freq")
    return {name: getattr(args, name) for name in names} | {
        "moe_layer_freq": str(args.moe_layer_freq)
    }


def _vocab_size(args: Any) -> int:
    """Tokens of the tokenizer that flags name, as far as they tell without its files."""
    from megatron.trainer.data.tokenizer import told_vocab_size

    told = told_vocab_size(getattr(args, "tokenizer_type", None), args.vocab_size)
    return told or ModelSpec.vocab_size
