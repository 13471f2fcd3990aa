"""What small checkpoints made without training hold, and what is done with them."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.safe_index import COMMON_KEY, METADATA, read_index
from megatron.trainer.config.lengths import TrainingLengths
from tests.helpers.of_extras import of_extra

FLAGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "kv_channels": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "max_position_embeddings": 32,
    "seq_length": 32,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 128,
    "vocab_size": 100,
    "tokenizer_type": "NullTokenizer",
    "pad_vocab_for_tensor_parallel_size": 2,
    "make_vocab_size_divisible_by": 64,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": 1,
    "data_parallel_size": 2,
    "consumed_train_samples": 40,
    "rotary_base": 10000,
}
MIXTURE: dict[str, Any] = {
    **FLAGS,
    "num_experts": 4,
    "moe_layer_freq": "1",
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": True,
}
"""The same with experts in place of the MLP."""
SHARED: dict[str, Any] = {
    **MIXTURE,
    "moe_layer_freq": "[0]*1+[1]*3",
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
}
"""A mixture whose first layer is dense, with a shared expert behind a gate."""
BIASED: dict[str, Any] = {
    **MIXTURE,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
"""A mixture with expert biases."""
ITERATION = 5
HORIZON = TrainingLengths(
    initial_global_batch_size=8,
    train_samples=80,
    lr_decay_samples=80,
    lr_warmup_samples=0,
    lr_wsd_decay_samples=None,
    eval_samples=0,
)


def make_checkpoint(root: Path, **how: Any) -> Path:
    """Writes a `--save` directory with one iteration; a test is skipped where the converter is
    absent. `tests.extras.convert.checkpoints.make_checkpoint` says what can be asked for."""
    return of_extra("tests.extras.convert.checkpoints").make_checkpoint(root, **how)


def index_of(pieces: list[Any], part_of_key: str) -> int:
    """Place of the first piece whose key ends so."""
    return next(i for i, piece in enumerate(pieces) if piece.key.endswith(part_of_key))


def renamed(piece: Any, key: str) -> Any:
    """The piece under another key."""
    return dataclasses.replace(piece, key=key)


def command(capsys: pytest.CaptureFixture[str], tool: Any, *args: Any) -> tuple[int, str, str]:
    """Runs a command in this process: exit code, output, errors."""
    code = tool.main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def common_file(folder: Path) -> Path:
    """The file of a checkpoint that holds its common state."""
    where = (read_index(folder / METADATA).storage_data or {}).get(COMMON_KEY)
    return folder / (files.COMMON if where is None else where.relative_path)


def edit_common(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Puts something in the place of the common state of a checkpoint, wherever its release keeps
    it. The manifest stays as it is."""
    index = read_index(folder / METADATA)
    places = index.storage_data or {}
    if (where := places.get(COMMON_KEY)) is None:
        stored = torch.load(folder / files.COMMON, weights_only=False)
        torch.save(change(stored), folder / files.COMMON)
        return
    data = (folder / where.relative_path).read_bytes()[where.offset : where.offset + where.length]
    (stored,) = torch.load(io.BytesIO(data), weights_only=False)
    changed = io.BytesIO()
    torch.save([change(stored)], changed)
    (folder / files.COMMON_FILE).write_bytes(changed.getvalue())
    places[COMMON_KEY] = dataclasses.replace(
        where, relative_path=files.COMMON_FILE, offset=0, length=len(changed.getvalue())
    )
    (folder / METADATA).write_bytes(pickle.dumps(index))
