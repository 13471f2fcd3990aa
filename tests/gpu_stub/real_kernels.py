"""Real values on the stub of CUDA: a CPU computes each operation on CUDA tensors.

"Device" memory is memory of the process, so a CPU tensor can lie on it. torch runs each operation
as on a GPU: its allocator, its streams and its checks see the same, and the kernel does nothing.
Then a CPU runs the operation on the same memory. It waits for the current stream first, and for
that only. What another stream has not finished is not there, so that a forgotten wait shows as a
wrong number.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_PASSED_ON = {"c10d", "_c10d_functional", "profiler", "prim"}
"""Namespaces of operations that do not compute, or whose values the stub makes itself."""
_SHAPES_ONLY = {
    "aten::resize_",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::detach",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::record_stream",
    "aten::_pin_memory",
    "aten::is_pinned",
    # Reads one number: the copy to the host is real.
    "aten::_local_scalar_dense",
}
_TIMED_PRODUCT = 4096**2
"""Elements of a factor from which on a product is only timed, by `controller/link_timing.py`. It
would keep a CPU busy for a minute."""
_HALF = (torch.bfloat16, torch.float16)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the memory of a CUDA tensor."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    out = torch.empty(0, dtype=tensor.dtype)
    return out.set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())


def _host_value(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return on_host(x) if x.is_cuda else x
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if isinstance(x, torch.Generator) and x.device.type == "cuda":
        return torch.Generator().manual_seed(_seed_of(x))
    return x


def _seed_of(generator: torch.Generator) -> int:
    """What a generator of the device draws next, as a seed of one of the CPU. The first numbers
    after `manual_seed` are those of the CPU."""
    offset = generator.get_offset()
    return generator.initial_seed() + 0x9E3779B97F4A7C15 * offset & (1 << 63) - 1


@contextlib.contextmanager
def _random_numbers_of_the_device(func: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Lets an operation without a generator of its own draw by the state of the device's."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        yield
        return
    before = torch.default_generator.get_state()
    own = torch.cuda.default_generators[torch.cuda.current_device()]
    torch.default_generator.manual_seed(_seed_of(own))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in _HALF else x


def _rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: list[bool],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of `aten::_fused_rms_norm_backward`, which a CPU has not: gradients of input and weight."""
    last = tuple(range(x.dim() - len(shape), x.dim()))
    normed, scaled = x.float() * rstd, grad.float()
    d_weight = None
    if weight is not None:
        others = tuple(range(x.dim() - len(shape)))
        d_weight = (scaled * normed).sum(others).to(weight.dtype) if output_mask[1] else None
        scaled = scaled * weight.float()
    inner = (scaled * normed).mean(last, keepdim=True)
    return (rstd * (scaled - normed * inner)).to(x.dtype), d_weight


_OURS: dict[str, Any] = {"aten::_fused_rms_norm_backward": _rms_norm_backward}
"""Kernels that a CPU has not."""


def _is_on_device(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.is_cuda
    return isinstance(x, torch.device) and x.type == "cuda"


class RealKernels(TorchDispatchMode):
    """Computes on the CPU what operations on CUDA tensors would have computed.

    Args:
        max_elements: an operation with a larger tensor is left out.
    """

    def __init__(self, max_elements: float = math.inf) -> None:
        super().__init__()
        self._max_elements = max_elements
        self._runtime = ctypes.CDLL("libcudart.so.13")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if func.namespace in _PASSED_ON or name in _SHAPES_ONLY:
            return func(*args, **kwargs)
        flat = tree_flatten((args, kwargs))[0]
        sizes = [x.numel() for x in flat if isinstance(x, torch.Tensor)]
        if not any(map(_is_on_device, flat)) or max(sizes, default=0) > self._max_elements:
            return func(*args, **kwargs)
        aliases = [value.alias_info for value in schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):  # a view
            return func(*args, **kwargs)
        if name == "aten::mm.out" and args[0].numel() >= _TIMED_PRODUCT:
            return func(*args, **kwargs)
        stream = torch.cuda.current_stream().cuda_stream
        self._runtime.stub_wait(ctypes.c_void_p(stream))
        host_args, host_kwargs = tree_map(_host_value, args), tree_map(_host_value, kwargs)
        if "pin_memory" in host_kwargs:
            host_kwargs["pin_memory"] = False
        with _random_numbers_of_the_device(func, kwargs):
            if any(a.alias_info and a.alias_info.is_write for a in schema.arguments):
                out = func(*args, **kwargs)
                func(*host_args, **host_kwargs)
                return out
            compute: Any = _OURS.get(name, func)
            try:
                found = compute(*host_args, **host_kwargs)
            except RuntimeError:  # kinds of numbers that only a GPU mixes
                if self._max_elements < math.inf:
                    return func(*args, **kwargs)
                wide = tree_map(_widened, (host_args, host_kwargs))
                found = compute(*wide[0], **wide[1])
        # cuSOLVER, which has no stub, computes the first; of the others a kernel would find the
        # size. The allocator sees their results only.
        is_missing = "linalg" in name or "cholesky" in name
        is_missing = is_missing or torch.Tag.dynamic_output_shape in func.tags
        return _with_values(found if is_missing else func(*args, **kwargs), found)


def _with_values(out: Any, found: Any) -> Any:
    """What the operation returned on the device, with the values that the CPU found. Of a shape
    that depends on values the device knows nothing: it is made here."""
    results = []
    flat, spec = tree_flatten(out)
    for device, host in zip(flat, tree_flatten(found)[0]):
        if not isinstance(device, torch.Tensor):
            results.append(host)
            continue
        if device.shape != host.shape or device is host:
            device = torch.empty(host.shape, dtype=host.dtype, device="cuda")
        (on_host(device) if device.is_cuda else device).copy_(host)
        results.append(device)
    return tree_unflatten(results, spec)


def _make_mask(cls: type, *_args: Any) -> Any:
    with _disable_current_modes():
        return torch.Tensor.__new__(cls)


def start(max_elements: float = math.inf) -> None:
    """Computes real values from here on, in this thread and in all that it starts; of operations
    without a larger tensor, if a number is given."""
    run = threading.Thread.run

    def run_real(self: threading.Thread) -> None:
        with RealKernels(max_elements):
            run(self)

    threading.Thread.run = run_real
    # A mode would see the mask being made, which takes it for a plain tensor.
    CausalBias.__new__ = staticmethod(_make_mask)  # pyright: ignore[reportAttributeAccessIssue]
    if max_elements == math.inf:
        # What has no kernel for half precision on a CPU.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    RealKernels(max_elements).__enter__()
