"""Process groups of one layout: built, seeded, and torn down without leaks."""

from __future__ import annotations

import datetime
import gc
import hashlib
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import _MODEL_PARALLEL_RNG_TRACKER_NAME

from megatron.trainer.common.collectives import barrier
from megatron.trainer.common.device import Device
from megatron.trainer.config.layout import Layout
from megatron.trainer.distributed.meeting import meeting_error

logger = logging.getLogger(__name__)

WHOLE_SAMPLE_STREAM = "whole-sample-rng"
"""The model-parallel stream of a rank with whole samples, alike on the ranks that share one."""
_BUFFERS = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER")


def group_globals() -> dict[str, Any]:
    """megatron-core's names for groups, sizes and ranks, with their present values."""
    found = vars(parallel_state).items()
    names = {n: v for n, v in found if n.startswith("_") and not n.startswith("__") and n.isupper()}
    names["_global_process_group_list"] = parallel_state._global_process_group_list
    return {name: names[name] for name in sorted(names.keys() - set(_BUFFERS))}


_INITIAL = group_globals()


def _reset_globals() -> None:
    """Gives megatron-core's names the values that they have before any group is built.
    `destroy_model_parallel` leaves some of them behind (0.16.1): two are groups, which would keep
    sockets and threads alive."""
    for name, value in _INITIAL.items():
        setattr(parallel_state, name, {} if value == {} else value)


