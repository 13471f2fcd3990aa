"""What the converter does with a checkpoint as with any other target, also with this format."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.formats import format_of, model_formats
from megatron.trainer.common.errors import Refused, UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.extras.convert import command as convert_checkpoint
from megatron.trainer.extras.convert import writing
from megatron.trainer.extras.convert.target import Changes
from megatron.trainer.extras.convert.writing import Piece
from megatron.trainer.extras.huggingface import config_json, exchange
from megatron.trainer.extras.huggingface.safetensors_files import INDEX, SafetensorsFolder
from megatron.trainer.extras.inspect_checkpoint import command as inspect_checkpoint
from tests.distributed.worker_features import MODELS
from tests.extras.convert.checkpoints import cut_like_ranks
from tests.helpers.checkpoints import MIXTURE, command, index_of, make_checkpoint
from tests.helpers.of_extras import of_extra
from tests.helpers.written_runs import WrittenRun

NORM = "decoder.final_layernorm.weight"
AS_MODEL = ("--format", "hf")


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str]:
    code, _, err = command(capsys, convert_checkpoint, *args)
    return code, err


def test_a_model_is_told_from_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "hf" in model_formats()
    source = make_checkpoint(tmp_path / "a")
    assert format_of(source) is None
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    assert format_of(tmp_path / "hf") is not None
    code, _, err = command(capsys, inspect_checkpoint, tmp_path / "hf")
    assert code == 2 and "is a Hugging Face model" in err and "convert_checkpoint" in err
    said = r"holds no checkpoint; make one with .*convert"
    generate = of_extra("megatron.trainer.extras.generate.model")
    with pytest.raises(UsageError, match=said), generate.open_model(tmp_path / "hf"):
        pass


def test_a_run_that_has_not_saved_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run writes a `config.json` of its own, long before its first checkpoint."""
    run_dir = tmp_path / "run"
    WrittenRun(run_dir)
    words = [*" ".join(MODELS["llama"]).split(), "--train-iters", "1", "--global-batch-size", "2"]
    (run_dir / "config.json").write_text(json.dumps(resolve(parse_args(words), 1).flat()))
    assert format_of(run_dir) is None
    out = tmp_path / "out"
    for code, _, err in (
        command(capsys, inspect_checkpoint, run_dir),
        command(capsys, convert_checkpoint, run_dir, out),
        command(capsys, convert_checkpoint, run_dir, out, *AS_MODEL),
    ):
        assert code == 3 and "holds no complete checkpoint yet" in err and "Hugging" not in err
    with (
        pytest.raises(UsageError, match="holds no checkpoint; give the --save"),
        of_extra("megatron.trainer.extras.generate.model").open_model(run_dir),
    ):
        pass
    # A copy that lost its tracker still has what --ckpt-step names.
    source = make_checkpoint(tmp_path / "a")
    (source / files.TRACKER).unlink()
    shutil.copy(run_dir / "config.json", source)
    step = str(files.complete_iterations(source)[-1])
    assert command(capsys, inspect_checkpoint, source, "--ckpt-step", step)[0] == 0
    assert command(capsys, convert_checkpoint, source, out, "--ckpt-step", step)[0] == 0
    # Nor is the file of another program a model.
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"name": "x"}')
    code, _, err = command(capsys, inspect_checkpoint, other)
    assert code == 3 and err.endswith("holds no complete checkpoint\n")


def test_padding_can_go_but_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = make_checkpoint(tmp_path / "known", tensor_model_parallel_size=1)
    unknown = make_checkpoint(
        tmp_path / "unknown", tokenizer_type="HuggingFaceTokenizer", vocab_size=None
    )
    for number, (source, flags, code, words) in enumerate(
        (
            (known, ("--vocab", 101), 0, ""),  # 100 and the end of the document
            (known, ("--vocab", 100), 3, "101"),
            (known, ("--vocab", 110, "--true-vocab", 50), 3, "--true-vocab 50"),
            (unknown, ("--vocab", 110), 2, "--true-vocab"),
            (unknown, ("--vocab", 110, "--true-vocab", 105), 0, ""),
            (unknown, ("--true-vocab", 500), 2, "--true-vocab 500"),
        )
    ):
        made = tmp_path / str(number)
        got, err = run(capsys, source, made, *AS_MODEL, "--verify", *flags)
        assert got == code and words in err and made.exists() is (code == 0), err


