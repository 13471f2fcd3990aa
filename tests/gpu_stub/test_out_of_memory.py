"""A GPU of the stub that is full: torch's own allocator says so."""

from __future__ import annotations

import json
from pathlib import Path

from copus_ext.controller.out_of_memory import FILE
from tests.gpu_stub.launch import train_on_stub
from tests.helpers.jobs import losses_of, steps_of

FLAGS = "--bf16 --seq-length 256 --max-position-embeddings 256 --train-iters 3"
FULL = {"STUB_GPU_BYTES": str(725 << 20)}
"""A context takes 600 MiB. Eight samples do not fit into what is left, four do."""


def test_a_plain_run_ends_with_the_words_of_torch(tmp_path: Path) -> None:
    flags = [*FLAGS.split(), "--micro-batch-size", "8"]
    result = train_on_stub(flags, 1, tmp_path / "run", env=FULL)
    assert result.returncode == 1 and result.orphans == 0
    assert "torch.OutOfMemoryError: CUDA out of memory" in result.stderr


def test_the_next_launch_takes_a_smaller_micro_batch(tmp_path: Path) -> None:
    run, save = tmp_path / "run", tmp_path / "save"
    flags = [*FLAGS.split(), "--save", str(save), "--load", str(save), "--micro-batch-size", "8"]
    copus = ["--copus", "--copus-policy", "static"]
    first = train_on_stub([*flags, *copus], 1, run, env=FULL)
    assert first.returncode == 1 and "CUDA out of memory" in first.stderr
    (line,) = (json.loads(line) for line in (run / FILE).read_text().splitlines())
    assert (line["micro_batch_size"], line["seq_length"], line["of_host"]) == (8, 256, False)
    second = train_on_stub([*flags, *copus], 1, run, env=FULL).check()
    assert "micro-batch 4 in place of 8" in second.stdout
    assert {step["micro_batch_size"] for step in steps_of(run)} == {4}
    # The micro-batch counts for nothing but memory.
    train_on_stub([*FLAGS.split(), "--micro-batch-size", "4"], 1, tmp_path / "plain").check()
    assert losses_of(run) == losses_of(tmp_path / "plain")
