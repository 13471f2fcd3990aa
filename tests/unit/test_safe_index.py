"""An index of a checkpoint runs no code, and is read whichever Python wrote it."""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron.trainer.checkpoint.safe_index import read_index
from megatron.trainer.common.errors import Refused
from tests.helpers.checkpoints import ITERATION, make_checkpoint


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
    ],
)
def test_an_index_changes_no_class(tmp_path: Path, module: str, name: str) -> None:
    path = tmp_path / ".metadata"
    # GLOBAL, then BUILD with (None, {"is_file": None}): sets an attribute of the class.
    path.write_bytes(f"c{module}\n{name}\n".encode() + b"N}Vis_file\nNs\x86b.")
    with pytest.raises(Refused):
        read_index(path)
    assert callable(Path("x").is_file) and not hasattr(Metadata, "is_file")


class _AsEarlyPythons(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_an_index_of_an_early_python_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a") / f"iter_{ITERATION:07d}"
    before = read_index(folder / ".metadata")
    out = io.BytesIO()
    _AsEarlyPythons(out).dump(pickle.loads((folder / ".metadata").read_bytes()))
    assert b"getattr" in out.getvalue()
    (folder / ".metadata").write_bytes(out.getvalue())
    assert read_index(folder / ".metadata") == before


def test_an_index_with_a_path_is_read_whichever_python_wrote_it(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a") / f"iter_{ITERATION:07d}"
    before = read_index(folder / ".metadata")
    # What we convert holds none, which torch under another release could not read.
    assert before.storage_meta is None
    before.storage_meta = StorageMeta(checkpoint_id=tmp_path)
    for module in ("pathlib", "pathlib._local"):
        data = pickle.dumps(before, protocol=2)
        own = f"c{type(tmp_path).__module__}\n".encode()
        assert own in data
        (folder / ".metadata").write_bytes(data.replace(own, f"c{module}\n".encode()))
        assert read_index(folder / ".metadata") == before


@pytest.mark.parametrize("name", ["touch", "__subclasses__", "mro"])
def test_getattr_reaches_nothing_but_members(tmp_path: Path, name: str) -> None:
    path = tmp_path / ".metadata"
    # GLOBAL getattr, GLOBAL of the class, the name, TUPLE2, REDUCE.
    planner = "ctorch.distributed.checkpoint.planner\nWriteItemType\n"
    for kind in ("cpathlib\nPosixPath\n", planner):
        path.write_bytes(f"cbuiltins\ngetattr\n{kind}V{name}\n".encode() + b"\x86R.")
        with pytest.raises(Refused, match="does not belong"):
            read_index(path)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(Refused, match="does not belong"):
        read_index(tmp_path / ".metadata")
    assert not (tmp_path / "ran").exists()
