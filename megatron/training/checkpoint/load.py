"""Loading weights and optimizer of a checkpoint, under whatever layout this job has."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.training.checkpoint.resume import Stored
from megatron.training.checkpoint.save import TORCH_ERRORS, model_state, sharding_metadata
from megatron.training.common.collectives import first_problem
from megatron.training.common.errors import TrainingFailure
from megatron.training.config import Config
from megatron.training.model.gpt import Model
from megatron.training.optim.optimizer import mark_decoupled

logger = logging.getLogger(__name__)


def load_weights(
    stored: Stored,
    config: Config,
    model: Model,
    optimizer: MegatronOptimizer | None,
    groups: ProcessGroupCollection,
) -> None:
    """Loads weights and, unless there is none or asked not to, the optimizer. Collective over the
    world.

    Raises:
        TrainingFailure: on every rank, when keys do not match or a file cannot be read.
    """
    weights_only = config.checkpoint.no_load_optim or config.checkpoint.finetune
    with_optimizer = optimizer is not None and not weights_only
    kind = stored.metadata.get("distrib_optim_sharding_type")
    if with_optimizer and config.parallel.use_distributed_optimizer and kind != "fully_reshardable":
        raise TrainingFailure(
            f"the optimizer in {stored.folder} is stored as {kind}, which cannot change layout; "
            "save it with --dist-ckpt-optim-fully-reshardable, or start from the weights with "
            "--no-load-optim"
        )
    metadata = {**sharding_metadata(config, groups), **stored.metadata}
    sharded = {key: _tensors(chunk) for key, chunk in model_state(model, metadata).items()}
    if with_optimizer:
        assert optimizer is not None
        with _without_warnings("megatron.core.optimizer.distrib_optimizer"):
            sharded["optimizer"] = optimizer.sharded_state_dict(
                dict(sharded), is_loading=True, metadata=metadata
            )
    assert not any(isinstance(value, ShardedObject) for value in nested_values(sharded))
    strategy: Any = get_default_load_sharded_strategy(str(stored.folder))
    strategy = FullyParallelLoadStrategyWrapper(strategy, groups.dp_cp)
    problem: str | None = None
    loaded: Any = {}
    try:
        loaded, missing, unexpected = dist_checkpointing.load(
            sharded, str(stored.folder), strategy, strict="return_all"
        )
        problem = _mismatch(set(missing), set(unexpected), with_optimizer)
    except TORCH_ERRORS as error:
        logger.debug("loading failed", exc_info=True)
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if problem := first_problem(problem):
        raise TrainingFailure(f"checkpoint {stored.folder} does not load: {problem}")
    left: list[str] = []
    for i, chunk in enumerate(model.unwrapped):
        key = "model" if len(model.chunks) == 1 else f"model{i}"
        keys = chunk.load_state_dict(loaded[key], strict=False)
        left += [k for k in (*keys.missing_keys, *keys.unexpected_keys) if _matters(k)]
    if problem := first_problem(f"{left[0]} does not fit this model" if left else None):
        raise TrainingFailure(f"checkpoint {stored.folder} does not load: {problem}")
    if optimizer is None:
        return
    if with_optimizer:
        mark_decoupled(_groups_in(loaded["optimizer"]))
        optimizer.load_state_dict(loaded["optimizer"])
    else:
        optimizer.reload_model_params()


def _groups_in(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The parameter groups of an optimizer's state, whatever wraps it."""
    for key, value in state.items():
        if key == "param_groups":
            yield from value
        elif isinstance(value, dict):
            yield from _groups_in(value)


def _tensors(chunk: dict[str, Any]) -> dict[str, Any]:
    """What is asked for of a chunk: all but stored objects, which torch would unpickle whatever is
    in them. They hold the scales of 8-bit products, which every launch begins anew."""
    return {key: value for key, value in chunk.items() if not isinstance(value, ShardedObject)}


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Hides warnings of padding between buckets: what is read is cut by global places, and the
    empty tensors that it complains of are filled (docs/decisions/015)."""
    chatty = logging.getLogger(name)
    before = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        yield
    finally:
        chatty.setLevel(before)


def _mismatch(missing: set[str], unexpected: set[str], with_optimizer: bool) -> str | None:
    """Says which keys stand in the way.

    Args:
        missing: keys of the checkpoint that the model does not ask for.
        unexpected: keys that the model asks for and the checkpoint lacks.
        with_optimizer: whether the optimizer was asked for.
    """
    unexpected, missing = set(filter(_matters, unexpected)), set(filter(_matters, missing))
    if not with_optimizer:
        missing = {k for k in missing if not k.startswith("optimizer.")}
    if unexpected:
        return f"it lacks {len(unexpected)} tensors of this model, the first is {min(unexpected)}"
    if missing:
        return f"it holds {len(missing)} tensors unknown to this model, the first is {min(missing)}"
    return None


def _matters(key: str) -> bool:
    """Whether a missing key is an error: Transformer Engine's extra state holds FP8 scales only."""
    return "_extra_state" not in key
