"""Builds the GPT of a configuration on the process groups of a layout, wrapped for data
parallelism."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.trainer.common.core_version import since
from megatron.trainer.common.device import Device, use_plain_router
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import Config
from megatron.trainer.distributed.process_groups import seed_build
from megatron.trainer.distributed.stragglers import StepClock
from megatron.trainer.distributed.tied_embedding import exchanging_own_shard
from megatron.trainer.model.attention import LatentAttention, SdpaAttention
from megatron.trainer.model.chunked_logits import ChunkedLogitsGPT
from megatron.trainer.model.dropout import drop_by_position
from megatron.trainer.model.init import (
    InitialWeights,
    draw_weights,
    leave_uninitialised,
)
from megatron.trainer.model.moe import mark_experts, use_router
from megatron.trainer.model.norm import Norm
from megatron.trainer.model.norm_names import LATENT_NORMS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The chunks of the model that this rank holds."""

    chunks: list[Any]
    """One per virtual pipeline stage of this rank, in order."""
    core_config: TransformerConfig
    """megatron-core's configuration, shared by all chunks; carries the schedule's hooks."""
    clock: StepClock
    """Times this rank's part of a step."""

    @property
    def unwrapped(self) -> list[Any]:
        """The GPTModels inside the data-parallel and half-precision wrappers."""
        return [_unwrap(chunk) for chunk in self.chunks]

    def gather_ahead(self, *, forward_only: bool) -> None:
        """Starts to gather the weights that this rank needs first. Call it before each schedule.

        megatron-core begins when a chunk first computes. A later stage would wait for a message
        from the stage before, and only then gather. So the gathers of all stages would come one
        after the other. While an interleaved pipeline trains, the schedule itself calls
        `param_sync_func`. In a schedule of forward passes it does not, and all chunks start here.

        Args:
            forward_only: whether the schedule has no backward pass.
        """
        first = self.chunks[0]
        if not first.ddp_config.overlap_param_gather:
            return
        if len(self.chunks) == 1:
            # This bucket starts the next one itself.
            _gather(first, most=1)
        elif forward_only:
            for chunk in self.chunks:
                _gather(chunk)

    def before_reduction(self, act: Callable[[], None]) -> None:
        """Lets something run between a rank's last backward pass and the reduction of gradients.

        Args:
            act: called in every training step, after `StepClock` has ended the rank's own part.
        """
        reduce: Any = self.core_config.finalize_model_grads_func

        @functools.wraps(reduce.__wrapped__)
        def run(*args: Any, **kwargs: Any) -> Any:
            act()
            return reduce.__wrapped__(*args, **kwargs)

        self.core_config.finalize_model_grads_func = self.clock.stopped_by(run)

    def detach_hooks(self) -> None:
        """Cuts the references that would keep the model alive after its last user is gone
        (docs/decisions/001)."""
        for name in (
            "grad_scale_func",
            "finalize_model_grads_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
            "timers",
        ):
            setattr(self.core_config, name, None)
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                # Without the gather that it would begin with: others may not be here to take part.
                chunk.disable_forward_pre_hook(param_sync=False)
            # A ring through autograd's own objects, which a collection sees whole only once nothing
            # of a graph is left.
            chunk.grad_accs.clear()


def _unwrap(module: Any) -> Any:
    while hasattr(module, "module"):
        module = module.module
    return module


def _gather(chunk: Any, *_: Any, most: int | None = None) -> None:
    """Starts to gather the weights of a chunk, at most so many of its buckets. Those of its first
    layers come first, and are in the last bucket."""
    for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
        for group in groups[::-1][:most]:
            if not group.param_gather_dispatched:
                group.start_param_sync()


def parameter_dtype(config: Config) -> torch.dtype:
    """The dtype of the model's own parameters (masters are fp32)."""
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return names[config.precision.params_dtype]


def core_config(config: Config) -> TransformerConfig:
    """megatron-core's configuration: its fields that have one of the same name here, and the rest.

    Megatron-LM's `core_transformer_config_from_args` does the same.
    """
    kind = MLATransformerConfig if config.model.multi_latent_attention else TransformerConfig
    groups = [config.model, config.kernels, config.recompute]
    groups += [config.precision] if config.precision.fp8 is not None else []
    groups += [config.moe] if config.moe.num_experts is not None else []
    values = {**same_fields(kind, *groups), **_other_fields(config), **_parallelism(config)}
    values |= _expert_fields(config)
    return kind(**values)


