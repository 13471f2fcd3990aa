"""Nothing here runs without the environment of `setup.sh`."""

from __future__ import annotations

import pytest

from tests.gpu_stub.on_stub import missing


@pytest.fixture(autouse=True, scope="session")
def stub() -> None:
    """The stub of CUDA, or the reason why there is none."""
    if reason := missing():
        pytest.skip(reason)
