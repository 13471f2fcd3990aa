"""Token numbers are those of transformers and megatron-core, for small tokenizers of all kinds."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import DataConfig
from megatron.trainer.data.datasets import build_datasets
from megatron.trainer.data.preprocess import Job, preprocess
from megatron.trainer.data.tokenizer import NO_EOD, build_tokenizer, require_eod, tokens_line
from tests.helpers.tokenizer_files import (
    HUGGING_FACE,
    PROSE,
    gpt2_files,
    hugging_face_folder,
    sentence_piece_file,
    tiktoken_file,
)

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")
pytest.importorskip("tiktoken")

pytestmark = pytest.mark.unit

SPECIAL = " ".join(("<s>", "</s>", "<|im_end|>", "<|endoftext|>", "[SEP]", "<EOD>", "<unk>", "<0>"))
TEXTS = (
    "",
    PROSE,
    " the  cat\n\tsat\r\n",
    "héß 日本 👩‍👩‍👧",
    f"the cat {SPECIAL} sat",
    "the</s>cat<|im_end|>\n",
    "<s>the cat",
)


@pytest.fixture(scope="module", params=sorted(HUGGING_FACE))
def folder(request, tmp_path_factory):
    return hugging_face_folder(request.param, tmp_path_factory.mktemp("tokenizer"))


def hugging_face(folder: Path, **flags: Any) -> Any:
    return build_tokenizer(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), **flags
    )


def core_class(module: str, name: str) -> Any:
    core = pytest.importorskip(f"megatron.core.tokenizers.text.libraries.{module}")
    return getattr(core, name)


def test_a_hugging_face_tokenizer_gives_the_ids_of_transformers(folder):
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = hugging_face(folder)
    for text in TEXTS:
        assert ours.tokenize(text) == theirs(text).input_ids, text
    assert ours.vocab_size == len(theirs)
    if theirs.eos_token_id is not None:
        assert ours.eod == theirs.eos_token_id
    assert ours.around.bos_token_id == theirs.bos_token_id
    assert ours.around.pad_token_id == theirs.pad_token_id


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "BertTokenizer", "LlamaTokenizer"])
def test_files_of_before_give_the_ids_of_transformers(kind, tmp_path):
    if kind == "GPT2Tokenizer":
        gpt2_files(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
    elif kind == "BertTokenizer":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "s", "##at"]
        (tmp_path / "vocab.txt").write_text("\n".join(words))
    else:
        made = sentence_piece_file(tmp_path, model_type="bpe")
        made.rename(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = hugging_face(tmp_path)
    assert [ours.tokenize(text) for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    # Without an end, megatron-core takes the separator.
    wanted = theirs.sep_token_id if kind == "BertTokenizer" else theirs.eos_token_id
    assert (ours.eod, ours.vocab_size) == (wanted, len(theirs))


@pytest.mark.parametrize("adds", [False, True])
def test_a_hugging_face_tokenizer_gives_the_ids_of_megatron_core(folder, adds):
    core = core_class("huggingface_tokenizer", "HuggingFaceTokenizer")
    theirs = core(str(folder), use_fast=True, include_special_tokens=adds)
    ours = hugging_face(folder, tokenizer_hf_include_special_tokens=adds)
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.text_to_ids(text), text
    assert ours.vocab_size == theirs.vocab_size
    assert ours.eod == (NO_EOD if theirs.eod is None else theirs.eod)


def test_the_tokens_around_a_text_are_those_that_it_gets(folder):
    ours = hugging_face(folder)
    plain = hugging_face(folder, tokenizer_hf_include_special_tokens=False)
    around, text = ours.around, "the cat"
    whole = (*around.before, *plain.tokenize(text), *around.after)
    assert ours.tokenize(text) == list(whole)
    assert (plain.around.before, plain.around.after) == ((), ())
    assert hugging_face(folder, legacy_tokenizer=True).tokenize(text) == list(whole)


def test_the_kinds_of_tokenizers_differ_in_what_is_tested(tmp_path):
    """The set above has each answer that the tests ask for at least once."""
    found = {}
    for name in HUGGING_FACE:
        (tmp_path / name).mkdir()
        found[name] = hugging_face(hugging_face_folder(name, tmp_path / name))
    kinds = {(bool(one.around.before), bool(one.around.after)) for one in found.values()}
    assert kinds >= {(False, False), (True, False), (True, True)}
    assert {one.eod < 0 for one in found.values()} == {False, True}
    assert len(found) >= 12


def test_a_tokenizer_without_an_end_is_refused_where_one_is_used(tmp_path):
    folder = hugging_face_folder("tokenizer_json_alone", tmp_path)
    ours = hugging_face(folder)
    ours.tokenize("the cat")
    with pytest.raises(UsageError, match=r"--append-eod.*set eos_token.*<\|im_end\|>") as caught:
        require_eod(ours, "--append-eod")
    assert "add one to the vocabulary" not in str(caught.value)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    mended = hugging_face(folder)
    assert mended.eod == transformers.AutoTokenizer.from_pretrained(str(folder)).eos_token_id
    assert mended.vocab_size == ours.vocab_size


def test_a_file_of_another_name_is_told_a_fix_that_works(tmp_path):
    made = hugging_face_folder("tokenizer_json_alone", tmp_path)
    file = (made / "tokenizer.json").rename(made / "mine.json")
    # Nothing beside a lone file is read.
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(UsageError, match=r"copy it as tokenizer\.json into a folder"):
        require_eod(hugging_face(file), "--append-eod")
    file.rename(made / "tokenizer.json")
    assert hugging_face(made).name_of(hugging_face(made).eod) == "<|im_end|>"


def test_tokens_around_a_text_are_found_in_a_vocabulary_without_latin_letters(tmp_path):
    tokenizers: Any = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    names = ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=40, special_tokens=names)
    backend.train_from_iterator(["日本語 日本 東京"] * 5, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {**HUGGING_FACE["bos_and_eos"]["config"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = hugging_face(tmp_path)
    assert (ours.around.before, ours.around.after) == ((0,), (1,))
    assert ours.tokenize("東京")[:1] == [0]
    assert tokens_line(ours, append_eod=False).endswith(
        "<s> (0) before each text, </s> (1) after each text"
    )


def test_gpt2_files_give_the_ids_of_transformers(tmp_path):
    vocab, merges = gpt2_files(tmp_path)
    build = functools.partial(
        build_tokenizer,
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(vocab),
        merge_file=str(merges),
    )
    ours = build()
    theirs = transformers.GPT2TokenizerFast(vocab=str(vocab), merges=str(merges))
    for text in (*TEXTS, "one.<|endoftext|>Two", "<|endoftext|>"):
        assert ours.tokenize(text) == theirs(text).input_ids
    assert ours.tokenize("<|endoftext|>") == [ours.eod]
    assert ours.detokenize([ours.eod]) == "<|endoftext|>"
    assert (ours.eod, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    # Megatron-LM's legacy class knows no special token in a text.
    legacy = build(legacy_tokenizer=True)
    parts = ("<", "|", "endoftext", "|", ">")
    ids = [token for part in parts for token in theirs(part).input_ids]
    assert legacy.tokenize("<|endoftext|>") == ids
    assert (legacy.eod, legacy.vocab_size) == (ours.eod, ours.vocab_size)


@pytest.fixture(scope="module", params=["usual", "no_bos", "unigram", "own_special"])
def pieces(request, tmp_path_factory):
    options: dict[str, dict[str, Any]] = {
        "usual": {"model_type": "bpe"},
        "no_bos": {"bos_id": -1, "pad_id": 3},
        "unigram": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 300},
        "own_special": {"user_defined_symbols": ["<EOD>", "<MASK>"], "vocab_size": 40},
    }
    made = sentence_piece_file(tmp_path_factory.mktemp("pieces"), **options[request.param])
    return request.param, str(made)


def test_plain_sentence_pieces_are_those_of_megatron_core(pieces):
    _, path = pieces
    theirs = core_class("sentencepiece_tokenizer", "SentencePieceTokenizer")(path)
    ours = build_tokenizer(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=path)
    assert [ours.tokenize(text) for text in TEXTS] == [theirs.text_to_ids(text) for text in TEXTS]
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)


def test_llama2_begins_each_text_with_bos(pieces):
    import sentencepiece

    name, path = pieces
    flags = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": path}
    if name == "no_bos":
        with pytest.raises(UsageError, match="--tokenizer-type GPTSentencePieceTokenizer"):
            build_tokenizer(**flags)
        return
    ours, theirs = build_tokenizer(**flags), sentencepiece.SentencePieceProcessor(path)
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.encode(text, add_bos=True), text
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size(), theirs.eos_id())


def test_sentence_pieces_of_megatron_lm_end_with_an_eod_of_their_own(pieces):
    import sentencepiece

    name, path = pieces
    ours = build_tokenizer(tokenizer_type="SentencePieceTokenizer", tokenizer_model=path)
    theirs = sentencepiece.SentencePieceProcessor(path)
    size = theirs.get_piece_size()
    # <CLS>, <SEP>, <EOD>, <MASK>, in this order, and a name for each of padding, begin and end
    # that the model lacks.
    added = {"usual": 5, "no_bos": 5, "unigram": 5, "own_special": 3}[name]
    assert ours.vocab_size == size + added
    assert ours.eod == (theirs.piece_to_id("<EOD>") if name == "own_special" else size + 2)
    for text in ("", PROSE, "the  cat\n"):
        assert ours.tokenize(text) == theirs.encode(text), text
    assert ours.tokenize("the cat<EOD>sat") == [
        *theirs.encode("the cat"),
        ours.eod,
        *theirs.encode("sat"),
    ]
    assert ours.tokenize("the</s>") == [*theirs.encode("the"), theirs.eos_id()]


def test_tiktoken_gives_the_ids_of_megatron_core(tmp_path):
    path = str(tiktoken_file(tmp_path))
    theirs = core_class("tiktoken_tokenizer", "TikTokenTokenizer")(
        path, num_special_tokens=10, vocab_size=266
    )
    flags: dict[str, Any] = {
        "tokenizer_type": "TikTokenizer",
        "tokenizer_model": path,
        "tiktoken_num_special_tokens": 10,
        "vocab_size": 266,
    }
    ours = build_tokenizer(**flags)
    assert [ours.tokenize(text) for text in TEXTS] == [theirs.text_to_ids(text) for text in TEXTS]
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    legacy = build_tokenizer(**flags, legacy_tokenizer=True)
    assert ours.tokenize("</s>") == [ours.eod]
    assert legacy.tokenize("</s>") == [10 + byte for byte in b"</s>"]


@pytest.mark.parametrize(
    ("name", "adds", "line"),
    [
        ("qwen_im_end", True, "tokens added: <|im_end|> ({eod}) at the end of each document"),
        (
            "llama3_bos",
            True,
            "tokens added: <s> ({bos}) before each text, </s> ({eod}) at the end of each document",
        ),
        ("llama3_bos", False, "tokens added: </s> ({eod}) at the end of each document"),
    ],
)
def test_a_data_set_has_the_tokens_that_transformers_adds(name, adds, line, tmp_path):
    folder = hugging_face_folder(name, tmp_path)
    texts = ["", "the cat", "", "sat on"]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (made,) = preprocess(
        Job(
            input=(str(source),),
            output_prefix=str(tmp_path / "out"),
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(folder),
            append_eod=True,
            tokenizer_hf_include_special_tokens=adds,
        )
    )
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    # Megatron-LM writes what a tokenizer gives, and an end-of-document token behind it.
    wanted = [theirs(text, add_special_tokens=adds).input_ids for text in texts]
    wanted = [[*ids, theirs.eos_token_id] for ids in wanted if ids]
    data = IndexedDataset(made.data_path)
    assert [numpy.asarray(data[i]).tolist() for i in range(len(data))] == wanted
    assert made.tokens_line == line.format(bos=theirs.bos_token_id, eod=theirs.eos_token_id)


def test_a_line_of_tokens_names_what_each_type_adds():
    ours = build_tokenizer(tokenizer_type="ByteLevelTokenizer")
    assert tokens_line(ours, append_eod=True).endswith("<eod> (256) at the end of each document")
    assert tokens_line(ours, append_eod=False) == "tokens added: none"


def data_of(folder: Path, prefix: Path, **flags: Any) -> str:
    source = prefix.with_suffix(".jsonl")
    lines = [PROSE[: 5 + 3 * number] for number in range(12)]
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (made,) = preprocess(
        Job(
            input=(str(source),),
            output_prefix=str(prefix),
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(folder),
            **flags,
        )
    )
    return made.data_path


def read(path: str, tokenizer: Any, **flags: Any) -> Any:
    data = DataConfig(data_path=(path,), split="1,0,0", mock_data=False, **flags)
    return build_datasets(data, seq_length=16, seed=1, tokenizer=tokenizer, num_samples=(8, 0, 0))


def test_the_loss_leaves_out_the_ends_that_the_tokenizer_names(tmp_path):
    folder = hugging_face_folder("qwen_im_end", tmp_path)
    tokenizer = hugging_face(folder)
    path = data_of(folder, tmp_path / "a", append_eod=True)
    built = read(path, tokenizer, eod_mask_loss=True, reset_position_ids=True)
    assert built.notes == ()
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder)).eos_token_id
    for i in range(8):
        sample = built.train[i]
        ends = sample["tokens"] == theirs
        assert ((sample["loss_mask"] == 0) == ends).all()
        after = ends.nonzero().flatten() + 1
        assert all(sample["position_ids"][after[after < 16]] == 0)
    assert any((built.train[i]["loss_mask"] == 0).any() for i in range(8))


def test_data_with_other_ends_or_beginnings_is_told(tmp_path):
    (tmp_path / "before").mkdir()
    (tmp_path / "bos").mkdir()
    # As releases before wrote it: no BOS, and another token at the end.
    before = hugging_face_folder("qwen_im_end", tmp_path / "before")
    bos = hugging_face_folder("llama3_bos", tmp_path / "bos")
    path = data_of(before, tmp_path / "a", append_eod=True)
    begins, ends = read(path, hugging_face(bos)).notes
    assert "no document begins with <s>" in begins
    assert "--tokenizer-hf-no-include-special-tokens" in begins
    assert "documents end with <|im_end|> (3)" in ends and "is </s> (2)" in ends
    # The flag says that no BOS is meant; data with both is not spoken of.
    plain = hugging_face(bos, tokenizer_hf_include_special_tokens=False)
    assert read(path, plain).notes == (ends,)
    good = data_of(bos, tmp_path / "b", append_eod=True)
    assert read(good, hugging_face(bos), eod_mask_loss=True).notes == ()
    # Texts without ends are spoken of where ends are looked for.
    loose = data_of(before, tmp_path / "c")
    assert read(loose, hugging_face(before)).notes == ()
    (note,) = read(loose, hugging_face(before), eod_mask_loss=True).notes
    assert "no document ends with <|im_end|> (3), so that --eod-mask-loss" in note


def test_a_run_without_an_end_is_refused_only_where_it_looks_for_one(tmp_path):
    folder = hugging_face_folder("tokenizer_json_alone", tmp_path)
    path = data_of(folder, tmp_path / "a")
    assert read(path, hugging_face(folder)).train is not None
    with pytest.raises(UsageError, match="--eod-mask-loss needs an end-of-document token"):
        read(path, hugging_face(folder), eod_mask_loss=True)
    with pytest.raises(UsageError, match="--append-eod needs an end-of-document token"):
        data_of(folder, tmp_path / "b", append_eod=True)
