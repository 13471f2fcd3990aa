"""Saves checkpoints that load under any layout. A kill at any time leaves the previous one latest.

The format is megatron-core's `torch_dist` with a `fully_reshardable` optimizer: stored tensors are
global and independent of the layout. `common.pt` also holds what stock Megatron-LM looks for. No
random state is stored, as it follows from the seed and the consumed samples (`seed_step`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.save_errors import (
    FailedSaves,
    begin_request,
    root_cause,
    use_own_writer,
    way_out,
    what_is_left,
)
from megatron.trainer.checkpoint.save_write import SaveWrite
from megatron.trainer.checkpoint.writer_process import writer_process
from megatron.trainer.common.collectives import (
    all_gather_object,
    broadcast_from_rank0,
    first_problem,
)
from megatron.trainer.common.errors import TrainingFailure
from megatron.trainer.common.file_limits import answer_of, refuse_while_stuck, stall_s
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config import Config
from megatron.trainer.config.lengths import TrainingLengths
from megatron.trainer.model.gpt import Model
from megatron.trainer.optim.optimizer_state import sharded_optimizer_state

logger = logging.getLogger(__name__)

RNG_POLICY = "seed+consumed_samples"
# `CheckpointException` is no `Exception`.
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
    chunks = [chunk.sharded_state_dict(metadata=metadata) for chunk in model.unwrapped]
    if len(chunks) == 1:
        return {"model": chunks[0]}
    return {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def common_state(
    config: Config, state: TrainState, scheduler: Any, data: list[dict[str, Any]]
) -> dict[str, Any]:
    """The part of a checkpoint that is the same on every rank.

    Args:
        state: where it is.
        data: the data sets, see `data_identity`.
    """
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
        files.OUR_KEY: {
            "version": 1,
            "train_state": state.to_json(),
            "horizon": TrainingLengths.of(config).to_json(),
            "layout": config.layout.to_json(),
            "rng_policy": RNG_POLICY,
            "data": data,
        },
    }


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A save that is being written."""

    iteration: int
    consumed_samples: int
    started: float
    write: SaveWrite