def same_fields(kind: type, *groups: Any) -> dict[str, Any]:
    """The values of groups of our configuration that megatron-core's class has a field for."""
    names = {field.name for field in fields(kind)}
    return {
        field.name: getattr(group, field.name)
        for group in groups
        for field in fields(group)
        if field.name in names
    }


def _other_fields(config: Config) -> dict[str, Any]:
    m, modules = config.model, config.recompute.recompute_modules
    return {
        "gated_linear_unit": m.gated_linear_unit,
        "activation_func": _activation(config),
        "init_method": leave_uninitialised,
        "output_layer_init_method": leave_uninitialised,
        "embedding_init_method": leave_uninitialised,
        "attention_backend": AttnBackend[config.kernels.attention_backend],
        "persist_layer_norm": not config.kernels.no_persist_layer_norm,
        "recompute_modules": list(modules) if modules else None,
        "deterministic_mode": config.runtime.deterministic_mode,
        # Initial weights, checkpoints and changes of layout write into the parameters in place,
        # which numbers of 8 bits with a scale beside them do not allow.
        "fp8_param": False,
    }


def _expert_fields(config: Config) -> dict[str, Any]:
    moe = config.moe
    if moe.num_experts is None:
        return {}
    assert moe.moe_layers is not None
    kinds, weights = list(moe.moe_router_load_balancing_type), list(moe.moe_aux_loss_coeff)
    return {
        "num_moe_experts": moe.num_experts,
        # A number where all layers are alike: then a checkpoint has one tensor for all of them.
        "moe_layer_freq": 1 if all(moe.moe_layers) else list(moe.moe_layers),
        "moe_router_load_balancing_type": kinds if len(kinds) > 1 else kinds[0],
        "moe_aux_loss_coeff": weights if len(kinds) > 1 else weights[0],
        # Layers to compute again are named in `recompute_modules`.
        "moe_layer_recompute": False,
        "moe_token_dropping": moe.moe_expert_capacity_factor is not None,
    }


def _activation(config: Config) -> Any:
    m = config.model
    if m.swiglu:
        return F.silu
    if m.quick_geglu:
        return quick_gelu
    return squared_relu if m.squared_relu else F.gelu


def _parallelism(config: Config) -> dict[str, Any]:
    layout, dtype = config.layout, parameter_dtype(config)
    exchange, levels = config.parallel.cp_exchange
    on_cuda = config.runtime.device == "cuda"
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": _entries_of_chunks(config),
        "context_parallel_size": layout.cp,
        "cp_comm_type": exchange if layout.cp > 1 else None,
        "hierarchical_context_parallel_sizes": levels,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
        "sequence_parallel": config.parallel.sequence_parallel,
        "calculate_per_token_loss": config.batch.calculate_per_token_loss,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": config.precision.bf16,
        "fp16": config.precision.fp16,
        # Also on CPU: that way every rank would make whole matrices only to copy its part.
        "use_cpu_initialization": False,
        # Batched messages between the same two ranks are swapped when each holds several virtual
        # stages: the gradients are then wrong without an error.
        "overlap_p2p_comm": config.parallel.overlap_p2p_comm and layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        # gloo may still be sending the output whose memory this would free: wrong gradients
        # without an error.
        "deallocate_pipeline_outputs": on_cuda,
    }


def _entries_of_chunks(config: Config) -> list[list[str]] | None:
    """What every chunk runs, as megatron-core wants to be told; None where it is even."""
    cut = config.layout.layer_partition
    if cut is None:
        return None
    chunks = [["decoder"] * n for n in cut]
    chunks[0].insert(0, "embedding")
    chunks[-1] += ["mtp"] * (config.model.mtp_num_layers or 0) + ["loss"]
    return chunks


def layer_spec(config: Config, *, with_experts: bool = False) -> ModuleSpec:
    """The specification of a layer: Transformer Engine's, or the local one with our norm and
    attention; with experts in place of the MLP, or without."""
    spec = _plain_layer_spec(config, with_experts=with_experts)
    if with_experts:
        use_router(spec)
    return spec


