"""Which optional packages this environment has. The only place that asks."""

from __future__ import annotations

import functools
import importlib
import importlib.util


@functools.cache
def have_transformer_engine() -> bool:
    """Whether Transformer Engine imports (GPU images only)."""
    return _imports("transformer_engine.pytorch")


@functools.cache
def have_nvidia_apex() -> bool:
    """Whether NVIDIA's apex imports; PyPI's package of that name is another project."""
    return _imports("apex.optimizers")


def _imports(name: str) -> bool:
    if importlib.util.find_spec(name.split(".")[0]) is None:
        return False
    try:
        importlib.import_module(name)
    except (ImportError, OSError):
        return False
    return True
