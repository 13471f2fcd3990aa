"""Small tokenizers of every type, made on the spot."""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.data.tokenizer import TOKENIZER_TYPES

CODE = "def f(x):\n\treturn 'grüße 🎈'  # two  blanks\n"
PROSE = "the cat sat on the mat and the dog sat on the cat"


def fast_file(folder: Path) -> Path:
    """A byte-pair `tokenizer.json` of the package tokenizers."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([CODE] * 5, trainer)
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def gpt2_files(folder: Path) -> tuple[Path, Path]:
    """The same as vocabulary and merges."""
    model = json.loads(fast_file(folder).read_text())["model"]
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps(model["vocab"]))
    merges.write_text("".join(" ".join(pair) + "\n" for pair in model["merges"]))
    return vocab, merges


def sentence_piece_file(folder: Path) -> Path:
    """Pieces of `PROSE`."""
    pytest.importorskip("sentencepiece")
    importlib.import_module("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter([PROSE] * 10),
        model_prefix=str(folder / "model"),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "model.model"


def tiktoken_file(folder: Path) -> Path:
    """The 256 bytes as a list of tokens."""
    pytest.importorskip("tiktoken")
    tokens = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": ""}
        for i in range(256)
    ]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    return folder / "tokens.json"


def flags_of(kind: str, folder: Path) -> dict[str, Any]:
    """What `build_tokenizer` needs for a type, with its files in a folder."""
    assert kind in TOKENIZER_TYPES
    flags: dict[str, Any] = {"tokenizer_type": kind}
    if kind == "NullTokenizer":
        flags["vocab_size"] = 100
    elif kind == "GPT2BPETokenizer":
        vocab, merges = gpt2_files(folder)
        flags |= {"vocab_file": str(vocab), "merge_file": str(merges)}
    elif kind == "HuggingFaceTokenizer":
        flags["tokenizer_model"] = str(fast_file(folder))
    elif kind == "TikTokenizer":
        flags["tokenizer_model"] = str(tiktoken_file(folder))
        flags |= {"tiktoken_num_special_tokens": 10, "vocab_size": 266}
    elif kind != "ByteLevelTokenizer":
        flags["tokenizer_model"] = str(sentence_piece_file(folder))
    return flags
