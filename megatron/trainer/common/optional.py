"""Which optional packages this environment has. The only place that asks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron.trainer.common.errors import UsageError

_ENGINE_OF_CORE = ">=2.9,<2.12"
"""As megatron-core 0.16.1 declares it."""
_ENGINE_OF_NEWER_CORE = ">=2.11"
"""Of 0.17 and later, which declare none: what their code asks for."""


def abilities() -> dict[str, bool]:
    """What `resolve` asks of this machine, by its keywords.

    Raises:
        UsageError: as `have_transformer_engine`.
    """
    import torch

    return {
        "cuda_available": torch.cuda.is_available(),
        "transformer_engine_available": have_transformer_engine(),
        "apex_available": have_nvidia_apex(),
    }


@functools.cache
def have_transformer_engine() -> bool:
    """Whether Transformer Engine imports (GPU images only).

    Raises:
        UsageError: it finds fault with its own installation, which megatron-core would not catch.
    """
    try:
        return _imports("transformer_engine.pytorch")
    except (AssertionError, RuntimeError) as error:
        core = version_of("megatron-core") or ""
        engine = version_of("transformer-engine") or "(no version)"
        wanted, said = engine_range(core), " ".join(str(error).split())[:200]
        raise UsageError(
            f"Transformer Engine {engine} does not import ({type(error).__name__}: {said}); "
            f"megatron-core {core} is made for {wanted}: run {engine_fix(wanted)}, or "
            "pip uninstall transformer-engine"
        ) from error


def version_of(distribution: str) -> str | None:
    """The version of an installed package; None where nothing says it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def engine_range(core: str) -> str:
    """The versions of Transformer Engine that a megatron-core is made for, as pip takes them."""
    try:
        return _ENGINE_OF_NEWER_CORE if Version(core) >= Version("0.17") else _ENGINE_OF_CORE
    except InvalidVersion:
        return _ENGINE_OF_NEWER_CORE


def engine_fix(wanted: str) -> str:
    """The command that installs Transformer Engine of a range."""
    return f'pip install --no-build-isolation "transformer-engine[pytorch]{wanted}"'


@functools.cache
def have_nvidia_apex() -> bool:
    """Whether NVIDIA's apex imports; PyPI's package of that name is another project."""
    return _imports("apex.optimizers")


def require(library: str, *, extra: str, what: str) -> None:
    """Looks for a library before work begins that cannot end without it.

    Args:
        library: top-level module, which is not imported.

    Raises:
        UsageError: it is not installed.
    """
    try:
        is_there = importlib.util.find_spec(library) is not None
    except ImportError:
        is_there = False
    if not is_there:
        raise UsageError(f'{what} needs {library}; run: pip install -e ".[{extra}]"')


def installed() -> dict[str, bool]:
    """What ranks on GPUs will find, as arguments of `resolve`, for whoever is not a rank.

    It looks for the packages and imports none, since an import would occupy a GPU.
    """
    return {
        "transformer_engine_available": _is_installed("transformer_engine", "pytorch"),
        "apex_available": _is_installed("apex", "optimizers"),
    }


def _is_installed(package: str, part: str) -> bool:
    spec = importlib.util.find_spec(package)
    places = () if spec is None else spec.submodule_search_locations or ()
    return any((Path(place) / part).is_dir() for place in places)


def _imports(name: str) -> bool:
    if importlib.util.find_spec(name.split(".")[0]) is None:
        return False
    try:
        importlib.import_module(name)
    except (ImportError, OSError):
        return False
    return True
