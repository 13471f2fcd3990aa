"""Two emulated nodes with a slow link: a live job leaves data parallelism."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT

pytestmark = pytest.mark.alone


@pytest.mark.timeout(800)
def test_a_slow_link_makes_a_live_job_change_its_layout(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    shutil.copy(argparse.__file__, tmp_path / "texts")
    data = [sys.executable, "tools/preprocess_data.py", "--input", tmp_path / "texts"]
    data += ["--tokenizer-type", "ByteLevelTokenizer", "--output-prefix", tmp_path / "d"]
    subprocess.run([*data, "--append-eod"], cwd=ROOT, check=True, capture_output=True)
    bench = [sys.executable, "-m", "bench.slow_link", "layout"]
    bench += ["--data-path", tmp_path / "d_text_document"]
    bench += ["--rate", "300", "--samples", "160", "--runs", "all"]
    bench += ["--output", tmp_path / "result.json"]
    done = subprocess.run(bench, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "result.json").read_text())["runs"][0]
    first = run["decisions"][0]
    now = first["rows"][first["current"]]
    same_batch = [r for r in first["rows"] if r["global_batch_size"] == now["global_batch_size"]]
    pipeline = max(r["samples_per_s"] for r in same_batch if (r["pp"], r["vpp"]) == (2, 1))
    assert pipeline > 2 * now["samples_per_s"], "nothing in bulk crosses the link"
    assert [m["outcome"]["kind"] for m in run["moves"]] == ["moved"], run["decisions"]
    assert run["moves"][0]["iteration"] <= 8
    assert run["curves"]["layout"][-1].startswith("tp1.pp2.")
    assert run["decided_again_the_same"] == len(run["decisions"])
