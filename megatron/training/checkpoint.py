"""Distributed checkpoints that load under any layout, committed so that a kill leaves the previous
one latest.

Format: megatron-core's `torch_dist`, the optimizer always `fully_reshardable`, whose stored tensors
are global and know nothing of the layout. `common.pt` also holds what stock Megatron-LM looks for.
No random state is stored: the streams are functions of the seed and the samples consumed
(parallel.py).
"""

from __future__ import annotations

import argparse
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from megatron.training import agreed_save
from megatron.training import checkpoint_files as files
from megatron.training.agree import everyone, first_problem, from_rank_zero
from megatron.training.config import Config
from megatron.training.errors import TrainingFailure
from megatron.training.horizon import Horizon
from megatron.training.model import Model
from megatron.training.optimizer_state import sharded_optimizer_state
from megatron.training.signals import shielded_children
from megatron.training.state import TrainState

logger = logging.getLogger(__name__)

RNG_POLICY = "seed+consumed_samples"
# torch's own is no Exception.
TORCH_ERRORS = (Exception, CheckpointException)
_SPACE_MARGIN = 1.2


def sharding_metadata(config: Config, groups: ProcessGroupCollection) -> dict[str, Any]:
    """What megatron-core's sharded state dicts need to know about the format and this layout."""
    efficient = config.checkpoint.distrib_optim_fully_reshardable_mem_efficient
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": efficient,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.dp_cp,
    }


