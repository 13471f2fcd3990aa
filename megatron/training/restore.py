"""Finding, checking and loading a checkpoint, under whatever layout this job has."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.safe_globals import register_safe_globals

from megatron.training import checkpoint_files as files
from megatron.training.agree import everyone, first_problem, from_rank_zero
from megatron.training.checkpoint import TORCH_ERRORS, model_state, sharding_metadata
from megatron.training.config import Config
from megatron.training.errors import TrainingFailure, UsageError
from megatron.training.horizon import Horizon
from megatron.training.model import Model
from megatron.training.state import TrainState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a checkpoint says about its run, read before anything is built."""

    folder: Path
    """Folder of the iteration."""
    iteration: int
    """Iteration of the checkpoint."""
    state: TrainState
    """Counters of the run."""
    horizon: Horizon | None
    """Frozen horizons in samples; None in a checkpoint of another trainer."""
    arguments: dict[str, Any]
    """The resolved flags it was saved with."""
    metadata: dict[str, Any]
    """Format of the sharded tensors."""


def find(load: Path, *, step: int | None) -> int | None:
    """The iteration to load from `--load`: `--ckpt-step`, else the one the tracker names. None when
    there is none.

    Raises:
        TrainingFailure: the tracker is unreadable or names a checkpoint that is not there; the
        message offers the
            newest complete one.
    """
    complete = files.complete_iterations(load)
    try:
        wanted = step if step is not None else files.read_latest(load)
    except (ValueError, OSError) as error:
        raise TrainingFailure(f"{error}; {_offer(load, complete)}") from error
    if wanted is None:
        if complete:
            raise TrainingFailure(
                f"--load {load} has checkpoints but no {files.TRACKER}; {_offer(load, complete)}"
            )
        return None
    if wanted not in complete:
        folder = files.folder_of(load, wanted)
        state = "half-written (no metadata.json)" if folder.exists() else "missing"
        others = [i for i in complete if i != wanted]
        raise TrainingFailure(f"checkpoint {folder} is {state}; {_offer(load, others)}")
    return wanted


def _offer(load: Path, complete: list[int]) -> str:
    if not complete:
        return f"--load {load} holds no complete checkpoint"
    return f"load iteration {complete[-1]} instead with --ckpt-step {complete[-1]}"


def read_stored(load: Path, *, step: int | None, verify: bool) -> Stored | None:
    """Finds a checkpoint, checks its bytes (each rank its share) and reads what it says. Collective
    over the world.

    Args:
        load: `--load`.
        step: `--ckpt-step`.
        verify: compare checksums, not only sizes.

    Returns:
        What is stored, or None when the directory holds no checkpoint.

    Raises:
        TrainingFailure: on every rank, for a damaged checkpoint, naming the file and the checkpoint
        before it.
    """
    problem, iteration = None, None
    if dist.get_rank() == 0:
        try:
            iteration = find(load, step=step)
        except TrainingFailure as error:
            problem = str(error)
    problem, iteration = from_rank_zero((problem, iteration))
    if problem:
        raise TrainingFailure(problem)
    if iteration is None:
        return None
    folder = files.folder_of(load, iteration)
    found = files.damage(
        folder, rank=dist.get_rank(), world_size=dist.get_world_size(), contents=verify
    )
    damage = [line for lines in everyone(found) for line in lines]
    if damage:
        older = [i for i in files.complete_iterations(load) if i < iteration]
        raise TrainingFailure(f"checkpoint is damaged: {damage[0]}; {_offer(load, older)}")
    if dist.get_rank() == 0 and files.read_manifest(folder) is None:
        logger.warning("%s has no %s: its bytes are not verified", folder, files.MANIFEST)
    return _read_common(folder, iteration)


