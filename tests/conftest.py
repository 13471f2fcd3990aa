"""Marks by folder, time limits, and settings that make a failure repeat."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.helpers import processes
from tests.helpers.text import VARIABLE

TESTS = Path(__file__).parent
UNIT_TIMEOUT_S = 120

# The whole suite draws some thousand cases; a property that needs more says so itself.
hypothesis.settings.register_profile("local", deadline=None, max_examples=30)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """One thread per process, as on ranks that share a machine; none outlives this one."""
    # Imports leave no garbage, and searching for it would take a quarter of their time.
    gc.disable()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    processes.guard_session()
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
    if "PYTEST_XDIST_WORKER" in os.environ:
        # It runs files that import megatron-core: half the time without torch's compiler.
        from megatron.trainer.resilience.env_checks import import_core

        import_core()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names flags without the folder of the text, which every worker of pytest-xdist has to
    itself: all must collect the same tests."""
    prefix = os.environ.get(VARIABLE)
    if prefix is None or not isinstance(val, str) or prefix not in val:
        return None
    return val.replace(prefix, "TEXT")


def pytest_collection_finish() -> None:
    """Spares every search for garbage the hundreds of thousands of objects of modules."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives every test the mark of its folder, and skips what this machine cannot run."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder == "extras":
            kinds = {"ranks": "distributed", "slurm": "slurm"}
            folder = kinds.get(item.path.name.split("_")[1], "unit")
        if folder in ("unit", "distributed", "slurm", "browser", "gpu"):
            item.add_marker(getattr(pytest.mark, folder))
        if folder == "unit" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT_TIMEOUT_S), append=False)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One SLURM cluster that is up for all tests of it, or the reason why there is none."""
    from tests.slurm.cluster import cluster_up, missing

    if reason := missing():
        pytest.skip(reason)
    with cluster_up(tmp_path_factory.mktemp("jobs")) as up:
        yield up


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
