"""Trains scaled-down commands of Megatron-LM's functional tests, one after the other."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from tests.helpers.jobs import run
from tests.helpers.scaled_commands import launches, read_commands, scaled


def write_text(folder: Path) -> None:
    """A GPT-2 style vocabulary of about 300 tokens, and a data set of a module made with it."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tokenizers.implementations import ByteLevelBPETokenizer

    folder.mkdir()
    page = argparse.__file__
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([page], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save_model(str(folder))
    end = tokenizer.token_to_id("<|endoftext|>")
    builder = IndexedDatasetBuilder(f"{folder / 'text_document'}.bin", dtype=numpy.int32)
    for paragraph in Path(page).read_text().split("\n\n"):
        ids = [*tokenizer.encode(paragraph).ids, end]
        builder.add_document(torch.tensor(ids, dtype=torch.int32), [len(ids)])
    builder.finalize(f"{folder / 'text_document'}.idx")


def watching(seen: dict[str, Any]) -> Any:
    """A callback that notes what a run is made of, on the rank it is on."""
    from megatron.core import parallel_state

    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Watch(Callback):
        """Looks once, before the first step."""

        def on_train_start(self, context: CallbackContext) -> None:
            p = parallel_state
            chunks = [chunk.module for chunk in context.model]
            seen.update(
                tp=p.get_tensor_model_parallel_world_size(),
                pp=p.get_pipeline_model_parallel_world_size(),
                dp=p.get_data_parallel_world_size(),
                vpp=len(chunks),
                dtype=str(next(chunks[0].parameters()).dtype),
                layout=str(context.config.layout),
                notes=list(context.config.runtime.notes),
            )

    return Watch()


def main(output: Path, *names: str) -> Any:
    import torch.distributed as dist

    world_size = dist.get_world_size()
    if dist.get_rank() == 0:
        write_text(output / "text")
    dist.barrier()
    commands = read_commands()
    record: dict[str, Any] = {}
    for name in names:
        folder = output / name.replace("/", ".")
        if dist.get_rank() == 0:
            folder.mkdir()
            (folder / "text").symlink_to(output / "text")
        dist.barrier()
        flags = scaled(name, commands[name], folder, world_size=world_size)
        seen: dict[str, Any] = {}
        for more in launches(name, world_size=world_size):
            for choice in ("FLASH", "FUSED", "UNFUSED"):
                # megatron-core notes the attention of a process there, and refuses another.
                os.environ.pop(f"NVTE_{choice}_ATTN", None)
            steps = run([*flags, *more], folder / "run", [watching(seen)], base="")
        everywhere: list[Any] = [None] * world_size
        dist.all_gather_object(everywhere, seen)
        record[name] = {
            **seen,
            "ranks": everywhere,
            "steps": [
                [s["iteration"], s["consumed_samples"], s["losses"]["lm loss"]] for s in steps
            ],
        }
    return record