@pytest.mark.parametrize(
    ("more", "flags", "words"),
    [
        ({}, ("--tp", 2), "--tp goes with checkpoints"),
        ({}, ("--cp", 2), "--cp goes with checkpoints"),
        (MIXTURE, ("--ep", 2), "--ep goes with checkpoints"),
        ({}, ("--optimizer", "plain"), "--optimizer plain"),
        ({}, ("--max-shard-gb", 0), "--max-shard-gb"),
    ],
)
def test_what_a_model_does_not_have_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: dict[str, Any],
    flags: tuple[Any, ...],
    words: str,
) -> None:
    source = make_checkpoint(tmp_path / "a", **more)
    code, err = run(capsys, source, tmp_path / "b", *AS_MODEL, *flags)
    assert code == 2 and words in err and err.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_weights_are_made_from_masters_that_are_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(pieces: list[Piece]) -> None:
        i = index_of(pieces, f"optimizer.state.param.{NORM}")
        data = pieces[i].make() + 1
        pieces[i] = dataclasses.replace(pieces[i], make=data.clone)

    source = make_checkpoint(tmp_path / "a", change=spoil)
    code, err = run(capsys, source, tmp_path / "b", "--dtype", "fp32", *AS_MODEL)
    assert code == 3 and NORM in err and "without --dtype" in err
    assert run(capsys, source, tmp_path / "b", *AS_MODEL, "--verify")[0] == 0


def test_moments_do_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(pieces: list[Piece]) -> None:
        del pieces[index_of(pieces, f"optimizer.state.exp_avg.{NORM}")]

    source = make_checkpoint(tmp_path / "a", change=spoil)
    assert run(capsys, source, tmp_path / "b")[0] == 3
    assert run(capsys, source, tmp_path / "b", *AS_MODEL, "--dtype", "fp32")[0] == 0


def test_rectangles_cut_anywhere_are_put_together(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a", change=cut_like_ranks, file_bytes=10_000, num_layers=2)
    assert exchange.save(source, tmp_path / "hf", Changes(), verify=True).num_compared


def test_every_file_is_on_the_disk_before_the_result_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(writing, "_sync", synced.append)
    source = make_checkpoint(tmp_path / "a")
    synced.clear()
    exchange.save(source, tmp_path / "to", Changes())
    (there,) = {p for p in synced if p.name.startswith(".to")}
    made = {p.relative_to(tmp_path / "to") for p in (tmp_path / "to").rglob("*")}
    assert made == {p.relative_to(there) for p in synced if there in p.parents}


@pytest.mark.parametrize("model", MODELS)
def test_networks_that_no_family_has_are_refused(model: str) -> None:
    import torch

    flags = [*" ".join(MODELS[model]).split(), "--train-iters", "1", "--global-batch-size", "2"]
    arguments = resolve(parse_args(flags), 1).flat()
    with pytest.raises(Refused, match=r"config\.json cannot express"):
        config_json.config_of(arguments, 128, torch.float32)


@pytest.mark.parametrize("depth", [300, 900, 20_000])
def test_what_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    text = '{"weight_map": ' + "[" * depth + "]" * depth + "}"
    for name in (exchange.CONFIG, INDEX):
        (tmp_path / name).write_text(text)
    with pytest.raises(Refused, match="too deeply"):
        exchange._read_config(tmp_path / exchange.CONFIG)
    with pytest.raises(Refused, match="too deeply"):
        SafetensorsFolder(tmp_path)
