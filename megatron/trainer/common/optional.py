"""Which optional packages this environment has. The only place that asks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path

from megatron.trainer.common.errors import UsageError


@functools.cache
def have_transformer_engine() -> bool:
    """Whether Transformer Engine imports (GPU images only)."""
    return _imports("transformer_engine.pytorch")


@functools.cache
def have_nvidia_apex() -> bool:
    """Whether NVIDIA's apex imports; PyPI's package of that name is another project."""
    return _imports("apex.optimizers")


def require(library: str, *, extra: str, what: str) -> None:
    """Looks for a library before work begins that cannot end without it.

    Args:
        library: top-level module, which is not imported.
        extra: of setup.py that brings it.
        what: needs it.

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
