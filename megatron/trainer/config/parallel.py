"""How the work is spread over ranks, and what is recomputed to save memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.trainer.config.fields import derived, option


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout and the communication that goes with it."""

    tensor_model_parallel_size: int = option(1)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = option(1)
    """Ranks that share the stack of layers."""
    context_parallel_size: int = option(1)
    """Ranks that share the tokens of each sample."""
    cp_comm_type: tuple[str, ...] = option(("p2p",), nargs="+")
    """How ranks that share a sample exchange keys and values: p2p, all_gather, a2a or a2a+p2p.
    Without Transformer Engine p2p and a2a+p2p become all_gather, with a note."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = option(None, nargs="+")
    """Inner and outer size of --cp-comm-type a2a+p2p. Their product is --context-parallel-size."""
    expert_model_parallel_size: int = option(1)
    """Groups of ranks that each hold other experts of a layer."""
    expert_tensor_parallel_size: int | None = option(None)
    """Ranks that share each expert. Default: --tensor-model-parallel-size."""
    num_layers_per_virtual_pipeline_stage: int | None = option(None)
    """Layers of one model chunk of an interleaved pipeline."""
    num_virtual_stages_per_pipeline_rank: int | None = option(None)
    """Model chunks of each rank of an interleaved pipeline."""
    microbatch_group_size_per_vp_stage: int | None = option(
        None, "--microbatch-group-size-per-virtual-pipeline-stage"
    )
    """Micro-batches in a row for one chunk of an interleaved pipeline, where their number allows
    it. Default: the pipeline size. Changes the schedule alone."""
    pipeline_model_parallel_layout: str | None = option(None)
    """Layers of every pipeline stage or chunk, such as `Ett|(ttt|)*2tL`. E is the embedding, t a
    layer, m a layer of --mtp-num-layers, L the head. Default: equal shares."""
    decoder_first_pipeline_num_layers: int | None = option(None)
    """Layers of the first pipeline stage. The others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = option(None)
    """Layers of the last pipeline stage. The others share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = option(False)
    """Count the embedding as a layer when the stages share out the layers."""
    account_for_loss_in_pipeline_split: bool = option(False)
    """Count the loss as a layer when the stages share out the layers."""
    sequence_parallel: bool = option(False)
    """Split activations over the sequence between tensor-parallel regions. Off at tensor parallel
    size 1."""
    use_distributed_optimizer: bool = option(False)
    """Shard master weights and moments over the data-parallel ranks."""
    overlap_grad_reduce: bool = option(False)
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = option(False)
    """Gather weights while the forward pass goes on. Needs the two flags above."""
    ddp_bucket_size: int | None = option(None)
    """Elements of one gradient bucket. Default: chosen by megatron-core."""
    num_distributed_optimizer_instances: int = option(1)
    """Accepted. One distributed optimizer spans all data-parallel ranks and gives the same
    numbers."""
    ddp_average_in_collective: bool = option(False)
    """Average gradients inside the collective instead of scaling them before it."""
    overlap_p2p_comm: bool = option(True, "--no-overlap-p2p-communication")
    """Overlap messages between pipeline stages with computation, in an interleaved pipeline."""
    distributed_backend: str = option(None, choices=("nccl", "gloo"))
    """Communication library. Default: nccl on CUDA, gloo on CPU."""
    distributed_timeout_minutes: int = option(10)
    """Minutes after which a collective fails."""
    use_tp_pp_dp_mapping: bool = option(False)
    """Number ranks with pipeline before data parallelism."""
    enable_gloo_process_groups: bool = option(True, "--disable-gloo-process-groups")
    """Create gloo groups beside those of the backend."""
    world_size: int = derived(None)
    """Number of ranks."""
    data_parallel_size: int = derived(None)
    """Replicas that read other samples: ranks / (tensor x context x pipeline parallel size)."""
    virtual_pipeline_model_parallel_size: int = derived(None)
    """Model chunks of each pipeline rank; 1 means no interleaving."""
    layers_of_chunks: tuple[int, ...] | None = derived(None)
    """Layers of every model chunk in the order of the model; None: as many for each."""

    @property
    def cp_exchange(self) -> tuple[str, list[int] | None]:
        """`--cp-comm-type`, with the sizes of its two levels if it has some. Under a layout of
        another context parallel size than theirs it is p2p, which gives the same numbers."""
        word, sizes = self.cp_comm_type[0], self.hierarchical_context_parallel_sizes
        if word != "a2a+p2p":
            return word, None
        if sizes is None or math.prod(sizes) != self.context_parallel_size:
            return "p2p", None
        return word, list(sizes)


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activations that are computed again in the backward pass instead of being kept."""

    recompute_activations: bool = option(False)
    """Older spelling of --recompute-granularity selective."""
    recompute_granularity: str | None = option(None, choices=("full", "selective"))
    """Recompute whole layers, or selected modules. Default: nothing."""
    recompute_method: str | None = option(None, choices=("uniform", "block"))
    """With full granularity: chunks of equal size, or the first layers of each stage."""
    recompute_num_layers: int | None = option(None)
    """With full granularity: layers of a chunk (uniform), or recomputed layers of each stage
    (block)."""
    recompute_modules: tuple[str, ...] = option(None, nargs="+")
    """With selective granularity: the modules to recompute. Default: core_attn."""
