"""Where tensors live: CUDA with NCCL, or CPU with gloo.

This is the one file that knows that megatron-core assumes CUDA. On a CPU run `use_device` answers
every question "which CUDA device?" with the CPU for as long as its context is open, and puts
everything back afterwards. On a CUDA machine nothing is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.trainer.common.errors import UsageError

_CPU = torch.device("cpu")
_NAMED_DEVICE = frozenset({torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to})
"""Calls that may have a device without its keyword."""


@dataclass(frozen=True, kw_only=True)
class Device:
    kind: str
    """`cuda` or `cpu`."""
    torch_device: torch.device
    """The device that parameters and batches are placed on."""
    backend: str
    """torch.distributed backend of the main process groups: `nccl` or `gloo`."""

    @property
    def is_cuda(self) -> bool:
        """Whether the run is on a GPU."""
        return self.kind == "cuda"


class _CpuAnswersForCuda(TorchFunctionMode):
    """Rewrites CUDA devices to CPU in every Python-level torch call of this thread."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # Some thousand calls a step come here: most leave at once.
        if func in _NAMED_DEVICE:
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                # megatron-core's optimizers compare p.type() with the names of CUDA tensor types.
                return func(*args).replace("torch.", "torch.cuda.", 1)
            if func is torch.Tensor.to and len(args) > 1 and _means_cuda(args[1]):
                args = (args[0], _CPU, *args[2:])
        if not kwargs:
            return func(*args)
        if _means_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _means_cuda(device: Any) -> bool:
    if device is None or isinstance(device, (torch.dtype, torch.Tensor, bool)):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CpuStream:
    """A queue of work, as megatron-core's dispatcher of tokens to experts makes one to copy sizes.
    All work is done in order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        """Does nothing."""

    def wait_event(self, *_: Any) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def record_event(self, *_: Any) -> _CpuStream:
        """Returns what can be waited for."""
        return self


class _CpuEvent:
    """A point in time, as megatron-core's inference takes one before and after each token."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._s = 0.0

    def record(self) -> None:
        self._s = time.perf_counter()

    def synchronize(self) -> None:
        """Does nothing: all is done in order."""

    def elapsed_time(self, end: _CpuEvent) -> float:
        """Milliseconds from here to `end`."""
        return 1000 * (end._s - self._s)


def _cpu_replacements() -> list[tuple[Any, str, Any]]:
    """The (object, attribute, value) triples that a CPU rank needs, megatron-core's and torch's."""
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random as core_random
    from megatron.core.transformer.moe import token_dispatcher
    from torch.distributed import ProcessGroupGloo

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def seed(value: Any) -> torch.Generator:
        return torch.default_generator.manual_seed(int(value))

    return [
        # A device and not an index: megatron-core passes the answer on as device=.
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "Event", _CpuEvent),
        # A class, because transformers names it in annotations.
        (torch.cuda, "Stream", _CpuStream),
        (torch.cuda, "current_stream", lambda *_args, **_kwargs: _CpuStream()),
        (torch.cuda, "stream", lambda *_args: contextlib.nullcontext()),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "empty_cache", nothing),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda, "set_rng_state", set_state),
        (torch.cuda, "manual_seed", seed),
        # torch's own also notes the stack for each kind of accelerator, which takes milliseconds.
        (torch, "manual_seed", seed),
        (torch.cuda.random, "get_rng_state", get_state),
        (core_random, "_get_cuda_rng_state", get_state),
        (core_random, "_set_cuda_rng_state", set_state),
        # torch turns the stand-in off while it runs a backward pass, and layers that are computed
        # again in it make their mask there.
        *(
            (fused_softmax, name, _on_the_cpu(getattr(fused_softmax, name)))
            for name in ("get_default_causal_mask", "get_sliding_window_causal_mask")
        ),
        (ProcessGroupGloo, "__init__", _with_one_worker(ProcessGroupGloo)),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _sizes_of_rows),
    ]