class Checkpointer:
    """Saves checkpoints of one layout into `--save`. Call `finish` before the layout goes.

    Every method is collective over the world. A save that fails deletes its partial checkpoint, and
    the previous one stays the latest. Training goes on, and the next save tries again. Every rank
    raises a TrainingFailure after too many failures in a row, or if the run needs the checkpoint.

    Args:
        config: resolved configuration with `checkpoint.save` set.
        on_event: called on every rank with (`begin` | `commit` | `failed`, iteration, fields);
            fields hold `consumed_samples` of the saved state when it is begun or committed, and
            `reason`, `in_a_row` and, where training goes on, a `line` for the user when it failed.
        failed: saves of this run that have failed so far.
        data: the data sets, for the next one to compare.
    """

    def __init__(
        self,
        config: Config,
        groups: ProcessGroupCollection,
        on_event: Callable[[str, int, dict[str, Any]], None],
        *,
        failed: FailedSaves | None = None,
        data: list[dict[str, Any]] | None = None,
    ) -> None:
        assert config.checkpoint.save is not None
        self.config = config
        self.root = Path(config.checkpoint.save)
        self.groups = groups
        self.on_event = on_event
        self.failed = FailedSaves() if failed is None else failed
        self.data = [] if data is None else data
        use_own_writer()
        if config.checkpoint.async_save:
            with contextlib.suppress(OSError):  # the first save tries again
                writer_process()
        self.pending: _Pending | None = None

    def save(
        self,
        model: Model,
        optimizer: MegatronOptimizer,
        scheduler: Any,
        state: TrainState,
        *,
        must: bool = False,
    ) -> bool:
        """Writes a checkpoint of the state after `state.iteration`.

        With `--async-save` it returns while the checkpoint is written, unless that must succeed.

        Args:
            must: the run ends with this checkpoint, or is lost without it.

        Returns:
            Whether it is there, or being written.
        """
        # If this one must succeed, a failure of the one before does not count.
        self._complete(blocking=True, must=None if must else False)
        started = time.monotonic()
        iteration = state.iteration
        self.on_event("begin", iteration, {"consumed_samples": state.consumed_samples})
        in_background = self.config.checkpoint.async_save and not must
        problem, write = self._prepare(iteration, model, must=must), None
        if problem is None:
            write, problem = self._begin(
                model, optimizer, scheduler, state, in_background=in_background
            )
        if problem is not None or write is None:
            self._fail(problem or "nothing was begun", iteration, must=must)
            return False
        self.pending = _Pending(
            iteration=iteration,
            consumed_samples=state.consumed_samples,
            started=started,
            write=write,
        )
        if in_background and not write.holds_training_up:
            return True
        return self._complete(blocking=True, must=must)

    def _begin(
        self,
        model: Model,
        optimizer: MegatronOptimizer,
        scheduler: Any,
        state: TrainState,
        *,
        in_background: bool,
    ) -> tuple[SaveWrite | None, str | None]:
        """Starts the write. Returns this rank's part, and the problem, on every rank."""
        write, problem = None, None
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
            common = common_state(self.config, state, scheduler, self.data)
            request = begin_request(
                sharded,
                {**common, "content_metadata": metadata},
                files.folder_of(self.root, state.iteration),
                self._strategy(),
            )
            write = SaveWrite(request, in_background=in_background)
        except TORCH_ERRORS as error:  # any failure must end in one line on every rank
            logger.debug("saving failed", exc_info=True)
            problem = root_cause(error)
        waits, is_begun = write is not None and write.holds_training_up, False
        try:
            answers = all_gather_object((problem, waits))
            problem = next((problem for problem, _ in answers if problem), None)
            is_begun = problem is None
        finally:
            if write is not None and not is_begun:  # also where a rank has gone
                write.end()
        if write is not None:
            write.holds_training_up = any(waits for _, waits in answers)
        return write, problem

    def poll(self) -> None:
        """Commits an asynchronous save that has finished; costs nothing when none is under way."""
        self._complete(blocking=False, must=False)

    def finish(self, *, must: bool = False) -> bool:
        """Waits for the save under way and commits it.

        Args:
            must: the run ends with it.

        Returns:
            Whether no save has failed.
        """
        return self._complete(blocking=True, must=must)

    def _complete(self, *, blocking: bool, must: bool | None) -> bool:
        """Commits what has been written, or notes that it has failed.

        Args:
            must: see `save`; None when another save follows at once.

        Returns:
            Whether nothing has failed.
        """
        pending, problem = self.pending, None
        if pending is None:
            return True
        try:
            if not pending.write.is_written(blocking=blocking):
                return True
            pending.write.finish()
        except TORCH_ERRORS as error:  # raised on every rank, but only rank 0's says what happened
            logger.debug("saving failed", exc_info=True)
            problem = root_cause(error)
        self.pending = None
        pending.write.end()
        problem = first_problem(problem) or self._commit(pending)
        if problem is not None:
            self._fail(problem, pending.iteration, must=must)
        return problem is None

    def _strategy(self) -> Any:
        strategy: Any = get_default_save_sharded_strategy("torch_dist")
        if self.config.checkpoint.ckpt_fully_parallel_save:
            strategy = FullyParallelSaveStrategyWrapper(strategy, self.groups.dp_cp)
        return strategy

    def _prepare(self, iteration: int, model: Model, *, must: bool) -> str | None:
        """Makes an empty folder, if the file system has room. Returns the problem, on every
        rank."""
        needed = self._expected_bytes(model)
        problem = None
        try:
            refuse_while_stuck(stall_s() if must else 0.0)
            if dist.get_rank() == 0:
                problem = answer_of(lambda _: self._make_room(iteration, needed))
        except (OSError, ValueError) as error:
            problem = root_cause(error)
        if problem := first_problem(problem):
            return problem
        try:  # a file system may still remember on another node that the folder was not there
            folder = files.folder_of(self.root, iteration)
            answer_of(lambda _: folder.mkdir(exist_ok=True))
        except OSError as error:
            problem = root_cause(error)
        return first_problem(problem)

    def _make_room(self, iteration: int, needed: int) -> str | None:
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if free < _SPACE_MARGIN * needed:
            return f"{free / 1e6:.0f} MB are free and about {needed / 1e6:.0f} MB are needed"
        files.begin(self.root, iteration)
        return None

    def _expected_bytes(self, model: Model) -> int:
        """Bytes of a checkpoint: fp32 master, what the optimizer keeps (two moments at most), and
        the weights, of one copy of the model."""
        own = sum(
            p.numel() * (p.element_size() + (0 if self.config.checkpoint.no_save_optim else 12))
            for chunk in model.chunks
            for p in chunk.parameters()
        )
        total = torch.tensor([own], dtype=torch.float64, device=torch.cuda.current_device())
        dist.all_reduce(total, group=self.groups.mp)
        return int(total.item())

    def _commit(self, pending: _Pending) -> str | None:
        """Checksums by all ranks, then manifest, then the tracker, then the tidying up.

        Returns:
            The problem, on every rank.
        """
        iteration = pending.iteration
        folder = files.folder_of(self.root, iteration)
        problem, names, sums = None, [], {}
        try:
            if dist.get_rank() == 0:
                names = answer_of(lambda _: files.data_files(folder))
        except OSError as error:
            problem = root_cause(error)
        names = broadcast_from_rank0(names)
        try:
            mine = files.share(names, dist.get_rank(), dist.get_world_size())
            sums = answer_of(lambda count: files.checksums(folder, mine, count))
        except OSError as error:
            problem = root_cause(error)
        gathered = all_gather_object((problem, sums, pending.write.note))
        problem = next((p for p, *_ in gathered if p), None)
        if problem is None and dist.get_rank() == 0:
            try:
                merged = {name: value for _, part, _ in gathered for name, value in part.items()}
                answer_of(lambda _: files.finish(self.root, iteration, merged))
            except OSError as error:
                problem = root_cause(error)
        if problem := broadcast_from_rank0(problem):
            return problem
        if dist.get_rank() == 0:
            retain = self.config.checkpoint.save_retain_interval
            with contextlib.suppress(OSError):  # the next save tries again
                answer_of(
                    lambda _: files.retire(self.root, newest=iteration, retain_interval=retain)
                )
        self.failed.in_a_row = 0
        fields = {
            "consumed_samples": pending.consumed_samples,
            "seconds": time.monotonic() - pending.started,
            "bytes": sum(size for _, part, _ in gathered for size, _ in part.values()),
            "free_bytes": None,
        }
        with contextlib.suppress(OSError):
            fields["free_bytes"] = answer_of(lambda _: files.free_bytes(self.root))
        if notes := [note for *_, note in gathered if note]:
            fields["notes"] = notes
        self.on_event("commit", iteration, fields)
        return None

    def _fail(self, problem: str, iteration: int, *, must: bool | None) -> None:
        """Removes what there is of a save and says so. All ranks, in the same way.

        Raises:
            TrainingFailure: the run must not go on.
        """
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # it is marked as unfinished
                answer_of(lambda _: files.discard(self.root, iteration))
        self.failed.in_a_row += 1
        told = f"saving iteration {iteration} to --save {self.root} failed: {problem}"
        left = what_is_left(self.root)
        on_failure = self.config.checkpoint.on_save_failure
        is_too_often = must is not None and self.failed.ends_the_run(on_failure)
        line = f"{told} ({self.failed.times()}); {left}; training goes on"
        fields = {
            "reason": problem,
            "in_a_row": self.failed.in_a_row,
            "line": None if must or is_too_often else line,
        }
        self.on_event("failed", iteration, fields)
        if must:
            raise TrainingFailure(f"{told}; {left}; {way_out(problem)}start again with --load")
        if is_too_often:
            raise TrainingFailure(
                f"{told}, {self.failed.times()}; {left}; {way_out(problem)}start again with "
                "--load, or let training go on with --on-save-failure continue"
            )