def _plain_layer_spec(config: Config, *, with_experts: bool) -> ModuleSpec:
    m = config.model
    kinds: dict[str, Any] = {
        "num_experts": config.moe.num_experts if with_experts else None,
        "moe_grouped_gemm": config.moe.moe_grouped_gemm and with_experts,
        "qk_layernorm": m.qk_layernorm,
        "qk_l2_norm": m.qk_l2_norm,
        "multi_latent_attention": m.multi_latent_attention,
    }
    if config.kernels.transformer_impl == "transformer_engine":
        if m.multi_latent_attention and m.qk_layernorm and m.q_lora_rank is None and since("0.19"):
            raise UsageError(
                "megatron-core 0.19 puts a norm before queries that are not compressed, which "
                "earlier releases and the Hugging Face models do not have; give "
                "--transformer-impl local, or megatron-core 0.18 and below"
            )
        return get_gpt_layer_with_transformer_engine_spec(**kinds)
    spec = get_gpt_layer_local_spec(normalization=m.normalization, **kinds)
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    if m.multi_latent_attention:
        parts.self_attention.module = LatentAttention
        parts.sharded_state_dict_keys_map = LATENT_NORMS  # the local specification leaves it out
    if m.qk_layernorm:
        first, second = ("q", "kv") if m.multi_latent_attention else ("q", "k")
        for name in (f"{first}_layernorm", f"{second}_layernorm"):
            setattr(attention, name, Norm)
    if m.multi_latent_attention and m.q_lora_rank is None:
        attention.q_layernorm = IdentityOp  # newer releases refuse one that nothing uses
    is_plain = config.kernels.attention_backend in ("unfused", "local") and config.layout.cp == 1
    if not is_plain and m.softmax_type == "vanilla":
        attention.core_attention = ModuleSpec(module=SdpaAttention)
    return spec


def _block_spec(
    config: Config, core: TransformerConfig, *, pp_rank: int, vp_stage: int | None
) -> Any:
    """The layers of a chunk; for Transformer Engine their specification alone where all are
    alike."""
    is_local, pattern = config.kernels.transformer_impl == "local", config.moe.moe_layers
    if not is_local and (pattern is None or all(pattern)):
        return layer_spec(config, with_experts=pattern is not None)
    count = get_num_layers_to_build(core, vp_stage=vp_stage, pp_rank=pp_rank)
    first = get_transformer_layer_offset(core, vp_stage=vp_stage, pp_rank=pp_rank)
    own = pattern[first : first + count] if pattern else (0,) * count
    kinds = {kind: layer_spec(config, with_experts=bool(kind)) for kind in set(own)}
    norm: Any = Norm if is_local else TENorm
    return TransformerBlockSubmodules(layer_specs=[kinds[kind] for kind in own], layer_norm=norm)


def _mtp_spec(config: Config, core: TransformerConfig, *, vp_stage: int | None) -> Any:
    """The layers of `--mtp-num-layers`, on the last stage; else None."""
    if config.model.mtp_num_layers is None:
        return None
    is_local, pattern = config.kernels.transformer_impl == "local", config.moe.moe_layers
    spec = layer_spec(config, with_experts=bool(pattern and pattern[-1]))
    block: Any = get_gpt_mtp_block_spec(
        core, spec, use_transformer_engine=not is_local, vp_stage=vp_stage
    )
    for own in block.layer_specs if block is not None and is_local else ():
        own.submodules.enorm = own.submodules.hnorm = own.submodules.layer_norm = Norm
    return block


