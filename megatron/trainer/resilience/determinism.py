"""What `--deterministic-mode` asks of this process: its environment, and torch's algorithms."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, MutableMapping

import torch

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import Config

_FLAG = "--deterministic-mode"
_ON_GPUS = {
    # cuBLAS gives the same numbers only with workspaces of one of these sizes.
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    # The choices of Megatron-LM. Left alone, NCCL may choose another one in another launch, and
    # with it another order of additions.
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}
_OF_ENGINE = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",)}
"""What the attention of Transformer Engine goes by. megatron-core looks at it after minutes, when
it builds the model."""
_set_here: dict[str, str] = {}
"""Variables that had no value before. A process may train several times, and each run has notes."""


def set_environment(
    *, on_gpus: bool, with_engine: bool, env: MutableMapping[str, str] | None = None
) -> list[str]:
    """Sets the variables that deterministic kernels need and that the user has left out. CUDA and
    NCCL read them once, so this comes before the first use of either.

    Args:
        on_gpus: whether the run is on GPUs; without them nothing is set.
        with_engine: whether the layers are those of Transformer Engine.

    Returns:
        A note for each variable that was set, now or by an earlier call.

    Raises:
        UsageError: a variable has another value, one line each.
    """
    env = os.environ if env is None else env
    wanted = {**(_ON_GPUS if on_gpus else {}), **(_OF_ENGINE if on_gpus and with_engine else {})}
    problems, notes = [], []
    for name, known in wanted.items():
        if not env.get(name):
            env[name] = _set_here[name] = known[0]
        if env[name] not in known:
            choices = known[0] if len(known) == 1 else f"one of {', '.join(known)}"
            problems.append(f"{_FLAG} excludes {name}={env[name]}; unset it or set it to {choices}")
        elif env[name] == _set_here.get(name):
            notes.append(f"{_FLAG}: {name} is set to {env[name]}")
    if problems:
        raise UsageError("\n".join(problems))
    return notes


def prepare_early(args: argparse.Namespace) -> None:
    """Does what `prepare` has to do before a rank joins its world, for one that resolves its flags
    only then. `prepare` still comes after.

    Args:
        args: from `parse_args`.

    Raises:
        UsageError: as `prepare`.
    """
    if args.deterministic_mode:
        on_gpus = args.device != "cpu" and torch.cuda.is_available()
        set_environment(on_gpus=on_gpus, with_engine=False)


def prepare(config: Config) -> Config:
    """Sets the environment of a run with `--deterministic-mode`, and notes what was set.

    Raises:
        UsageError: the environment has values that the flag excludes.
    """
    if not config.runtime.deterministic_mode:
        return config
    notes = set_environment(
        on_gpus=config.runtime.device == "cuda",
        with_engine=config.kernels.transformer_impl == "transformer_engine",
    )
    return config.replace(notes=(*config.runtime.notes, *notes)) if notes else config


@contextlib.contextmanager
def deterministic_algorithms(config: Config) -> Iterator[None]:
    """Has torch use deterministic algorithms, if the run has `--deterministic-mode`, while the
    context is open. An operation that has none raises an error, as in Megatron-LM."""
    if not config.runtime.deterministic_mode:
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
