"""Text to token numbers and back, by the names Megatron-LM gives to tokenizers.

Every tokenizer here offers what `megatron.core` data sets ask of one: `vocab_size`, `eod` and
`unique_identifiers`. None defines a padding token: samples are packed, and a padding number that
also occurs in the text would silently leave that text out of the loss.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

from megatron.training.common.errors import UsageError

BYTE_LEVEL = "ByteLevelTokenizer"
TOKENIZER_TYPES = (
    BYTE_LEVEL,
    "NullTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)


class Tokenizer(Protocol):
    """What the trainer and the data sets need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token numbers, before any padding of the embedding."""
        ...

    @property
    def eod(self) -> int:
        """Token number that ends a document."""
        ...

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """What tells this tokenizer from others; part of the name of cached data-set indices."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Token numbers of a text, without an end-of-document token."""
        ...

    def detokenize(self, ids: list[int]) -> str:
        """Text of token numbers."""
        ...


def build_tokenizer(
    *,
    tokenizer_type: str | None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = 1000,
    tiktoken_special_tokens: tuple[str, ...] | list[str] | None = None,
) -> Tokenizer:
    """Make the tokenizer that the flags name.

    Args:
        tokenizer_type: One of `TOKENIZER_TYPES`; None means Megatron-LM's default,
            GPT2BPETokenizer.
        tokenizer_model: File (or folder holding `tokenizer.json`) of the tokenizer; local, nothing
            is downloaded.
        vocab_size: `--vocab-size`; NullTokenizer adds one token, the end of document. Cuts a
            tiktoken vocabulary.
        vocab_file: JSON vocabulary of GPT2BPETokenizer.
        merge_file: Merges of GPT2BPETokenizer.
        tiktoken_pattern: `v1` or `v2` (the default).
        tiktoken_num_special_tokens: Token numbers reserved for special tokens.
        tiktoken_special_tokens: Special tokens by name.

    Raises:
        UsageError: A flag, a file or an optional package is missing, or a file cannot be read.
    """
    kind = tokenizer_type or "GPT2BPETokenizer"
    if kind == BYTE_LEVEL:
        return ByteLevelTokenizer()
    if kind == "NullTokenizer":
        if not vocab_size or vocab_size < 1:
            raise UsageError(
                "--tokenizer-type NullTokenizer needs --vocab-size; give a positive number"
            )
        return NullTokenizer(vocab_size)
    if kind == "GPT2BPETokenizer":
        return _gpt2_bpe(vocab_file, merge_file)
    if kind == "HuggingFaceTokenizer":
        return _hugging_face(tokenizer_model)
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        return _sentence_piece(kind, tokenizer_model)
    if kind == "TikTokenizer":
        return _tiktoken(
            tokenizer_model,
            pattern=tiktoken_pattern or "v2",
            num_special_tokens=tiktoken_num_special_tokens,
            special_tokens=tiktoken_special_tokens,
            vocab_size=vocab_size,
        )
    raise UsageError(
        f"--tokenizer-type {kind} is not supported; use one of {', '.join(TOKENIZER_TYPES)}"
    )


def told_vocab_size(tokenizer_type: str | None, vocab_size: int | None) -> int | None:
    """Tokens of a tokenizer, or None if its flags do not tell without its files.

    Args:
        tokenizer_type: see `build_tokenizer`.
        vocab_size: `--vocab-size`.
    """
    if tokenizer_type not in (BYTE_LEVEL, "NullTokenizer"):
        return vocab_size
    try:
        return build_tokenizer(tokenizer_type=tokenizer_type, vocab_size=vocab_size).vocab_size
    except UsageError:
        return None


