"""Stands in for CUDA on CPU ranks, as far as Megatron-LM's own program asks for it.

Import it before torch does anything. Tensors that are asked for on a GPU are made on the CPU.
Streams and events do nothing, and memory is taken to be empty.
"""

from __future__ import annotations

import collections
import contextlib
import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
CPU = torch.device("cpu")


def _on_cpu(device: Any) -> Any:
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_cuda = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return CPU if is_number or is_cuda else device


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            named = [_on_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args[1:]]
            args = args[0], *named
        return func(*args, **kwargs)


class _Nothing:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> Any:
        return _Nothing()


class _Properties:
    major, minor, name = 9, 0, "cpu"
    total_memory, multi_processor_count = 1 << 34, 100


class _Generators(list[Any]):
    def __getitem__(self, _: Any) -> Any:
        return torch.default_generator


def _constant(value: Any) -> Any:
    return lambda *_, **__: value


class _TensorType(type):
    """A type of tensors on a GPU: nothing is one, and what is made with it lies on the CPU."""

    dtype: torch.dtype

    def __instancecheck__(cls, _: Any) -> bool:
        return False

    def __call__(cls, *sizes: Any, **more: Any) -> Any:
        if sizes and isinstance(sizes[0], (list, tuple)):
            return torch.tensor(*sizes, dtype=cls.dtype)
        return torch.empty(*sizes, dtype=cls.dtype)


def install() -> None:
    """Puts the stand-in in place, for the rest of the process."""
    _OnCpu().__enter__()
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment]
    plain_type = tensor.type

    def type_of(self: Any, *args: Any, **more: Any) -> Any:
        found = plain_type(self, *args, **more)
        return found if args or more else "torch.cuda." + found.rpartition(".")[2]

    tensor.type = type_of
    answers = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": CPU,
        "get_device_capability": (9, 0),
        "get_device_properties": _Properties(),
        "get_device_name": "cpu",
        "is_current_stream_capturing": False,
        "mem_get_info": (1 << 34, 1 << 34),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
        **dict.fromkeys(("max_memory_reserved", "reset_peak_memory_stats", "ipc_collect"), 0),
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "init", "_lazy_init")),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "set_stream")),
    }
    for name, value in answers.items():
        setattr(cuda, name, _constant(value))
    cuda.memory_stats = lambda *_: collections.defaultdict(int)
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Nothing()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(
        state
    )
    cuda._lazy_call = lambda function, **__: function()
    cuda.default_generators = _Generators()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _constant(None)
    for name, dtype in {
        "Float": torch.float,
        "Half": torch.half,
        "BFloat16": torch.bfloat16,
        "Long": torch.long,
        "Int": torch.int,
        "Byte": torch.uint8,
        "Double": torch.double,
    }.items():
        setattr(cuda, f"{name}Tensor", _TensorType(f"{name}Tensor", (), {"dtype": dtype}))
    _for_megatron_core()


def _for_megatron_core() -> None:
    """What megatron-core leaves out on a CPU: counts of tokens, which lie there already, stay
    tensors where it wants arrays; the norm of torch, which computes the same on a part of the
    sequence, refuses sequence parallelism; and plain attention, which takes the widths of what it
    is given, refuses to be told them by latent attention."""
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import token_dispatcher

    attention: Any = DotProductAttention
    plain_attention = attention.__init__

    def init(
        self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **more: Any
    ) -> None:
        plain_attention(self, *args, **more)

    attention.__init__ = init

    def counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = counts
    plain = torch_norm.WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, *args: Any, **more: Any) -> Any:
        is_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            made = plain(cls, config, *args, **more)
        finally:
            config.sequence_parallel = is_parallel
        for weight in made.parameters():
            weight.sequence_parallel = is_parallel  # type: ignore[attr-defined]
        return made

    torch_norm.WrappedTorchNorm.__new__ = norm  # type: ignore[method-assign]
    _count_steps()


def _count_steps() -> None:
    """Without Transformer Engine the distributed optimizer cannot load a checkpoint: it asks for
    the steps of a state that is not there yet, all weights share one count, and a checkpoint that
    every layout can load has none for a weight."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    kind: Any = DistributedOptimizer
    plain_state, plain_load = kind.state_dict, kind.load_state_dict
    plain_values = kind.load_parameter_state_from_fully_reshardable

    def state_dict(self: Any) -> Any:
        if not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
        for state in self.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))
        return plain_state(self)

    def load_state_dict(self: Any, given: Any) -> None:
        plain_load(self, given)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def load_values(self: Any, given: Any) -> None:
        states = self.optimizer.state.values()
        counts = [state.pop("step") for state in states]
        plain_values(self, given)
        for state, count in zip(states, counts, strict=True):
            state["step"] = count

    kind.state_dict, kind.load_state_dict = state_dict, load_state_dict
    kind.load_parameter_state_from_fully_reshardable = load_values
