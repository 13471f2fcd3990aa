"""Rotary positions of a model that is already built, under another base."""

from __future__ import annotations

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron.trainer.model.gpt import Model


def set_rotary_base(model: Model, rotary_base: int) -> None:
    """Gives every rotary table of a model the frequencies of another base, bit for bit those of a
    model that is built with it. Scaled tables (YaRN, `--use-rope-scaling`) must not be in it.
    """
    is_cpu = model.core_config.use_cpu_initialization
    for chunk in model.unwrapped:
        for module in chunk.modules():
            if type(module) is not RotaryEmbedding:
                continue
            fresh = RotaryEmbedding(
                kv_channels=2 * len(module.inv_freq),
                rotary_percent=1.0,
                rotary_base=rotary_base,
                use_cpu_initialization=is_cpu,
                cp_group=module.cp_group,  # pyright: ignore[reportArgumentType]
            )
            module.inv_freq = fresh.inv_freq.to(module.inv_freq.device)
    clear_rotary_tables()


def clear_rotary_tables() -> None:
    """Forgets the tables that megatron-core keeps by module and length: they know no base."""
    RotaryEmbedding.forward.cache_clear()
