"""Megatron-LM's `train`, called in segments, so that its batch may change both ways between them.

Within one call its loop lets the number of micro-batches grow alone, and saves whenever it does.
Each call reads it anew. A segment ends where `args.train_iters` is lowered to the step just done.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")
"""Of the model's configuration: `train` sets them, and asserts that it finds some unset."""


class Segments(Protocol):
    """What the loop asks between two segments."""

    @property
    def args(self) -> Any:
        """The checkout's arguments."""
        ...

    def renew(self, given: dict[str, Any]) -> None:
        """Puts other arguments of `train`, by name, where the next call needs them."""
        ...

    def goes_on(self, given: dict[str, Any]) -> bool:
        """Whether a call was cut short; if so it sets what the next steps have, and does as
        `renew` does."""
        ...


def train_in_segments(train: Callable[..., Any], run: Segments, *given: Any, **named: Any) -> Any:
    """Calls `train` until the run is over.

    Args:
        train: that of the checkout; returns its last iteration and the operations so far.
        run: says where segments end.
        given: of `train`.
        named: of `train`.

    Returns:
        What the last call returns.
    """
    call, args = inspect.signature(train).bind(*given, **named), run.args
    run.renew(call.arguments)
    while True:
        config = call.arguments["config"]
        before = {name: getattr(config, name) for name in _FUNCTIONS if hasattr(config, name)}
        result = train(*call.args, **call.kwargs)
        start = args.iteration, args.num_floating_point_operations_so_far
        args.iteration, args.num_floating_point_operations_so_far = result
        if not run.goes_on(call.arguments):
            args.iteration, args.num_floating_point_operations_so_far = start
            return result
        for name, function in before.items():
            setattr(config, name, function)
        _enable_pre_hooks(call.arguments["model"])
        timer = importlib.import_module("megatron.training.global_vars").get_timers()
        timer("interval-time").stop()


def _enable_pre_hooks(model: list[Any]) -> None:
    """The end of a call takes them off, and the start of the next asserts that they are on. A
    function of its own, so that no name keeps a chunk alive over a change of layout."""
    for chunk in model:
        if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()