def _sizes_of_rows(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What the dispatcher of tokens gets for its sizes: numbers, where it asks for numbers.
    megatron-core leaves tensors that are on the CPU as they are, which an all-to-all refuses."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def use_plain_router() -> None:
    """Gives megatron-core's router the name that it imports with Transformer Engine only.
    Idempotent."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]


def _on_the_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function with its CUDA tensors on the CPU, wherever it is called."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _CpuAnswersForCuda():
            return function(*args, **kwargs)

    return call


def _with_one_worker(group: Any) -> Callable[..., None]:
    """Makes a gloo group as torch does, on the interfaces of `GLOO_SOCKET_IFNAME` if it is set, but
    with one thread for its collectives instead of two, and one for the sockets of all groups.

    Two at a time have spoilt the heap (docs/lab.md, "A heap spoilt under gloo"). With one they run
    in the order in which every rank asks for them, and still beside the computation. A rank has
    some twenty groups: a thread for the sockets of each makes them slower to open and close.
    """
    make: Callable[..., None] = group.__init__
    devices: dict[str, Any] = {}

    def device_of(interface: str) -> Any:
        # A lazy device, which an environment variable asks for, closes with the first group.
        if interface not in devices:
            devices[interface] = (
                group.create_device(interface=interface, lazy_init=False)
                if interface
                else group.create_default_device(lazy_init=False)
            )
        return devices[interface]

    def make_with_one(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = group._Options()
        options._threads, options._timeout = 1, timeout
        names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        options._devices = [device_of(name) for name in names]
        if os.environ.get("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"):
            devices.clear()  # sockets of two groups would then have the same number
        try:
            make(self, store, rank, size, options)
        except BaseException:
            devices.clear()  # a late peer of the group that failed must not find the listener
            raise

    return make_with_one


def use_own_gpu(local_rank: int) -> torch.device:
    """Makes the GPU of this rank the current one of the process.

    Args:
        local_rank: index of the GPU on this node.

    Raises:
        UsageError: this node has fewer GPUs than ranks.
    """
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {local_rank} has no GPU of its own, this node has "
            f"{torch.cuda.device_count()}; start torchrun with --nproc-per-node "
            f"{torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def settle_memory(device: Device) -> None:
    """Keeps what stays in a GPU's memory apart from what comes and goes: gives back what is free,
    and has the libraries take their workspaces. Does nothing on a CPU.

    A library that is first called in a pass takes its workspace where a large tensor has just been,
    and no such tensor finds room there for the rest of the run (822 MB of 14.7 GB, seen in torch's
    allocator). The threads of forward and backward pass have a workspace each.
    """
    if not device.is_cuda:
        return
    torch.cuda.empty_cache()
    x, weight = (torch.ones(8, 8, device="cuda", requires_grad=True) for _ in range(2))
    torch.nn.functional.linear(x, weight, weight[0]).sum().backward()


@contextlib.contextmanager
def use_device(kind: str, *, local_rank: int = 0, backend: str | None = None) -> Iterator[Device]:
    """Opens the device of this rank and restores everything on exit.

    Args:
        kind: `cuda` or `cpu` (already resolved from `--device auto`).
        local_rank: index of the GPU on this node; ignored on CPU.
        backend: `nccl` or `gloo` to force one, else NCCL on CUDA and gloo on CPU.

    Yields:
        The device. On CPU megatron-core's CUDA calls land on the CPU while the context is open, in
        this thread.

    Raises:
        ValueError: for another kind, or NCCL on CPU.
        UsageError: this node has fewer GPUs than ranks.
    """
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda or cpu here, not {kind!r}")
    if kind == "cuda":
        device = use_own_gpu(local_rank)
        yield Device(kind="cuda", torch_device=device, backend=backend or "nccl")
        return
    if backend == "nccl":
        raise ValueError("--distributed-backend nccl needs a GPU: use gloo with --device cpu")
    # Every dropout call on CPU moves the only generator there is, which the tracker reports each
    # time.
    tracker_logger = logging.getLogger("megatron.core.tensor_parallel.random")
    saved_level = tracker_logger.level
    tracker_logger.setLevel(logging.ERROR)
    replacements = _cpu_replacements()
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        with _CpuAnswersForCuda():
            yield Device(kind="cpu", torch_device=_CPU, backend="gloo")
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)
        tracker_logger.setLevel(saved_level)
