"""Initial weights that do not depend on the layout.

megatron-core draws weights from a stream per pipeline stage, so that another layout starts from
another model. Here every weight is drawn as the global tensor it is in a checkpoint, one stream per
tensor and layer, and each rank keeps its slice: the same seed gives the same model under any
tensor, pipeline and data parallelism.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron.training.parallel import random_seed_at

# Matrices that feed the residual stream are drawn smaller by 1/sqrt(2 x layers), as in GPT-2 and
# Megatron-LM.
_RESIDUAL_SUFFIXES = ("linear_proj.weight", "linear_fc2.weight")
_PLAIN_SUFFIXES = (
    "linear_qkv.weight",
    "linear_fc1.weight",
    "word_embeddings.weight",
    "position_embeddings.weight",
    "output_layer.weight",
)


def leave_uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    """An `init_method` for megatron-core that draws nothing; `draw_weights` fills the matrices."""
    return tensor


def weight_std(key: str, *, init_method_std: float, num_layers: int) -> float | None:
    """Standard deviation of the initial normal distribution of one tensor.

    Args:
        key: the tensor's key in a checkpoint.
        init_method_std: `--init-method-std`.
        num_layers: of the whole model.

    Returns:
        The deviation, or None for norms and biases, which keep their constants.

    Raises:
        ValueError: for a matrix this module does not know.
    """
    if key.endswith(_RESIDUAL_SUFFIXES):
        return init_method_std / math.sqrt(2.0 * num_layers)
    if key.endswith(_PLAIN_SUFFIXES):
        return init_method_std
    if "norm" in key or key.endswith("bias"):
        return None
    raise ValueError(f"no initial distribution is known for the tensor {key}")


@torch.no_grad()
def draw_weights(
    chunk: Any, *, seed: int, init_method_std: float, num_layers: int, metadata: dict | None = None
) -> None:
    """Fills the matrices of one model chunk with their slice of the layout-free initial model.

    Args:
        chunk: an unwrapped GPTModel.
        seed: `--seed`.
        init_method_std: `--init-method-std`.
        num_layers: of the whole model.
        metadata: passed to `sharded_state_dict` (carries the data-parallel group).
    """
    state = {"model": chunk.sharded_state_dict(metadata=metadata)}
    apply_factories(state)
    for shard in nested_values(state):
        if not isinstance(shard, ShardedTensor) or shard.data is None:
            continue
        std = weight_std(shard.key, init_method_std=init_method_std, num_layers=num_layers)
        if std is not None:
            shard.data.copy_(_global_slice(shard, seed, std))


def _global_slice(shard: ShardedTensor, seed: int, std: float) -> torch.Tensor:
    """The part of the global tensor that this shard holds, in fp32 on the shard's device.

    Leading axes that checkpoints prepend (the layer) select a stream; the others are drawn whole
    and sliced.
    """
    data = shard.data
    assert data is not None
    lead = shard.prepend_axis_num
    generator = torch.Generator(device=data.device)
    generator.manual_seed(
        random_seed_at(seed, 0, "initial", shard.key, *shard.global_offset[:lead])
    )
    full = torch.empty(shard.global_shape[lead:], dtype=torch.float32, device=data.device)
    full.normal_(0.0, std, generator=generator)
    sizes = tuple(data.shape)
    for axis, (start, size) in enumerate(zip(shard.global_offset[lead:], sizes, strict=True)):
        full = full.narrow(axis, start, size)
    return full
