"""Python 3.12's `typing.override` for 3.11, which the newest megatron-core imports."""

import typing

import typing_extensions

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
