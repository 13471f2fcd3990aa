"""The newest megatron-core and the pinned one train alike; see `prepare` for how to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.common.core_version import since
from tests.helpers.launch import ROOT, free_port
from tests.newest_core.losses import MODELS, STEPS
from tests.newest_core.prepare import SITE, VERSION

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not since("0.19"), reason="PYTHONPATH lacks the newest megatron-core"),
]


def losses(folder: Path, path: str) -> dict[str, Any]:
    folder.mkdir()
    words = [sys.executable, ROOT / "tests" / "newest_core" / "losses.py", folder]
    own = {"PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        words, env={**os.environ, **own}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "losses.json").read_text())


def test_four_models_have_the_same_losses_and_gradient_norms(tmp_path: Path) -> None:
    here = os.environ["PYTHONPATH"]
    assert str(SITE) in here.split(os.pathsep)
    new, pinned = losses(tmp_path / "new", here), losses(tmp_path / "pinned", str(ROOT))
    assert new.pop("version").startswith(VERSION)
    assert pinned.pop("version").startswith("0.16.1")
    assert new.keys() == pinned.keys() == MODELS.keys()
    for name in MODELS:
        assert len(new[name]) == STEPS
        for a, b in zip(new[name], pinned[name], strict=True):
            assert a == pytest.approx(b, rel=1e-6), name
