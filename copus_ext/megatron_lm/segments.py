"""Megatron-LM's `train`, called in segments, so that its batch may change both ways between them.

Within one call its loop lets the number of micro-batches grow alone, and saves whenever it does.
Each call reads it anew. A segment ends where `args.train_iters` is lowered to the step just done.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")
"""Of the model's configuration: `train` sets them, and asserts that it finds some unset."""


def train_in_segments(
    train: Callable[..., Any], args: Any, goes_on: Callable[[], bool], *given: Any, **named: Any
) -> Any:
    """Calls `train` until the run is over.

    Args:
        train: that of the checkout; returns its last iteration and the operations so far.
        args: the checkout's arguments.
        goes_on: called after each call; whether it was cut short, and if so sets what the next
            steps have.
        given: of `train`.
        named: of `train`.

    Returns:
        What the last call returns.
    """
    bound = inspect.signature(train).bind(*given, **named).arguments
    config, model = bound.get("config"), bound["model"]
    before = {name: getattr(config, name) for name in _FUNCTIONS if hasattr(config, name)}
    while True:
        result = train(*given, **named)
        if not goes_on():
            return result
        args.iteration, args.num_floating_point_operations_so_far = result
        for name, function in before.items():
            setattr(config, name, function)
        for chunk in model:
            # The end of a call takes them off, and the start of the next asserts that they are on.
            if (
                getattr(chunk, "use_forward_hook", False)
                and not chunk.remove_forward_pre_hook_handles
            ):
                chunk.enable_forward_pre_hook()
        timer = importlib.import_module("megatron.training.global_vars").get_timers()
        timer("interval-time").stop()