def read_arguments(load: Path, *, step: int | None) -> dict[str, Any]:
    """The resolved flags a checkpoint was saved with, for `--use-checkpoint-args`. Needs no process
    group.

    Raises:
        TrainingFailure: there is no checkpoint, or it cannot be read.
    """
    iteration = find(load, step=step)
    if iteration is None:
        raise TrainingFailure(
            f"--use-checkpoint-args needs a checkpoint, and --load {load} has none"
        )
    path = files.folder_of(load, iteration) / "common.pt"
    register_safe_globals()
    try:
        return vars(torch.load(path, map_location="cpu", weights_only=True)["args"])
    except Exception as error:  # torch and pickle raise many kinds; all mean an unreadable file
        raise TrainingFailure(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _read_common(folder: Path, iteration: int) -> Stored:
    register_safe_globals()
    problem, common = None, {}
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
    except Exception as error:  # torch and pickle raise many kinds; all mean an unreadable file
        problem = f"{folder / 'common.pt'} cannot be read: {type(error).__name__}: {error}"
    if problem := first_problem(problem):
        raise TrainingFailure(problem)
    arguments = vars(common.get("args", argparse.Namespace()))
    ours = common.get("copus")
    if ours:
        state = TrainState.from_json(ours["train_state"])
    else:
        consumed = int(arguments.get("consumed_train_samples", 0))
        state = TrainState(
            iteration=int(common.get("iteration", iteration)),
            consumed_samples=consumed,
            lr_samples=consumed,
            skipped_samples=int(arguments.get("skipped_train_samples", 0)),
        )
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    return Stored(
        folder=folder,
        iteration=iteration,
        state=state,
        horizon=Horizon.from_json(ours["horizon"]) if ours else None,
        arguments=arguments,
        metadata=metadata,
    )


# Fields in which a resumed run must agree with its checkpoint, with the flag that sets each.
_MUST_MATCH = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "position_embedding_type": "--position-embedding-type",
    "normalization": "--normalization",
    "swiglu": "--swiglu",
    "add_bias_linear": "--disable-bias-linear",
    "add_qkv_bias": "--add-qkv-bias",
    "qk_layernorm": "--qk-layernorm",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "max_position_embeddings": "--max-position-embeddings",
}
_MUST_MATCH_TO_CONTINUE = {
    "seq_length": "--seq-length",
    "seed": "--seed",
    "data_path": "--data-path",
    "split": "--split",
    "use_distributed_optimizer": "--use-distributed-optimizer",
}
_MUST_MATCH_WITHOUT_OVERRIDE = {
    "lr": "--lr",
    "min_lr": "--min-lr",
    "lr_decay_style": "--lr-decay-style",
    "start_weight_decay": "--start-weight-decay",
    "end_weight_decay": "--end-weight-decay",
}


def check_same_run(config: Config, stored: Stored) -> None:
    """Refuses flags that would make the checkpoint another model, or the continuation another run.

    Raises:
        UsageError: naming the flag, both values and the fix.
    """
    now = config.flat()
    required = dict(_MUST_MATCH)
    if not config.checkpoint.finetune:
        required |= _MUST_MATCH_TO_CONTINUE
    for name, flag in required.items():
        if name in stored.arguments and stored.arguments[name] != now[name]:
            raise UsageError(
                f"{flag} is {now[name]!r} but checkpoint {stored.folder} was trained with "
                f"{stored.arguments[name]!r}; give the same value"
                + ("" if name in _MUST_MATCH else ", or --finetune to start another run from it")
            )
    if config.checkpoint.finetune or config.optim.override_opt_param_scheduler:
        return
    for name, flag in _MUST_MATCH_WITHOUT_OVERRIDE.items():
        if name in stored.arguments and stored.arguments[name] != now[name]:
            raise UsageError(
                f"{flag} is {now[name]!r} but checkpoint {stored.folder} was trained with "
                f"{stored.arguments[name]!r}; give --override-opt-param-scheduler to use the new "
                "value, or --use-checkpoint-opt-param-scheduler to keep the old one"
            )


def adopt_schedule_arguments(stored: Stored) -> dict[str, Any]:
    """The learning-rate settings as stored, for `--use-checkpoint-opt-param-scheduler`."""
    return {n: stored.arguments[n] for n in _MUST_MATCH_WITHOUT_OVERRIDE if n in stored.arguments}


def load_weights(
    stored: Stored,
    config: Config,
    model: Model,
    optimizer: MegatronOptimizer,
    groups: ProcessGroupCollection,
) -> None:
    """Loads weights and, unless asked not to, the optimizer. Collective over the world.

    Raises:
        TrainingFailure: on every rank, when keys do not match or a file cannot be read.
    """
    with_optimizer = not (config.checkpoint.no_load_optim or config.checkpoint.finetune)
    kind = stored.metadata.get("distrib_optim_sharding_type")
    if with_optimizer and config.parallel.use_distributed_optimizer and kind != "fully_reshardable":
        raise TrainingFailure(
            f"the optimizer in {stored.folder} is stored as {kind}, which cannot change layout; "
            "save it with --dist-ckpt-optim-fully-reshardable, or start from the weights with "
            "--no-load-optim"
        )
    metadata = {**sharding_metadata(config, groups), **stored.metadata}
    sharded = model_state(model, metadata)
    if with_optimizer:
        with _without_warnings("megatron.core.optimizer.distrib_optimizer"):
            sharded["optimizer"] = optimizer.sharded_state_dict(
                dict(sharded), is_loading=True, metadata=metadata
            )
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
    if with_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
    else:
        optimizer.reload_model_params()


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
