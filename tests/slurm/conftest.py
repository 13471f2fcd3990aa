"""One cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, cluster_up, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that is up, or the reason why there is none."""
    if reason := missing():
        pytest.skip(reason)
    with cluster_up(tmp_path_factory.mktemp("jobs")) as up:
        yield up
