"""Small tokenizers of every type, made on the spot."""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.data.tokenizer import TOKENIZER_TYPES

CODE = "def f(x):\n\treturn 'grüße 🎈'  # two  blanks\n"
PROSE = "the cat sat on the mat and the dog sat on the cat"


def fast_file(folder: Path) -> Path:
    """A byte-pair `tokenizer.json` of the package tokenizers, with the name of its end beside
    it."""
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
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder / "tokenizer.json"


def gpt2_files(folder: Path) -> tuple[Path, Path]:
    model = json.loads(fast_file(folder).read_text())["model"]
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps(model["vocab"]))
    merges.write_text("".join(" ".join(pair) + "\n" for pair in model["merges"]))
    return vocab, merges


def sentence_piece_file(folder: Path, **options: Any) -> Path:
    """Pieces of `PROSE`; `options` are those of sentencepiece's trainer."""
    pytest.importorskip("sentencepiece")
    importlib.import_module("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter([PROSE] * 10),
        model_prefix=str(folder / "model"),
        **{"vocab_size": 30, "hard_vocab_limit": False, "minloglevel": 2, **options},
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


_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
_S = {"bos_token": "<s>", "eos_token": "</s>"}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "gpt2_string": {"config": {**_FAST, "eos_token": "<|endoftext|>"}},
    "qwen_im_end": {"config": {**_FAST, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}},
    "eos_as_dict": {
        "config": {**_FAST, "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}
    },
    "eos_in_map": {"config": _FAST, "map": {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}},
    "map_beside_config": {
        "config": {**_FAST, "eos_token": "<|im_end|>"},
        "map": {"eos_token": "</s>", "pad_token": "<|endoftext|>"},
    },
    "map_alone": {"map": {"eos_token": "</s>"}},
    "tokenizer_json_alone": {},
    "llama3_bos": {"config": {**_FAST, **_S}, "template": "<s> $A"},
    "bos_and_eos": {"config": {**_FAST, **_S}, "template": "<s> $A </s>"},
    "eos_only": {"config": {**_FAST, **_S}, "template": "$A </s>"},
    "bos_unused": {"config": {**_FAST, **_S}},
    "add_bos_true": {"config": {**_FAST, **_S, "add_bos_token": True}},
    "add_bos_false": {"config": {**_FAST, **_S, "add_bos_token": False}, "template": "<s> $A"},
    "added_beyond": {
        "config": {
            **_FAST,
            "eos_token": "<|new_end|>",
            "additional_special_tokens": ["<|tool|>"],
        }
    },
    "class_of_qwen": {"config": {"tokenizer_class": "Qwen2Tokenizer"}},
    "class_of_gpt2": {"config": {"tokenizer_class": "GPT2Tokenizer"}},
    "class_of_llama": {"model": "metaspace", "config": {"tokenizer_class": "LlamaTokenizer"}},
    "llama_add_bos_true": {
        "model": "metaspace",
        "config": {"tokenizer_class": "LlamaTokenizer", **_S, "add_bos_token": True},
        "template": "<s> $A",
    },
    "llama_add_bos_false": {
        "model": "metaspace",
        "config": {"tokenizer_class": "LlamaTokenizer", **_S, "add_bos_token": False},
        "template": "<s> $A",
    },
    "llama_add_eos_true": {
        "model": "metaspace",
        "config": {"tokenizer_class": "LlamaTokenizer", **_S, "add_eos_token": True},
    },
    "mistral_fast": {"model": "metaspace", "config": {**_FAST, **_S}, "template": "<s> $A"},
    "unigram": {"model": "unigram", "config": {**_FAST, **_S, "unk_token": "<unk>"}},
    "word_pieces": {
        "model": "word_pieces",
        "config": {"tokenizer_class": "BertTokenizer", "sep_token": "[SEP]", "cls_token": "[CLS]"},
        "template": "[CLS] $A [SEP]",
    },
}
"""Tokenizers that `hugging_face_folder` makes: the model (byte-level pairs, if it is not named),
`tokenizer_config.json`, `special_tokens_map.json` and the template of the post-processor."""
_NAMES = ("<unk>", "<s>", "</s>", "<|im_end|>", "<|endoftext|>")


def hugging_face_folder(name: str, folder: Path) -> Path:
    """One of `HUGGING_FACE`, with the files that a model of its kind comes with."""
    t: Any = pytest.importorskip("tokenizers")
    about = HUGGING_FACE[name]
    model = about.get("model", "bytes")
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"] if model == "word_pieces" else [*_NAMES]
    common = {"special_tokens": names, "vocab_size": 320, "show_progress": False}
    if model == "bytes":
        backend = t.Tokenizer(t.models.BPE())
        backend.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = t.decoders.ByteLevel()
        alphabet = t.pre_tokenizers.ByteLevel.alphabet()
        trainer = t.trainers.BpeTrainer(initial_alphabet=alphabet, **common)
    elif model == "word_pieces":
        backend = t.Tokenizer(t.models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = t.normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = t.pre_tokenizers.BertPreTokenizer()
        backend.decoder = t.decoders.WordPiece()
        trainer = t.trainers.WordPieceTrainer(**common)
    else:
        is_unigram = model == "unigram"
        backend = t.Tokenizer(t.models.Unigram() if is_unigram else t.models.BPE(unk_token="<unk>"))
        backend.pre_tokenizer = t.pre_tokenizers.Metaspace()
        backend.decoder = t.decoders.Metaspace()
        kind = t.trainers.UnigramTrainer if is_unigram else t.trainers.BpeTrainer
        trainer = kind(**common, **({"unk_token": "<unk>"} if is_unigram else {}))
    backend.train_from_iterator([CODE, PROSE] * 5, trainer)
    if template := about.get("template"):
        used = [word for word in template.split() if not word.startswith("$")]
        backend.post_processor = t.processors.TemplateProcessing(
            single=template, special_tokens=[(word, backend.token_to_id(word)) for word in used]
        )
    backend.save(str(folder / "tokenizer.json"))
    if "config" in about:
        (folder / "tokenizer_config.json").write_text(json.dumps(about["config"]))
    if "map" in about:
        (folder / "special_tokens_map.json").write_text(json.dumps(about["map"]))
    return folder


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