def init_distributed(device: Device, *, timeout_minutes: float) -> None:
    """Joins the world that torchrun (or the caller) described in the environment; does nothing if
    already joined. torch is not told of the GPU. It would then make a communicator for each group
    at once, all ranks of the world together, at every change of layout as well.

    Args:
        timeout_minutes: a collective that waits longer fails, and so does joining.

    Raises:
        UsageError: MASTER_ADDR or MASTER_PORT cannot work.
        TrainingFailure: the other ranks did not come.
    """
    if dist.is_initialized():
        return
    try:
        dist.init_process_group(
            device.backend,
            timeout=datetime.timedelta(minutes=timeout_minutes),
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise meeting_error(error, os.environ, timeout_minutes=timeout_minutes) from error


def build_groups(
    layout: Layout,
    *,
    timeout_minutes: float,
    create_gloo_process_groups: bool = True,
    use_tp_pp_dp_mapping: bool = False,
    context_levels: list[int] | None = None,
) -> ProcessGroupCollection:
    """Creates megatron-core's process groups for a layout. All ranks take part.

    Args:
        layout: its world size must be that of the job.
        create_gloo_process_groups: also create the CPU side groups.
        use_tp_pp_dp_mapping: order ranks tensor, pipeline, data instead of tensor, data, pipeline.
        context_levels: inner and outer size of context parallelism, where it exchanges on two
            levels.

    Returns:
        The groups, to be passed on rather than looked up.
    """
    assert layout.world_size == dist.get_world_size(), (layout, dist.get_world_size())
    etp = layout.expert_tensor_parallel_size
    if use_tp_pp_dp_mapping and layout.pp > 1 and layout.expert_data_parallel_size != layout.dp:
        # A dense model: this order wants as many copies of experts as replicas.
        etp = layout.tp * layout.cp
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        hierarchical_context_parallel_sizes=context_levels,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=etp,
        order="tp-cp-ep-pp-dp" if use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=create_gloo_process_groups,
        distributed_timeout_minutes=int(timeout_minutes),
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def destroy_groups(*, wait: bool = True, linger: bool = False) -> None:
    """Destroys every group but the world, and what megatron-core forgets. All ranks, after their
    model is gone. `destroy_broken_world` is for a world that has lost a rank.

    Order matters: references first, then groups, then globals, then what closing waits for
    (docs/decisions/001).

    Args:
        wait: for the other ranks first; needless where nobody can still use the groups.
        linger: return before the threads of gloo groups have ended; `await_closed` waits for them.
    """
    await_closed()
    _forget_model()
    if wait:
        barrier()
    groups = [g for g in parallel_state._global_process_group_list or [] if g is not None]
    waiting = [g for g in groups if dist.get_backend(g) == "gloo"]
    for group in groups:
        dist.destroy_process_group(group)
    group = None
    groups.clear()
    parallel_state.destroy_model_parallel()
    _reset_globals()
    gc.collect()
    _let_go(waiting, linger=linger)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _let_go(groups: list[Any], *, linger: bool, is_broken: bool = False) -> None:
    """Drops the last references to gloo groups. Each waits some ten milliseconds for its own thread
    and does not hold the interpreter, so all of them wait at once.

    Args:
        is_broken: some may never close, as a peer has died. Whoever drops the last reference to
            one waits for ever: here it is a thread of ours, whatever else still holds it.
    """
    if not groups:
        return
    drop = _drop_last if is_broken else list[Any].clear
    while groups:
        # A daemon: gloo may never end one whose peer has died, and the process has to.
        thread = threading.Thread(target=drop, args=([groups.pop()],), daemon=True)
        thread.start()
        _closing.append(thread)
    if not linger:
        await_closed()


def _drop_last(held: list[Any]) -> None:
    """Drops a reference once it is the last one. After a while it keeps it for good."""
    deadline_s = time.monotonic() + _KEEP_S
    while sys.getrefcount(held[0]) > 2:  # of `held`, and the argument of the call
        if time.monotonic() > deadline_s:
            _kept.append(held)
            return
        time.sleep(_LOOK_S)
    held.clear()


_closing: list[threading.Thread] = []
_LOOK_S, _KEEP_S = 0.05, 60.0
_kept: list[list[Any]] = []
"""Broken groups that something else refers to."""
_BROKEN_S = 0.2


def await_closed() -> None:
    """Waits until the groups that `destroy_groups` let linger are closed. Not collective."""
    while _closing:
        _closing.pop().join()


def abort_world() -> None:
    """Ends every wait of this process for NCCL; torch then knows no group any more. Not collective,
    from any thread. Does nothing in a world of gloo. NCCL may itself wait for a lost peer: after
    `_ABORT_S` this returns nevertheless."""
    with _abort_lock:
        if not _aborting:
            if not dist.is_initialized() or dist.get_backend() != "nccl":
                return
            # torch forgets them, and their threads would never end.
            _aborted.extend(_groups_of("gloo"))
            _aborting.append(threading.Thread(target=_abort, name="abort", daemon=True))
            _aborting[0].start()
        _aborting[0].join(_ABORT_S)
        if not _aborting[0].is_alive():
            _aborting.clear()


def _abort() -> None:
    """Aborts all communicators of NCCL at once. `_abort_process_group` alone takes one after the
    other, and to end an idle one NCCL may wait for a kernel of one that hangs and comes later
    (github.com/pytorch/pytorch/issues/119797)."""
    nccl = _groups_of("nccl")
    aborts = [threading.Thread(target=_abort_group, args=(g,), daemon=True) for g in nccl]
    for thread in aborts:
        thread.start()
    for thread in aborts:
        thread.join()
    try:
        # All are ended; it empties the tables. By name: torch 2.6 takes none for another group.
        dist.distributed_c10d._abort_process_group(dist.group.WORLD)
    except Exception as error:  # groups that are half made
        logger.debug("the world was not aborted in order: %r", error)


def _abort_group(group: Any) -> None:
    try:
        # The backend's: torch 2.6 has no other.
        group._get_backend(torch.device("cuda")).abort()
    except Exception as error:  # half made
        logger.debug("a group was not aborted in order: %r", error)


_abort_lock = threading.Lock()
_aborting: list[threading.Thread] = []
_aborted: list[Any] = []
"""Groups of gloo of a world that was aborted."""
_ABORT_S, _ABORTED_S = 3.0, 8.0


def _groups_of(backend: str) -> list[Any]:
    # A copy: another thread may be making a group.
    groups = list(dist.distributed_c10d._world.pg_map)
    return [group for group in groups if dist.get_backend(group) == backend]


def destroy_broken_world() -> None:
    """Destroys all groups and the world after the loss of a rank, once nothing refers to them, also
    where it was aborted or did not come about. Not collective. A group that gloo cannot close keeps
    a thread and its sockets.

    Raises:
        RuntimeError: NCCL is still aborting the world after `_ABORTED_S`. A later end would empty
            torch's tables of the next world.
    """
    await_closed()
    abort_world()  # before anything waits for the GPU
    with _abort_lock:
        for thread in _aborting:
            thread.join(_ABORTED_S)
            if thread.is_alive():
                raise RuntimeError(f"NCCL has not aborted the old world within {_ABORTED_S:g} s")
        _aborting.clear()
    groups = [*_aborted, *_groups_of("gloo")]
    _aborted.clear()
    _forget_model()
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # the tables are what matters
        logger.debug("the world was not destroyed in order: %r", error)
    parallel_state.destroy_model_parallel()
    _reset_globals()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _let_go(groups, linger=True, is_broken=True)
    deadline_s = time.monotonic() + _BROKEN_S
    while _closing:
        _closing.pop().join(max(deadline_s - time.monotonic(), 0.0))


def _forget_model() -> None:
    """Frees what a model leaves behind in this process."""
    gc.collect()
    if torch.cuda.is_initialized():  # a CPU run beside GPUs does not touch them
        torch.cuda.synchronize()
    RotaryEmbedding.forward.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
    YarnRotaryEmbedding.forward.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
    destroy_num_microbatches_calculator()


@dataclass(frozen=True)
class IdleGroups:
    """The groups of a layout that is not in use."""

    globals: dict[str, Any]
    """Values of megatron-core's names."""


def set_groups_aside() -> IdleGroups:
    """Takes the groups of the present layout out of use, whole. Not collective; a live model keeps
    the groups that it was given."""
    idle = IdleGroups(group_globals())
    _reset_globals()
    for name in _BUFFERS:
        setattr(parallel_state, name, None)
    return idle


def use_groups(idle: IdleGroups) -> ProcessGroupCollection:
    """Puts groups that were set aside to use again. Not collective.

    Args:
        idle: empty afterwards, so that it does not keep groups that are destroyed.
    """
    while idle.globals:
        setattr(parallel_state, *idle.globals.popitem())
    for name in _BUFFERS:
        setattr(parallel_state, name, None)
    parallel_state._set_global_memory_buffer()
    return ProcessGroupCollection.use_mpu_process_groups()


def release_model() -> None:
    """Frees what a deleted model leaves behind, and keeps the groups. All ranks."""
    _forget_model()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def random_seed_at(seed: int, consumed_samples: int, *stream: int | str) -> int:
    """The seed of one random stream at one point of the run.

    Random numbers are a pure function of the run seed, the consumed samples and the stream. So
    nothing about them is stored, and a resumed run draws the numbers of an uninterrupted one.

    Args:
        consumed_samples: samples consumed when the step starts.
        stream: what the numbers are for, for example `"dropout"` and the ranks that must differ.

    Returns:
        An integer in [0, 2^62).
    """
    text = "/".join(str(part) for part in (seed, consumed_samples, *stream))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def seed_step(seed: int, consumed_samples: int, groups: ProcessGroupCollection) -> None:
    """Seeds every random stream of this rank for the step that starts at `consumed_samples`.

    Tensor-parallel ranks of one pipeline stage and one replica share the default stream and differ
    in the model-parallel stream, as dropout under tensor parallelism requires. Replicas and stages
    differ in both. Ranks that share a sample share the default stream and one more, which are those
    of one rank with the whole sample; they differ in the model-parallel stream.
    """
    stream = ["pp", groups.pp.rank(), "dp", groups.dp.rank()]
    whole = random_seed_at(seed, consumed_samples, *stream)
    tp_rank = groups.tp.rank()
    tensor_parallel.model_parallel_cuda_manual_seed(whole, tp_rank=tp_rank)
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    if groups.cp.size() > 1:
        of_sample = tracker.get_states()[_MODEL_PARALLEL_RNG_TRACKER_NAME]
        own = random_seed_at(seed, consumed_samples, *stream, "cp", groups.cp.rank())
        tensor_parallel.model_parallel_cuda_manual_seed(own, tp_rank=tp_rank)
        tracker.set_states(tracker.get_states() | {WHOLE_SAMPLE_STREAM: of_sample})
    torch.manual_seed(whole)


def seed_build(seed: int) -> None:
    """Seeds megatron-core's trackers before a model is built; initial weights do not depend on
    it."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
