"""What several files compare with, made once for all workers of pytest-xdist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers.jobs import ENDLESS, losses_of, train
from tests.helpers.one_rank import cpu_of_one

UNINTERRUPTED_STEPS = 60


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this session have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def uninterrupted(shared_folder: Path) -> list[float]:
    """Losses of the first 60 steps of `TINY` with `ENDLESS`, on two ranks that nothing disturbs."""
    run = shared_folder / "uninterrupted"
    with FileLock(f"{run}.lock"):
        if not run.exists():
            work = run.with_name("uninterrupted.unfinished")
            train([*ENDLESS, "--exit-interval", str(UNINTERRUPTED_STEPS)], 2, work).check()
            work.rename(run)
    losses = losses_of(run)
    assert len(losses) == UNINTERRUPTED_STEPS
    return losses


@pytest.fixture(scope="module")
def single_process_group() -> Iterator[None]:
    """A world of one rank, in which megatron-core loads a checkpoint."""
    with cpu_of_one():
        yield
