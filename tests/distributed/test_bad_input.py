"""What a user gets wrong ends in one line that names the flag and the fix, and spoils nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.logging.metrics import read_metrics
from tests.helpers.examples import with_values
from tests.helpers.jobs import TEXT, TINY, losses_of, train
from tests.helpers.launch import ROOT, RanksResult, run_ranks

SHORT = ["--train-iters", "4"]


def the_error(result: RanksResult, code: int) -> str:
    """The one line of a run that was refused."""
    assert result.returncode == code, result.tail()
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1, result.stderr
    others = [x for x in result.stderr.splitlines() if x not in lines and "error on rank" not in x]
    assert result.stdout == "" and others == [], result.tail()
    return lines[0]


def test_below_torchrun_rank_0_says_it_and_the_report_has_it_in_place_of_a_traceback(
    tmp_path: Path,
) -> None:
    """When the run is put together, with a folder that holds a run already."""
    missing = real_data(tmp_path / "no_such", "ByteLevelTokenizer")
    flags = [*SHORT, "--save", str(tmp_path / "save")]
    result = train(flags, 2, tmp_path, base=missing, launcher="torchrun")
    assert result.returncode == 1 and result.stdout == "", result.tail()
    said = [x for x in result.stderr.splitlines() if "no_such.idx" in x]
    assert [x.split(": ")[0].split() for x in said] == [["pretrain_gpt.py"], ["traceback"]], said
    assert "copus_ext" not in result.stderr and result.stderr.count("Traceback") == 1, "torchrun's"


def test_a_refusal_is_one_line_and_2_on_every_rank(tmp_path: Path) -> None:
    flags = [*TINY.split(), *SHORT, "--num-layers", "3", "--pipeline-model-parallel-size", "2"]
    program = [ROOT / "pretrain_gpt.py", *flags, "--run-dir", tmp_path]
    result = run_ranks(program, 2, timeout_s=60, ends_all=False)
    assert result.codes == (2, 2) and "--num-layers 3" in the_error(result, 2)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = folder / "texts"
    texts.mkdir()
    shutil.copy(Path(shutil.__file__), texts)
    command = [ROOT / "tools/preprocess_data.py", "--input", texts, "--output-prefix", folder / "d"]
    run_ranks(command, 1, timeout_s=120, launcher="direct").check()
    return folder / "d_text_document"


def real_data(path: Path | str, tokenizer: str) -> str:
    values = {"--vocab-size": None, "--tokenizer-type": tokenizer, "--data-path": str(path)}
    return " ".join([*with_values(TINY, values), "--split", "1,0,0"])


def test_data(tmp_path: Path, data: Path) -> None:
    missing = real_data(tmp_path / "no_such", "ByteLevelTokenizer")
    line = the_error(train(SHORT, 1, tmp_path, base=missing), 2)
    assert "--data-path" in line and "no_such.idx" in line
    too_small = real_data(data, "NullTokenizer --vocab-size 50")
    line = the_error(train(SHORT, 1, tmp_path, base=too_small), 2)
    assert "vocabulary has 51 tokens" in line and "--tokenizer-type" in line
    cut = tmp_path / "cut"
    shutil.copy(f"{data}.idx", f"{cut}.idx")
    Path(f"{cut}.bin").write_bytes(Path(f"{data}.bin").read_bytes()[:-10])
    line = the_error(train(SHORT, 1, tmp_path, base=real_data(cut, "ByteLevelTokenizer")), 2)
    assert "cut.bin" in line and "preprocess_data.py" in line


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_the_run_becomes_what_it_was(
    tmp_path: Path,
) -> None:
    save = tmp_path / "save"
    flags = ["--train-iters", "6", "--save", str(save), "--save-interval", "2"]
    train([*flags], 2, tmp_path).check()
    whole = losses_of(tmp_path)
    assert files.complete_iterations(save) == [2, 4, 6]
    load = [*flags, "--load", str(save)]

    newest = next(files.folder_of(save, 6).glob("*.distcp"))
    flip_byte(newest)
    flip_byte(next(files.folder_of(save, 4).glob("*.distcp")))
    (files.folder_of(save, 4) / files.MANIFEST).unlink()
    line = the_error(train([*load, "--no-ckpt-fallback"], 2, tmp_path), 1)
    assert newest.name in line and "--ckpt-step 4" in line
    line = the_error(train([*load, "--ckpt-step", "4"], 1, tmp_path), 1)
    assert all(word in line for word in (files.MANIFEST, "--ckpt-trust-unverified")), line
    assert "--ckpt-step 2" in line

    again = train(load, 2, tmp_path).check()
    said = [line for line in again.stdout.splitlines() if line.startswith("ALERT: ")]
    assert len(said) == 1 and newest.name in said[0] and "from iteration 2" in said[0]
    assert "(iteration 2)" in again.stdout
    records = read_metrics(tmp_path)
    faults = [r["line"] for r in records if r["kind"] == "fault"]
    assert len(faults) == 2 and newest.name in faults[0] and files.MANIFEST in faults[1]
    steps = [r for r in records if r["kind"] == "step"]
    assert [s["consumed_samples"] for s in steps] == [8, 16, 24, 32, 40, 48]
    assert losses_of(tmp_path) == whole
    assert files.read_latest(save) == 6
    assert [files.damage(files.folder_of(save, i)) for i in (2, 4, 6)] == [[], [], []]


def test_what_a_checkpoint_forbids_and_what_it_gives(tmp_path: Path) -> None:
    save = tmp_path / "save"
    train([*SHORT, "--save", str(save)], 1, tmp_path / "first").check()
    load = ["--load", str(save)]
    for change, flag in (
        (["--hidden-size", "64"], "--hidden-size"),
        (["--seed", "7"], "--seed"),
        (["--lr", "0.5"], "--lr"),
        (["--vocab-size", "5000"], "--tokenizer-type"),
    ):
        line = the_error(train([*SHORT, *load, *change], 1, tmp_path / "refused"), 2)
        assert flag in line, line
    fresh = train([*SHORT, *load, "--finetune", "--seed", "7"], 1, tmp_path / "finetune").check()
    assert "iteration        1/" in fresh.stdout
    first, tuned = losses_of(tmp_path / "first"), losses_of(tmp_path / "finetune")
    assert len(tuned) == 4 and max(tuned) < min(first)
    few = f"{TEXT} --micro-batch-size 1 "
    few += "--global-batch-size 8 --seq-length 32 --lr 1e-3 --eval-iters 0 --use-checkpoint-args"
    more = ["--train-iters", "4", *load, "--no-load-optim", "--finetune"]
    result = train(more, 1, tmp_path / "shape", base=few).check()
    assert "num_attention_heads" in result.stdout
    assert losses_of(tmp_path / "shape")[0] == pytest.approx(tuned[0], rel=0.2)
    nothing = ["--load", str(tmp_path / "empty"), "--exit-on-missing-checkpoint"]
    line = the_error(train([*SHORT, *nothing], 1, tmp_path / "none"), 1)
    assert "--load" in line and "no checkpoint" in line
