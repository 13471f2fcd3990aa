"""Python 3.12's `typing.override` for 3.11, which the newest megatron-core imports."""

import typing
from typing import Any

import typing_extensions

if not hasattr(typing, "override"):
    module: Any = typing
    module.override = typing_extensions.override
