"""Which megatron-core runs: 0.16.1 to 0.19. Where releases differ, code asks `since`."""

from __future__ import annotations

import functools

from packaging.version import Version


@functools.cache
def since(release: str) -> bool:
    """Whether the megatron-core in use is of this release or a later one, such as "0.17"."""
    from megatron.core import package_info

    return Version(package_info.__version__) >= Version(release)
