"""Tokenizers by their Megatron-LM names."""

from __future__ import annotations

import builtins
import json
import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from megatron.trainer.common.errors import UsageError
from megatron.trainer.data.tokenizer import TOKENIZER_TYPES, build_tokenizer
from tests.helpers.tokenizer_files import CODE, PROSE, flags_of

pytestmark = pytest.mark.unit


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_give_back_any_text(text):
    tokenizer = build_tokenizer(tokenizer_type="ByteLevelTokenizer")
    ids = tokenizer.tokenize(text)
    assert all(0 <= token < tokenizer.eod for token in ids)
    assert tokenizer.eod == tokenizer.vocab_size - 1
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text


def test_bytes_survive_what_utf8_cannot_hold():
    tokenizer = build_tokenizer(tokenizer_type="ByteLevelTokenizer")
    assert tokenizer.tokenize("a\ud800b") == list(b"a?b")
    assert tokenizer.detokenize([0xFF, ord("a")]).endswith("a")


def test_null_counts_the_end_of_document_on_top():
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("7 8\n9") == [7, 8, 9]
    assert tokenizer.detokenize([7, 8]) == "7 8"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tokenizer_type": None}, "--vocab-file"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "gone.json"}, "gone.json"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "--tokenizer-model"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "gone"}, "gone"),
        ({"tokenizer_type": "Llama2Tokenizer"}, "--tokenizer-model"),
        ({"tokenizer_type": "TikTokenizer", "tiktoken_pattern": "v3"}, "--tiktoken-pattern v3"),
        ({"tokenizer_type": "BertWordPieceCase"}, "BertWordPieceCase"),
    ],
)
def test_what_is_missing_is_named(flags, message):
    with pytest.raises(UsageError, match=message):
        build_tokenizer(**flags)


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("HuggingFaceTokenizer", "transformers"),
        ("GPT2BPETokenizer", "tokenizers"),
        ("Llama2Tokenizer", "sentencepiece"),
        ("TikTokenizer", "tiktoken"),
    ],
)
def test_a_missing_package_names_its_extra(kind, package, tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    path.write_text("{}")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    import_module = builtins.__import__

    def refuse(name, *rest, **named):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return import_module(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(sys, "meta_path", [_Refuse(package), *sys.meta_path])
    with pytest.raises(UsageError, match=rf"{package}.*pip install -e .\.\[hf\]"):
        build_tokenizer(
            tokenizer_type=kind,
            tokenizer_model=str(path),
            vocab_file=str(path),
            merge_file=str(path),
        )


class _Refuse:
    def __init__(self, package):
        self._package = package

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self._package:
            raise ModuleNotFoundError(name)
        return None


def check(tokenizer, text):
    ids = tokenizer.tokenize(text)
    assert ids and all(0 <= token < tokenizer.vocab_size for token in ids)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size and tokenizer.eod not in ids
    assert tokenizer.detokenize(ids) == text
    assert pickle.loads(pickle.dumps(tokenizer)).tokenize(text) == ids
    json.dumps(tokenizer.unique_identifiers)
    # The checks megatron-core makes of a tokenizer when it configures a data set.
    GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )


@pytest.mark.parametrize("kind", TOKENIZER_TYPES[2:])
def test_files_give_back_what_they_are_made_for(kind, tmp_path):
    text = CODE if kind in ("GPT2BPETokenizer", "HuggingFaceTokenizer") else PROSE
    check(build_tokenizer(**flags_of(kind, tmp_path)), text)


def test_hugging_face_and_gpt2_read_the_same(tmp_path):
    flags = {**flags_of("GPT2BPETokenizer", tmp_path), "tokenizer_type": None}
    ids = build_tokenizer(**flags).tokenize(CODE)
    for model in (tmp_path, tmp_path / "tokenizer.json"):
        same = build_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model))
        check(same, CODE)
        assert same.tokenize(CODE) == ids


@pytest.mark.parametrize("kind", TOKENIZER_TYPES[3:])
def test_a_foreign_file_is_one_line(kind, tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("sentencepiece")
    pytest.importorskip("tiktoken")
    path = tmp_path / "foreign.json"
    path.write_text("no tokenizer")
    with pytest.raises(UsageError, match=r"foreign\.json") as caught:
        build_tokenizer(tokenizer_type=kind, tokenizer_model=str(path))
    assert "\n" not in str(caught.value)
