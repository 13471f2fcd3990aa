"""Runs `main(folder, ...)` of a worker module on every rank of a launch.

As a program it is each of these ranks: `on_ranks.py MODULE FOLDER ARGUMENT...`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The folder of this file would hide modules of the same names as those beside it.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.helpers.jobs import join
from tests.helpers.launch import Launcher, run_ranks

_RESULT = "result.json"


def program(worker: str, folder: Path, *arguments: str) -> list[str | Path]:
    """Returns what each rank runs."""
    module = worker if "." in worker else f"tests.distributed.{worker}"
    return [Path(__file__), module, folder, *arguments]


def on_ranks(
    worker: str,
    folder: Path,
    ranks: int,
    *arguments: str,
    timeout_s: float,
    launcher: Launcher = "direct",
) -> Any:
    """Returns what `main` of `tests.distributed.WORKER`, or of a module that is named with its
    packages, returns on rank 0, by way of JSON.

    Raises:
        AssertionError: a rank failed.
        RanksHung: not done in time.
    """
    own = program(worker, folder, *arguments)
    result = run_ranks(own, ranks, timeout_s=timeout_s, launcher=launcher).check()
    assert result.orphans == 0
    return json.loads((folder / _RESULT).read_text())


def ranks_fixture(
    worker: str,
    ranks: int,
    *arguments: str,
    timeout_s: float,
    launcher: Launcher = "direct",
    has_nightly: bool = False,
) -> Any:
    """A fixture of one launch for all tests of a module; see `on_ranks`. With `has_nightly` the
    worker's last argument is `nightly.ALL` if nightly tests were chosen."""
    import pytest

    from tests.helpers.nightly import words_of

    @pytest.fixture(scope="module")
    def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
        folder = tmp_path_factory.mktemp(worker.replace(".", "_"))
        words = [*arguments, *(words_of(request) if has_nightly else [])]
        return on_ranks(worker, folder, ranks, *words, timeout_s=timeout_s, launcher=launcher)

    return found


def main() -> None:
    name, folder, *arguments = sys.argv[1:]
    join()
    import torch.distributed as dist

    result = importlib.import_module(name).main(Path(folder), *arguments)
    if dist.get_rank() == 0:
        (Path(folder) / _RESULT).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
