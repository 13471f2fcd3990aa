"""Any release reads, checks and converts a checkpoint that megatron-core 0.19.2 has written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.safe_index import (
    COMMON_KEY,
    METADATA,
    file_names,
    read_common,
    read_index,
)
from megatron.trainer.common.core_version import since
from megatron.trainer.common.errors import Refused
from tests.helpers.checkpoints import command, common_file
from tests.helpers.launch import run_in_fork
from tests.helpers.of_extras import needs_extra, of_extra
from tests.newest_core.write_checkpoint import PROMPT, scores

pytestmark = pytest.mark.unit

STORED = Path(__file__).parent / "data" / "core_0.19.2"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copytree(STORED, tmp_path / "c")
    return tmp_path / "c"


def expected() -> Any:
    found = json.loads((STORED / "expected.json").read_text())
    assert found["prompt"] == PROMPT
    return pytest.approx(found["scores"], abs=1e-5)


@needs_extra("generate")
def test_its_model_expects_what_it_did_there(checkpoint: Path) -> None:
    assert run_in_fork(scores, checkpoint) == expected()


def test_its_common_state_lies_in_a_file_with_tensors(checkpoint: Path) -> None:
    folder = files.folder_of(checkpoint, 2)
    assert not (folder / files.COMMON).exists()
    common = read_common(folder)
    assert common["iteration"] == 2 and common["args"].hidden_size == 16
    assert files.OUR_KEY in common


def test_a_stray_file_is_not_taken_for_it(checkpoint: Path) -> None:
    folder = files.folder_of(checkpoint, 2)
    torch.save({"iteration": 99}, folder / files.COMMON)
    assert read_common(folder)["iteration"] == 2


def test_a_link_in_place_of_its_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = files.folder_of(checkpoint, 2)
    path = common_file(folder).rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(path)
    with pytest.raises(Refused, match="outside"):
        read_common(folder)


@pytest.mark.parametrize("place", [0, 200, -30])
def test_a_changed_byte_of_it_is_found(checkpoint: Path, place: int) -> None:
    folder = files.folder_of(checkpoint, 2)
    where = (read_index(folder / METADATA).storage_data or {})[COMMON_KEY]
    path = folder / where.relative_path
    data = bytearray(path.read_bytes())
    data[where.offset + place % where.length] ^= 1
    path.write_bytes(data)
    with pytest.raises(Refused, match=path.name):
        read_common(folder)


@needs_extra("generate")
def test_it_is_converted_to_what_this_release_writes(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_checkpoint = of_extra("megatron.trainer.extras.convert.command")
    inspect_checkpoint = of_extra("megatron.trainer.extras.inspect_checkpoint.command")
    ways = (("copied", ("--dp", 2)), ("again", ("--dp", 4)), ("rewritten", ("--dtype", "fp32")))
    for target, words in ways:
        source = tmp_path / "copied" if target == "again" else checkpoint
        where = tmp_path / target
        code, out, err = command(capsys, convert_checkpoint, source, where, *words, "--verify")
        assert code == 0, out + err
        folder = files.folder_of(where, 2)
        assert (folder / files.COMMON).exists() != since("0.19")
        has_object = COMMON_KEY in (read_index(folder / METADATA).storage_data or {})
        assert has_object == since("0.19")
        assert read_common(folder)["iteration"] == 2
        found = {path.name for path in folder.iterdir()}
        assert found == {files.MANIFEST, *file_names(read_index(folder / METADATA))}
        assert run_in_fork(scores, where) == expected()
        assert command(capsys, inspect_checkpoint, where, "--verify")[0] == 0
