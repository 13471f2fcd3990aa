"""What `generate()` of transformers reads goes into a checkpoint and comes out of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from megatron.core.inference.sampling_params import SamplingParams

from megatron.trainer.config.arguments import parse_args, with_checkpoint_args
from megatron.trainer.extras.convert.convert import convert
from megatron.trainer.extras.convert.target import Changes
from megatron.trainer.extras.huggingface import exchange
from megatron.trainer.extras.inspect_checkpoint.archive import open_archive
from tests.helpers.checkpoints import FLAGS, make_checkpoint
from tests.helpers.of_extras import of_extra
from tests.helpers.tokenizer_files import gpt2_files, hugging_face_folder, sentence_piece_file

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.unit

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 350,
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "granite": {"attention_multiplier": 8**-0.5},
    "mixtral": {"num_local_experts": 2},
    "qwen2_moe": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_moe": {
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    },
}
IDS = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4}
GENERATION = {
    **IDS,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "max_new_tokens": 7,
    "transformers_version": "4.51.0",
}


def model_in(folder: Path, family: str, *, fields: dict[str, Any], generation: Any) -> Path:
    """A model of transformers with a tokenizer, and this very `generation_config.json`."""
    config = transformers.AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    record = json.loads((folder / "config.json").read_text())
    for name in IDS:
        record.pop(name, None)
    (folder / "config.json").write_text(json.dumps({**record, **fields}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    hugging_face_folder("llama3_bos", folder)
    return folder


def check_same_generation(got: Path, expected: Path) -> None:
    ours, theirs = (transformers.AutoConfig.from_pretrained(f) for f in (got, expected))
    for name in (*IDS, "use_cache"):
        assert getattr(ours, name, None) == getattr(theirs, name, None), name
    model, original = (
        transformers.AutoModelForCausalLM.from_pretrained(f).generation_config.to_dict()
        for f in (got, expected)
    )
    assert {**model, "_from_model_config": None} == {**original, "_from_model_config": None}
    text = "the cat </s> sat"
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(f) for f in (got, expected))
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.special_tokens_map == theirs.special_tokens_map
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (got / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_generate_reads_comes_back_from_an_import(family: str, tmp_path: Path) -> None:
    source = model_in(tmp_path / "hf", family, fields=IDS, generation=GENERATION)
    original = shutil.copytree(source, tmp_path / "original")
    exchange.load(source, tmp_path / "core", Changes())
    # Another layout keeps it, and the source is not needed again.
    shutil.rmtree(source)
    convert(tmp_path / "core", tmp_path / "other", Changes(dtype="bf16", optimizer="none"))
    exchange.save(tmp_path / "other", tmp_path / "out", Changes(), verify=True)
    check_same_generation(tmp_path / "out", original)
    written = (tmp_path / "out" / "generation_config.json").read_bytes()
    assert written == (original / "generation_config.json").read_bytes()


@pytest.mark.parametrize(
    ("fields", "generation"),
    [
        ({}, None),
        ({"eos_token_id": 3}, None),
        ({"eos_token_id": None, "bos_token_id": None}, None),
        ({"eos_token_id": 3, "temperature": 0.5, "use_cache": False}, None),
        ({}, {"eos_token_id": 2}),
    ],
)
def test_an_import_adds_no_field_that_the_source_lacks(
    fields: dict[str, Any], generation: Any, tmp_path: Path
) -> None:
    source = model_in(tmp_path / "hf", "llama", fields=fields, generation=generation)
    exchange.load(source, tmp_path / "core", Changes())
    exchange.save(tmp_path / "core", tmp_path / "out", Changes())
    check_same_generation(tmp_path / "out", source)
    record = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: record[name] for name in fields} == fields


def test_a_run_that_goes_on_from_an_import_keeps_it(tmp_path: Path) -> None:
    source = model_in(tmp_path / "hf", "llama", fields=IDS, generation=GENERATION)
    exchange.load(source, tmp_path / "core", Changes())
    stored = open_archive(tmp_path / "core", step=None).arguments
    # What `--load core --use-checkpoint-args` makes of it, and a later checkpoint stores.
    flags = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --seq-length 32"
    taken = with_checkpoint_args(parse_args(flags.split()), stored)
    kept = {name: getattr(taken, name) for name in ("tokenizer_type", "tokenizer_model")}
    shape = {name: stored[name] for name in FLAGS if name in stored}
    make_checkpoint(tmp_path / "run", **{**shape, **kept})
    exchange.save(tmp_path / "run", tmp_path / "out", Changes())
    check_same_generation(tmp_path / "out", source)


@pytest.mark.parametrize("way", ["another", "the same elsewhere", "gone", "numbers"])
def test_a_run_from_an_import_exports_the_tokenizer_that_it_was_trained_with(
    way: str, tmp_path: Path
) -> None:
    source = model_in(tmp_path / "hf", "llama", fields=IDS, generation=GENERATION)
    exchange.load(source, tmp_path / "core", Changes())
    own = tmp_path / "own"
    own.mkdir()
    flags: dict[str, Any] = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(own)}
    if way == "another":
        hugging_face_folder("qwen_im_end", own)
    elif way == "the same elsewhere":
        hugging_face_folder("llama3_bos", own)
    elif way == "numbers":
        flags = {"tokenizer_type": "NullTokenizer", "tokenizer_model": None}
    stored = open_archive(tmp_path / "core", step=None).arguments
    shape = {name: stored[name] for name in FLAGS if name in stored}
    make_checkpoint(tmp_path / "core", iteration=2, **{**shape, **flags})
    result = exchange.save(tmp_path / "core", tmp_path / "out", Changes())
    assert any(str(own) in note for note in result.notes) == (way == "gone")
    if way != "another":
        check_same_generation(tmp_path / "out", source)
        return
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(f) for f in (tmp_path / "out", own))
    assert ours("the cat").input_ids == theirs("the cat").input_ids
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    for name in IDS:
        assert getattr(found, name) == getattr(config, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("ByteLevelTokenizer", {"eos_token_id": 256}),
        ("HuggingFaceTokenizer", {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 6}),
        ("GPT2BPETokenizer", {"eos_token_id": 0}),
        ("Llama2Tokenizer", {"bos_token_id": 1, "eos_token_id": 2}),
        ("SentencePieceTokenizer", {"bos_token_id": 1, "eos_token_id": None}),
    ],
)
def test_a_run_of_the_trainer_exports_the_ids_of_its_tokenizer(
    kind: str, ids: dict[str, Any], tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"tokenizer_type": kind, "vocab_size": None, "padded_vocab_size": 384}
    theirs: Any = None
    if kind == "HuggingFaceTokenizer":
        folder = hugging_face_folder("qwen_im_end", tmp_path)
        # Of another network: no part of it is taken.
        (folder / "config.json").write_text(json.dumps({"hidden_size": 7, "eos_token_id": 9}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ids = {name: getattr(theirs, name) for name in IDS}
        flags["tokenizer_model"] = str(folder / "tokenizer.json")
    elif kind == "GPT2BPETokenizer":
        flags |= dict(zip(("vocab_file", "merge_file"), map(str, gpt2_files(tmp_path))))
        theirs = transformers.GPT2Tokenizer(vocab=flags["vocab_file"], merges=flags["merge_file"])
    elif kind != "ByteLevelTokenizer":
        model = sentence_piece_file(tmp_path)
        flags["tokenizer_model"] = str(model)
        if kind == "SentencePieceTokenizer":
            import sentencepiece

            # <EOD> is the third of those that it adds behind the pieces.
            size = sentencepiece.SentencePieceProcessor(str(model)).get_piece_size()
            ids = {**ids, "eos_token_id": size + 2}
    make_checkpoint(tmp_path / "run", **flags)
    result = exchange.save(tmp_path / "run", tmp_path / "out", Changes())
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    for name in IDS:
        assert getattr(found, name) == getattr(config, name) == ids.get(name), name
    if theirs is not None:
        ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        text = "def f(x): the cat"
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.eos_token_id == theirs.eos_token_id
    else:
        assert kind == "ByteLevelTokenizer" or any("left to you" in x for x in result.notes)


def test_a_tokenizer_that_is_gone_is_told(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    flags: dict[str, Any] = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": gone}
    make_checkpoint(tmp_path / "run", **flags)
    result = exchange.save(tmp_path / "run", tmp_path / "out", Changes())
    assert any("eos_token_id is not known" in note and "gone" in note for note in result.notes)
    record = json.loads((tmp_path / "out" / "config.json").read_text())
    assert record["eos_token_id"] is None and record["bos_token_id"] is None
    assert not (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_text_ends_at_each_end_of_the_imported_model(name: str, tmp_path: Path) -> None:
    """Where there is no `generation_config.json`, as in `transformers`, `config.json` says them."""
    prompt, folder = "the cat sat", tmp_path / "core" / "hugging_face"
    source = model_in(tmp_path / "hf", "llama", fields={}, generation=GENERATION)
    exchange.load(source, tmp_path / "core", Changes())
    generate = of_extra("megatron.trainer.extras.generate.model")
    greedy = SamplingParams(num_tokens_to_generate=6, top_k=generate.GREEDY)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    with generate.open_generator(tmp_path / "core", device="cpu") as model:
        whole = model.generate(prompt, greedy, seed=1).generated_tokens
    end = whole[-1]
    (folder / "generation_config.json").unlink()
    record = json.loads((folder / "config.json").read_text()) if name == "config.json" else {}
    record["eos_token_id"] = [2, end]
    (folder / name).write_text(json.dumps(record))
    with generate.open_generator(tmp_path / "core", device="cpu") as model:
        cut = model.generate(prompt, greedy, seed=1)
    assert cut.generated_tokens == whole[: whole.index(end)] and cut.finish_reason == "eod"