class ByteLevelTokenizer:
    """The 256 byte values of UTF-8, and an end-of-document token."""

    vocab_size = 257
    eod = 256

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """See `Tokenizer`."""
        return OrderedDict(type=BYTE_LEVEL, vocab_size=self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """UTF-8 bytes of the text; lone surrogates, which UTF-8 cannot hold, become `?`."""
        return list(text.encode("utf-8", errors="replace"))

    def detokenize(self, ids: list[int]) -> str:
        """Text of the bytes; the end-of-document token and broken UTF-8 are dropped or marked."""
        return bytes(token for token in ids if token < self.eod).decode("utf-8", errors="replace")


class NullTokenizer:
    """Numbers separated by blanks, for made-up data and benchmarks."""

    def __init__(self, vocab_size: int) -> None:
        """Takes the number of ordinary tokens; the end of document is one more."""
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """See `Tokenizer`."""
        return OrderedDict(type="NullTokenizer", vocab_size=self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """The numbers in the text."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int]) -> str:
        """The numbers, separated by blanks."""
        return " ".join(map(str, ids))


class LibraryTokenizer:
    """A tokenizer of another package behind our interface.

    The library object can be pickled, so the tokenizer travels to worker processes.
    """

    def __init__(self, *, kind: str, source: str, vocab_size: int, eod: int, library: Any) -> None:
        """`library` has `encode(text) -> list[int]` and `decode(ids) -> str`."""
        self.vocab_size = vocab_size
        self.eod = eod
        self._kind = kind
        self._source = source
        self._library = library

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """See `Tokenizer`; without the folder, so that a moved tokenizer finds its cache."""
        return OrderedDict(
            type=self._kind, file=Path(self._source).name, vocab_size=self.vocab_size, eod=self.eod
        )

    def tokenize(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._library.encode(text)

    def detokenize(self, ids: list[int]) -> str:
        """See `Tokenizer`."""
        return self._library.decode(ids)


class _FastTokenizer:
    """Hugging Face's `tokenizers`, without special tokens around each text."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


class _CoreTokenizer:
    """A tokenizer of megatron-core's `tokenizers.text.libraries`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        return self._backend.text_to_ids(text)

    def decode(self, ids: list[int]) -> str:
        return self._backend.ids_to_text(ids)


def _gpt2_bpe(vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    kind = "GPT2BPETokenizer"
    vocab = _existing_file(vocab_file, "--vocab-file", kind)
    merges = _existing_file(merge_file, "--merge-file", kind)
    implementations = _package("tokenizers.implementations", "tokenizers", kind)
    backend = _load(
        lambda: implementations.ByteLevelBPETokenizer(str(vocab), str(merges)),
        vocab,
        "--vocab-file",
    )
    return _fast(kind, vocab, "--vocab-file", backend, ("<|endoftext|>",))


def _hugging_face(tokenizer_model: str | None) -> Tokenizer:
    kind = "HuggingFaceTokenizer"
    if tokenizer_model and Path(tokenizer_model).is_dir():
        tokenizer_model = str(Path(tokenizer_model) / "tokenizer.json")
    path = _existing_file(tokenizer_model, "--tokenizer-model", kind)
    tokenizers = _package("tokenizers", "tokenizers", kind)
    backend = _load(lambda: tokenizers.Tokenizer.from_file(str(path)), path, "--tokenizer-model")
    ends = (
        "<|endoftext|>",
        "<|end_of_text|>",
        "</s>",
        "<eos>",
        "<|eos|>",
        "[EOS]",
        "<eod>",
        "[SEP]",
    )
    return _fast(kind, path, "--tokenizer-model", backend, ends)


def _fast(kind: str, path: Path, flag: str, backend: Any, ends: tuple[str, ...]) -> Tokenizer:
    eod = next((number for end in ends if (number := backend.token_to_id(end)) is not None), None)
    if eod is None:
        raise UsageError(
            f"{flag} {path} has none of the end-of-document tokens {', '.join(ends)}; "
            "add one to the vocabulary"
        )
    # Numbers may have holes, and the embedding needs a row for the largest one.
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return LibraryTokenizer(
        kind=kind, source=str(path), vocab_size=vocab_size, eod=eod, library=_FastTokenizer(backend)
    )


def _sentence_piece(kind: str, tokenizer_model: str | None) -> Tokenizer:
    path = _existing_file(tokenizer_model, "--tokenizer-model", kind)
    sentencepiece = _package("sentencepiece", "sentencepiece", kind)
    backend = _load(
        lambda: sentencepiece.SentencePieceProcessor(model_file=str(path)),
        path,
        "--tokenizer-model",
    )
    if backend.eos_id() < 0:
        raise UsageError(
            f"--tokenizer-model {path} has no end-of-sequence piece; train it with an eos_id"
        )
    return LibraryTokenizer(
        kind=kind,
        source=str(path),
        vocab_size=backend.get_piece_size(),
        eod=backend.eos_id(),
        library=backend,
    )


def _tiktoken(
    tokenizer_model: str | None,
    *,
    pattern: str,
    num_special_tokens: int,
    special_tokens: tuple[str, ...] | list[str] | None,
    vocab_size: int | None,
) -> Tokenizer:
    kind = "TikTokenizer"
    if pattern not in ("v1", "v2"):
        raise UsageError(f"--tiktoken-pattern {pattern} is unknown; use v1 or v2")
    path = _existing_file(tokenizer_model, "--tokenizer-model", kind)
    if path.suffix != ".json":
        raise UsageError(
            f"--tokenizer-model {path} must be a JSON list of tokens; give a .json file"
        )
    _package("tiktoken", "tiktoken", kind)
    libraries = importlib.import_module(
        "megatron.core.tokenizers.text.libraries.tiktoken_tokenizer"
    )
    options: dict[str, Any] = {} if vocab_size is None else {"vocab_size": vocab_size}
    backend = _load(
        lambda: libraries.TikTokenTokenizer(
            str(path),
            special_tokens=list(special_tokens) if special_tokens else None,
            num_special_tokens=num_special_tokens,
            pattern=pattern,
            **options,
        ),
        path,
        "--tokenizer-model",
    )
    return LibraryTokenizer(
        kind=kind,
        source=str(path),
        vocab_size=backend.vocab_size,
        eod=backend.eod,
        library=_CoreTokenizer(backend),
    )


def _existing_file(path: str | None, flag: str, kind: str) -> Path:
    if not path:
        raise UsageError(f"--tokenizer-type {kind} needs {flag}; give the path of a local file")
    if not Path(path).is_file():
        raise UsageError(f"{flag} {path} is not a file; give the path of a local file for {kind}")
    return Path(path)


def _package(module: str, package: str, kind: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"--tokenizer-type {kind} needs the package {package}, which is not installed; "
            'run: pip install -e ".[hf]"'
        ) from error


def _load(make: Any, path: Path, flag: str) -> Any:
    try:
        return make()
    except (KeyboardInterrupt, SystemExit):
        raise
    # The packages raise bare Exception and AssertionError for files they cannot read. A panic of
    # one in Rust is not even an Exception.
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"{flag} {path} cannot be read as a tokenizer ({reason}); check the file"
        ) from error