def build_model(
    config: Config, groups: ProcessGroupCollection, device: Device, *, draw: bool = True
) -> Model:
    """Builds, initialises and wraps this rank's part of the model. All ranks take part.

    Args:
        config: resolved configuration, its layout that of `groups`.
        device: where the parameters go.
        draw: whether to draw the initial weights; False where others follow at once.

    Returns:
        The model with initial weights that do not depend on the layout.
    """
    seed_build(config.runtime.seed)
    core = core_config(config)
    stages = range(config.layout.vpp) if config.layout.vpp > 1 else (None,)
    bare = [_build_chunk(config, core, groups, device, stage, draw) for stage in stages]
    # The trainer moves expert biases, after a step that updated the weights (`model/moe.py`).
    core.moe_router_enable_expert_bias = False
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.precision.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        # Then no bucket starts the next one.
        align_param_gather=config.parallel.overlap_param_gather and len(bare) > 1,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        bucket_size=config.parallel.ddp_bucket_size,
        average_in_collective=config.parallel.ddp_average_in_collective,
        # Steps with a gradient that is not finite are skipped and counted instead (optimizer.py).
        check_for_nan_in_grad=False,
    )
    chunks = [
        DistributedDataParallel(
            core, ddp_config, chunk, disable_bucketing=i > 0, pg_collection=groups
        )
        for i, chunk in enumerate(bare)
    ]
    clock = StepClock(is_cuda=device.is_cuda)
    finalize = finalize_model_grads
    if config.parallel.use_distributed_optimizer:
        finalize = exchanging_own_shard(finalize, chunks, groups)
    core.finalize_model_grads_func = clock.stopped_by(finalize)
    if config.parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        core.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]  # pyright: ignore[reportAttributeAccessIssue]
    if ddp_config.align_param_gather:
        core.param_sync_func = [functools.partial(_gather, chunk) for chunk in chunks]  # pyright: ignore[reportAttributeAccessIssue]
    return Model(
        chunks=chunks,
        core_config=core,
        clock=clock,
    )


def build_for_inference(config: Config, groups: ProcessGroupCollection, device: Device) -> Model:
    """Builds a model for inference: without gradients, and without values until a checkpoint is
    loaded.

    Args:
        config: resolved configuration; its layout has no virtual stages.
        device: where the parameters go.
    """
    seed_build(config.runtime.seed)
    core = core_config(config)
    chunk = _build_chunk(config, core, groups, device, None, False)
    chunk.requires_grad_(False).eval()
    return Model(chunks=[chunk], core_config=core, clock=StepClock(is_cuda=device.is_cuda))


def _build_chunk(
    config: Config,
    core: TransformerConfig,
    groups: ProcessGroupCollection,
    device: Device,
    vp_stage: int | None,
    draw: bool,
) -> torch.nn.Module:
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    m = config.model
    use_plain_router()
    chunk = ChunkedLogitsGPT(
        core,
        _block_spec(config, core, pp_rank=groups.pp.rank(), vp_stage=vp_stage),
        vocab_size=m.padded_vocab_size,
        max_sequence_length=m.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=not m.untie_embeddings_and_output_weights,
        position_embedding_type=m.position_embedding_type,  # pyright: ignore[reportArgumentType]
        rotary_percent=m.rotary_percent,
        rotary_base=m.rotary_base,
        rope_scaling=m.use_rope_scaling,
        rope_scaling_factor=m.rope_scaling_factor,
        seq_len_interpolation_factor=m.rotary_seq_len_interpolation_factor,
        mtp_block_spec=_mtp_spec(config, core, vp_stage=vp_stage),
        vp_stage=vp_stage,
        pg_collection=groups,
    )
    chunk.logits_chunks = config.kernels.logits_chunks
    # Activations split over the sequence are drawn for from a stream that each rank has for itself.
    if config.layout.cp > 1 and not config.parallel.sequence_parallel:
        drop_by_position(chunk, groups.cp)
    if chunk.mtp_process:
        # megatron-core forgets this of the copy on the last stage.
        words: Any = chunk.embedding.word_embeddings.weight
        words.is_embedding_or_output_parameter = True
    mark_experts(chunk)
    for param in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    if device.is_cuda:
        chunk.cuda(device.torch_device)
    if draw:
        initial = InitialWeights(
            init_method_std=m.init_method_std,
            num_layers=m.num_layers,
            embedding_std=m.embedding_init_method_std,
            xavier_uniform=m.init_method_xavier_uniform,
        )
        metadata = {"dp_cp_group": groups.dp_cp}
        draw_weights(chunk, initial, seed=config.runtime.seed, metadata=metadata)
    elif config.parallel.use_distributed_optimizer:
        _let_go_of_values(chunk)
    half = config.precision.bf16 or config.precision.fp16
    return Float16Module(core, chunk) if half else chunk


def _let_go_of_values(chunk: torch.nn.Module) -> None:
    """Frees the memory of parameters. The data-parallel wrapper places each in a buffer, and would
    otherwise copy uninitialised values there."""
    for param in chunk.parameters():
        if type(param.data) is torch.Tensor and param.requires_grad:
            no_strides = [0] * param.dim()
            param.data = torch.empty_strided(
                param.shape, no_strides, dtype=param.dtype, device=param.device
            )
