"""Asks megatron-core itself, on two ranks, for what the planner rejects by rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def refused(action: Callable[[], Any]) -> str:
    """The reason, or nothing."""
    try:
        action()
    except (ValueError, AssertionError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


def main(output: Path) -> Any:
    """Returns what was refused, and what a legal neighbour of it gave."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_with_interleaving,
    )
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
    from megatron.core.transformer import transformer_config

    from megatron.trainer.common.device import use_device

    build: Any = transformer_config.TransformerConfig
    shape = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}

    class Chunk(torch.nn.Module):
        model_type = ModelType.encoder_or_decoder

        def __init__(self) -> None:
            super().__init__()
            self.config = build(
                **shape,
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=2,
                pipeline_dtype=torch.float32,
            )

        def set_input_tensor(self, tensor: Any) -> None:
            """Takes what a stage before would send."""

    class Reached(RuntimeError):
        """The schedule got as far as a forward step."""

    def step(*args: Any) -> Any:
        raise Reached("a forward step")

    def interleaved(count: int) -> None:
        chunks = [Chunk(), Chunk()]
        forward_backward_pipelining_with_interleaving(
            forward_step_func=step,
            data_iterator=[iter(()), iter(())],
            model=chunks,  # type: ignore[arg-type]
            num_microbatches=count,
            seq_length=8,
            micro_batch_size=1,
            forward_only=True,
        )

    def column(width: int) -> None:
        config = build(**shape, tensor_model_parallel_size=2, perform_initialization=False)
        ColumnParallelLinear(32, width, config=config, init_method=torch.nn.init.zeros_)

    def scatter(length: int) -> None:
        scatter_to_sequence_parallel_region(torch.ones(length, 1, 32))

    found = {}
    with use_device("cpu", local_rank=int(os.environ["LOCAL_RANK"])):
        parallel_state.initialize_model_parallel(2, 1)
        found["ffn 65"] = refused(lambda: column(65))
        found["ffn 64"] = refused(lambda: column(64))
        found["sequence 9"] = refused(lambda: scatter(9))
        found["sequence 8"] = refused(lambda: scatter(8))
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 2, 2)
        found["interleaved 3"] = refused(lambda: interleaved(3))
        if dist.get_rank() == 0:
            # The second rank would wait for a message that never comes.
            found["interleaved 4"] = refused(lambda: interleaved(4))
    return found
