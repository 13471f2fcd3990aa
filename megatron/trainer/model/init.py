"""Initial weights that do not depend on the layout.

megatron-core draws weights from a stream per pipeline stage, so that another layout starts from
another model. Here every weight is drawn as a global tensor, with one stream per tensor and layer,
and each rank keeps its slice. So a seed gives the same model under any layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron.trainer.distributed.process_groups import random_seed_at

# Matrices that feed the residual stream are drawn smaller by 1/sqrt(2 x layers), as in GPT-2 and
# Megatron-LM.
_RESIDUAL_SUFFIXES = ("linear_proj.weight", "linear_fc2.weight")
_EMBEDDING_SUFFIXES = ("word_embeddings.weight", "position_embeddings.weight")
_PLAIN_SUFFIXES = (
    "linear_qkv.weight",
    "linear_q_proj.weight",
    "linear_q_down_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_down_proj.weight",
    "linear_kv_up_proj.weight",
    "linear_fc1.weight",
    "eh_proj.weight",
    "router.weight",
    "router.bias",
    "shared_experts.gate_weight",
    "output_layer.weight",
)


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """How the matrices of a model are drawn."""

    init_method_std: float
    """`--init-method-std`."""
    num_layers: int
    """Of the whole model."""
    embedding_std: float | None = None
    """`--embedding-init-method-std`; None: as the other matrices."""
    xavier_uniform: bool = False
    """Uniform with a bound that follows from the shape (Glorot and Bengio 2010), but for the
    embeddings if they have a deviation of their own."""

    def fill(self, full: torch.Tensor, key: str, generator: torch.Generator) -> None:
        """Draws one whole matrix, in place.

        Args:
            full: the global tensor of one layer.
        """
        is_apart = self.embedding_std not in (None, self.init_method_std)
        if self.xavier_uniform and not (is_apart and key.endswith(_EMBEDDING_SUFFIXES)):
            bound = math.sqrt(6.0 / sum(full.shape))
            full.uniform_(-bound, bound, generator=generator)
        else:
            std = self.std(key)
            assert std is not None, key
            full.normal_(0.0, std, generator=generator)

    def std(self, key: str) -> float | None:
        """Standard deviation of the initial normal distribution of one tensor; None for norms and
        biases.

        Raises:
            ValueError: for a matrix this module does not know.
        """
        if key.endswith(_RESIDUAL_SUFFIXES):
            return self.init_method_std / math.sqrt(2.0 * self.num_layers)
        if key.endswith(_EMBEDDING_SUFFIXES) and self.embedding_std is not None:
            return self.embedding_std
        if key.endswith(_EMBEDDING_SUFFIXES + _PLAIN_SUFFIXES):
            return self.init_method_std
        if "norm" in key or key.endswith("bias"):
            return None
        raise ValueError(f"no initial distribution is known for the tensor {key}")


def leave_uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    """An `init_method` for megatron-core that draws nothing; `draw_weights` fills the matrices."""
    return tensor


@torch.no_grad()
def draw_weights(
    chunk: Any, initial: InitialWeights, *, seed: int, metadata: dict | None = None
) -> None:
    """Fills the matrices of one model chunk with their slice of the layout-free initial model.

    Args:
        initial: how to draw.
        metadata: passed to `sharded_state_dict` (carries the data-parallel group).

    Raises:
        ValueError: a parameter that is not known here and would stay as memory was found.
    """
    state = {"model": chunk.sharded_state_dict(metadata=metadata)}
    named = {id(value.data) for value in nested_values(state) if hasattr(value, "data")}
    if lost := [name for name, param in chunk.named_parameters() if id(param) not in named]:
        raise ValueError(f"the parameter {lost[0]} has no global name to be drawn by")
    apply_factories(state)
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor) and shard.data is not None:
            _fill(shard, initial, seed)


def _fill(shard: ShardedTensor, initial: InitialWeights, seed: int) -> None:
    """Draws the part of the global tensor that this shard holds, in fp32 on its device.

    Leading axes that checkpoints prepend (the layer) select a stream; the others are drawn whole
    and sliced.
    """
    data = shard.data
    assert data is not None
    lead = shard.prepend_axis_num
    if initial.std(shard.key) is None:
        return
    generator = torch.Generator(device=data.device)
    generator.manual_seed(
        random_seed_at(seed, 0, "initial", shard.key, *shard.global_offset[:lead])
    )
    full = torch.empty(shard.global_shape[lead:], dtype=torch.float32, device=data.device)
    initial.fill(full, shard.key, generator)
    sizes = tuple(data.shape)
    for axis, (start, size) in enumerate(zip(shard.global_offset[lead:], sizes, strict=True)):
        full = full.narrow(axis, start, size)
    data.copy_(full)
