"""Extras in tests outside `tests/extras`: where one has been removed, such a test is skipped."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from megatron.trainer.common.extras import extras


def needs_extra(*names: str) -> pytest.MarkDecorator:
    """A mark that skips a test where one of these extras is absent."""
    absent = sorted({*names} - {extra.name for extra in extras()})
    return pytest.mark.skipif(bool(absent), reason=f"needs the extra {', '.join(absent)}")


def of_extra(module: str) -> Any:
    """A module of an extra; skips the test, or the file that asks at its top, where that is absent.

    Args:
        module: its full name, of the extra's package or of its tests, `tests.extras.NAME`.
    """
    name = module.partition(".extras.")[2].partition(".")[0]
    if name not in {extra.name for extra in extras()}:
        pytest.skip(f"needs the extra {name}", allow_module_level=True)
    return importlib.import_module(module)