def model_state(model: Model, metadata: dict[str, Any]) -> dict[str, Any]:
    """Sharded state of the chunks, under the keys megatron-core's optimizer expects."""
    # The data-parallel wrapper adds a prefix on saving that it does not strip on loading: ask the
    # inner module.
    chunks = [chunk.module.sharded_state_dict(metadata=metadata) for chunk in model.chunks]  # pyright: ignore[reportCallIssue]
    if len(chunks) == 1:
        return {"model": chunks[0]}
    return {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def common_state(config: Config, state: TrainState, scheduler: Any) -> dict[str, Any]:
    """The part of a checkpoint that is the same on every rank."""
    arguments = argparse.Namespace(
        **config.flat(),
        iteration=state.iteration,
        consumed_train_samples=state.consumed_samples,
        consumed_valid_samples=0,
        skipped_train_samples=state.skipped_samples,
    )
    return {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": state.iteration,
        "num_floating_point_operations_so_far": state.floating_point_operations,
        "opt_param_scheduler": scheduler.state_dict(),
        "copus": {
            "version": 1,
            "train_state": state.to_json(),
            "horizon": Horizon.of(config).to_json(),
            "layout": config.layout.to_json(),
            "rng_policy": RNG_POLICY,
        },
    }


class Checkpointer:
    """Saves checkpoints of one layout into `--save`; `close` it before the layout goes.

    Every method is collective over the world unless it says otherwise.

    Args:
        config: resolved configuration with `checkpoint.save` set.
        groups: process groups of the layout.
        on_event: called on every rank with (`begin` | `commit` | `failed`, iteration, fields);
            fields hold `consumed_samples` of the saved state when it is begun or committed.
    """

    def __init__(
        self,
        config: Config,
        groups: ProcessGroupCollection,
        on_event: Callable[[str, int, dict[str, Any]], None],
    ) -> None:
        assert config.checkpoint.save is not None
        self.config = config
        self.root = Path(config.checkpoint.save)
        self.groups = groups
        self.on_event = on_event
        self.queue = AsyncCallsQueue()
        agreed_save.register()
        self.pending: list[tuple[int, int, float]] = []
        # The first save starts a helper process that imports torch again; pay for that beside the
        # first steps.
        self.warm_up = threading.Thread(target=_start_writer_helper, daemon=True)
        self.warm_up.start()

    def save(
        self, model: Model, optimizer: MegatronOptimizer, scheduler: Any, state: TrainState
    ) -> None:
        """Writes a checkpoint of the state after `state.iteration`; with `--async-save` returns
        while it is written.

        Raises:
            TrainingFailure: on every rank, when any rank could not write; the previous checkpoint
            stays latest.
        """
        self.finish()
        self.warm_up.join()
        started = time.monotonic()
        iteration = state.iteration
        self.on_event("begin", iteration, {"consumed_samples": state.consumed_samples})
        folder = files.folder_of(self.root, iteration)
        self._raise_if(self._prepare(iteration, model), iteration)
        request, problem = None, None
        try:
            for chunk in model.chunks:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)
            metadata = sharding_metadata(self.config, self.groups)
            sharded = model_state(model, metadata)
            if not self.config.checkpoint.no_save_optim:
                sharded["optimizer"] = sharded_optimizer_state(
                    optimizer, model, self.groups, model_state=dict(sharded), metadata=metadata
                )
            metadata.pop("dp_cp_group")
            request = dist_checkpointing.save(
                {**sharded, **common_state(self.config, state, scheduler)},
                str(folder),
                self._strategy(),
                async_sharded_save=True,
                content_metadata=metadata,
            )
            assert request is not None
            agreed_save.finish_in_step(request)
            if not self.config.checkpoint.async_save:
                request.execute_sync()
        except TORCH_ERRORS as error:  # any failure must end in one line on every rank
            logger.debug("saving failed", exc_info=True)
            problem = _root_cause(error)
        self._raise_if(first_problem(problem), iteration)
        if request is None or not self.config.checkpoint.async_save:
            self._commit(iteration, state.consumed_samples, started)
            return
        self.queue.schedule_async_request(request)
        self.pending.append((iteration, state.consumed_samples, started))

    def poll(self) -> None:
        """Commits asynchronous saves that have finished; costs nothing when none is under way."""
        if self.pending:
            self._finalize(blocking=False)

    def finish(self) -> None:
        """Waits for the save under way and commits it."""
        if self.pending:
            self._finalize(blocking=True)

    def close(self) -> None:
        """Finishes saves and lets go of the process groups."""
        self.finish()
        self.queue.close()

    def _finalize(self, *, blocking: bool) -> None:
        iteration = self.pending[0][0]
        done = []
        try:
            done = self.queue.maybe_finalize_async_calls(blocking=blocking)
        except TORCH_ERRORS as error:  # raised on every rank, but only rank 0's says what happened
            logger.debug("saving failed", exc_info=True)
            self._raise_if(first_problem(_root_cause(error)), iteration)
        for _ in done:
            self._commit(*self.pending.pop(0))

    def _strategy(self) -> Any:
        strategy: Any = get_default_save_sharded_strategy("torch_dist")
        if self.config.checkpoint.ckpt_fully_parallel_save:
            strategy = FullyParallelSaveStrategyWrapper(strategy, self.groups.dp_cp)
        return strategy

    def _prepare(self, iteration: int, model: Model) -> str | None:
        """Makes an empty folder, if the file system has room. Returns the problem, on every
        rank."""
        needed = self._expected_bytes(model)
        problem = None
        if dist.get_rank() == 0:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                free = shutil.disk_usage(self.root).free
                if free < _SPACE_MARGIN * needed:
                    problem = (
                        f"{free / 1e6:.0f} MB are free and about {needed / 1e6:.0f} MB are needed"
                    )
                else:
                    files.begin(self.root, iteration)
            except (OSError, ValueError) as error:
                problem = _root_cause(error)
        return from_rank_zero(problem)

    def _expected_bytes(self, model: Model) -> int:
        """Bytes of a checkpoint: fp32 master and two moments, and the weights, of one copy of the
        model."""
        own = sum(
            p.numel() * (p.element_size() + (0 if self.config.checkpoint.no_save_optim else 12))
            for chunk in model.chunks
            for p in chunk.parameters()
        )
        total = torch.tensor([own], dtype=torch.float64, device=torch.cuda.current_device())
        dist.all_reduce(total, group=self.groups.mp)
        return int(total.item())

    def _commit(self, iteration: int, consumed_samples: int, started: float) -> None:
        """Checksums by all ranks, then manifest, then the tracker, then the tidying up."""
        folder = files.folder_of(self.root, iteration)
        problem, sums = None, {}
        try:
            names = from_rank_zero(files.data_files(folder) if dist.get_rank() == 0 else None)
            mine = files.share(names, dist.get_rank(), dist.get_world_size())
            sums = files.checksums(folder, mine)
        except OSError as error:
            problem = _root_cause(error)
        gathered = everyone((problem, sums))
        problem = next((p for p, _ in gathered if p), None)
        if problem is None and dist.get_rank() == 0:
            try:
                merged = {name: value for _, part in gathered for name, value in part.items()}
                files.finish(self.root, iteration, merged)
            except OSError as error:
                problem = _root_cause(error)
        self._raise_if(from_rank_zero(problem), iteration)
        if dist.get_rank() == 0:
            files.retire(
                self.root,
                newest=iteration,
                retain_interval=self.config.checkpoint.save_retain_interval,
            )
        size = sum(size for _, part in gathered for size, _ in part.values())
        fields = {
            "consumed_samples": consumed_samples,
            "seconds": time.monotonic() - started,
            "bytes": size,
        }
        self.on_event("commit", iteration, fields)

    def _raise_if(self, problem: str | None, iteration: int) -> None:
        if problem is None:
            return
        self.pending.clear()
        self.on_event("failed", iteration, {"reason": problem})
        if dist.get_rank() == 0:
            files.discard(self.root, iteration)
        try:
            latest = files.read_latest(self.root)
        except (OSError, ValueError):
            latest = None
        left = f"the last complete checkpoint is iteration {latest}" if latest else "none is saved"
        raise TrainingFailure(
            f"saving iteration {iteration} to --save {self.root} failed: {problem}; {left}; "
            f"{_way_out(problem)}start again with --load"
        )


def _way_out(problem: str) -> str:
    """What to do before the next try, where the file system is to blame."""
    is_storage = any(word in problem for word in ("Errno", " are free ", "disk full"))
    return "make room or name another --save and " if is_storage else ""


def _start_writer_helper() -> None:
    with shielded_children():
        filesystem_async._get_write_results_queue()


def _root_cause(error: BaseException) -> str:
    """One line about the first error of a chain, which is the one worth showing."""
    while error.__cause__ is not None:
        error = error.__cause__
    nested = getattr(error, "failures", None)
    if isinstance(nested, dict) and nested:
        first = next(iter(nested.values()))
        error = first[0] if isinstance(first, tuple) else first
    text = " ".join(str(error).split())
    if "unexpected pos" in text:
        text = (
            "a file could not be written to its end; is the disk full, or a quota or limit reached?"
        )
    return f"{type(error).__name__}: {text[:300]}"
