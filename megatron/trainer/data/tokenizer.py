"""Text to token numbers and back, by the names Megatron-LM gives to tokenizers.

The numbers are those of Megatron-LM for the same files: the text, what a tokenizer puts around it,
the end-of-document token and the size of the vocabulary. HuggingFaceTokenizer is
`transformers.AutoTokenizer`, the tokenizers of sentencepiece and tiktoken are megatron-core's
classes. Decision 068 says where Megatron-LM itself has two answers.

Every tokenizer here offers what `megatron.core` data sets ask of one: `vocab_size`, `eod` and
`unique_identifiers`. None is called `pad`: samples are packed, and a padding number that
also occurs in the text would silently leave that text out of the loss.
"""

from __future__ import annotations

import importlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.trainer.common.errors import UsageError

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
NO_EOD = -2
"""End-of-document token of a tokenizer that has none. megatron-core's data sets take -1 for
padding."""


class Tokenizer(Protocol):
    """What the trainer and the data sets need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token numbers, before any padding of the embedding."""
        ...

    @property
    def eod(self) -> int:
        """Token number that ends a document, or one below 0 if there is none; see
        `require_eod`."""
        ...

    @property
    def around(self) -> Around:
        """What `tokenize` puts around the tokens of a text."""
        ...

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """What tells this tokenizer from others; part of the name of cached data-set indices."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Token numbers of a text with those around it; an end-of-document token is none of
        them, unless the tokenizer's own template has it."""
        ...

    def detokenize(self, ids: list[int]) -> str: ...

    def name_of(self, token: int) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a tokenizer puts around each text, and its token numbers of names that Hugging Face
    models store; None where it has none."""

    before: tuple[int, ...] = ()
    """Tokens before each text, such as BOS."""
    after: tuple[int, ...] = ()
    """Tokens after each text, such as EOS."""
    bos_token_id: int | None = None
    """Begins a sequence, whether or not `tokenize` adds it."""
    pad_token_id: int | None = None
    """Fills up a batch of texts."""


def require_eod(tokenizer: Tokenizer, what: str) -> None:
    """Refuses a tokenizer without an end-of-document token where one is used.

    Args:
        what: the flag or command that uses it.

    Raises:
        UsageError: naming a fix that leaves the vocabulary, and so the model, as it is.
    """
    if tokenizer.eod < 0:
        fix = getattr(tokenizer, "missing_eod", "use another --tokenizer-type")
        raise UsageError(f"{what} needs an end-of-document token: {fix}")


def tokens_line(tokenizer: Tokenizer, *, append_eod: bool) -> str:
    """What is written around each text, in words."""

    def words(ids: Sequence[int]) -> str:
        return " ".join(f"{tokenizer.name_of(i)} ({i})" for i in ids)

    around = tokenizer.around
    parts = [f"{words(around.before)} before each text"] if around.before else []
    parts += [f"{words(around.after)} after each text"] if around.after else []
    parts += [f"{words([tokenizer.eod])} at the end of each document"] if append_eod else []
    return "tokens added: " + (", ".join(parts) or "none")


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
    tokenizer_hf_include_special_tokens: bool = True,
    legacy_tokenizer: bool = False,
) -> Tokenizer:
    """Make the tokenizer that the flags name.

    Args:
        tokenizer_type: One of `TOKENIZER_TYPES`; None means Megatron-LM's default,
            GPT2BPETokenizer.
        tokenizer_model: File of the tokenizer, or the folder of a Hugging Face tokenizer; local,
            nothing is downloaded, and no code that lies beside it is run.
        vocab_size: `--vocab-size`; NullTokenizer adds one token, the end of document. Cuts a
            tiktoken vocabulary.
        vocab_file: JSON vocabulary of GPT2BPETokenizer.
        merge_file: Merges of GPT2BPETokenizer.
        tiktoken_pattern: `v1` or `v2` (the default).
        tiktoken_num_special_tokens: Token numbers reserved for special tokens.
        tiktoken_special_tokens: Special tokens by name.
        tokenizer_hf_include_special_tokens: Whether HuggingFaceTokenizer adds what its
            post-processor adds, such as BOS.
        legacy_tokenizer: TikTokenizer and GPT2BPETokenizer read the names of special tokens in a
            text as text, and HuggingFaceTokenizer always adds special tokens, as with this flag of
            Megatron-LM.

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
        return _gpt2_bpe(vocab_file, merge_file, reads_names=not legacy_tokenizer)
    if kind == "HuggingFaceTokenizer":
        return _hugging_face(
            tokenizer_model, adds=tokenizer_hf_include_special_tokens or legacy_tokenizer
        )
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        return _sentence_piece(kind, tokenizer_model)
    if kind == "TikTokenizer":
        return _tiktoken(
            tokenizer_model,
            pattern=tiktoken_pattern or "v2",
            num_special_tokens=tiktoken_num_special_tokens,
            special_tokens=tiktoken_special_tokens,
            vocab_size=vocab_size,
            reads_names=not legacy_tokenizer,
        )
    raise UsageError(
        f"--tokenizer-type {kind} is not supported; use one of {', '.join(TOKENIZER_TYPES)}"
    )


def told_vocab_size(tokenizer_type: str | None, vocab_size: int | None) -> int | None:
    """Tokens of a tokenizer, or None if its flags do not tell without its files.

    Args:
        tokenizer_type: see `build_tokenizer`.
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
    around = Around()

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict(type=BYTE_LEVEL, vocab_size=self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """UTF-8 bytes of the text; lone surrogates, which UTF-8 cannot hold, become `?`."""
        return list(text.encode("utf-8", errors="replace"))

    def detokenize(self, ids: list[int]) -> str:
        """Text of the bytes; the end-of-document token and broken UTF-8 are dropped or marked."""
        return bytes(token for token in ids if token < self.eod).decode("utf-8", errors="replace")

    def name_of(self, token: int) -> str:
        return "<eod>" if token == self.eod else ascii(chr(token))


class NullTokenizer:
    """Numbers separated by blanks, for made-up data and benchmarks."""

    around = Around()

    def __init__(self, vocab_size: int) -> None:
        """Takes the number of ordinary tokens; the end of document is one more."""
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict(type="NullTokenizer", vocab_size=self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def name_of(self, token: int) -> str:
        return "<eod>" if token == self.eod else str(token)


@dataclass(frozen=True, kw_only=True)
class LibraryTokenizer:
    """A tokenizer of another package behind our interface.

    It can be pickled where the library object can, so that it travels to worker processes.
    """

    kind: str
    """Its `--tokenizer-type`."""
    source: str
    """The file it is read from."""
    vocab_size: int
    """See `Tokenizer`."""
    eod: int
    """See `Tokenizer`."""
    around: Around
    """See `Tokenizer`."""
    library: Any
    """Has `encode(text) -> list[int]`, without `around`'s tokens unless `adds`, `decode(ids) ->
    str` and `name_of(id) -> str`."""
    adds: bool = False
    """Whether the library itself adds the tokens around a text."""
    missing_eod: str = ""
    """What to do about a tokenizer without an end-of-document token."""

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """See `Tokenizer`; without the folder, so that a moved tokenizer finds its cache."""
        return OrderedDict(
            type=self.kind, file=Path(self.source).name, vocab_size=self.vocab_size, eod=self.eod
        )

    def tokenize(self, text: str) -> list[int]:
        ids = self.library.encode(text)
        return ids if self.adds else [*self.around.before, *ids, *self.around.after]

    def detokenize(self, ids: list[int]) -> str:
        return self.library.decode(ids)

    def name_of(self, token: int) -> str:
        return self.library.name_of(token)


class _FastTokenizer:
    """Hugging Face's `tokenizers`, without special tokens around each text."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def name_of(self, token: int) -> str:
        return str(self._backend.id_to_token(token))


class _AutoTokenizer:
    """One of `transformers`, with or without special tokens around each text."""

    def __init__(self, backend: Any, *, adds: bool) -> None:
        self._backend = backend
        self._adds = adds

    def encode(self, text: str) -> list[int]:
        return self._backend(text, add_special_tokens=self._adds, verbose=False).input_ids

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids)

    def name_of(self, token: int) -> str:
        return str(self._backend.convert_ids_to_tokens(token))


class _CoreTokenizer:
    """A tokenizer of megatron-core's `tokenizers.text.libraries`."""

    def __init__(self, backend: Any, *, reads_names: bool = True) -> None:
        self._backend = backend
        self._reads_names = reads_names

    def encode(self, text: str) -> list[int]:
        if self._reads_names:
            return self._backend.text_to_ids(text)
        return self._backend.tokenizer.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        return self._backend.ids_to_text(ids)

    def name_of(self, token: int) -> str:
        return str(self._backend.ids_to_tokens([token])[0])


def _gpt2_bpe(vocab_file: str | None, merge_file: str | None, *, reads_names: bool) -> Tokenizer:
    kind, end = "GPT2BPETokenizer", "<|endoftext|>"
    vocab = _existing_file(vocab_file, "--vocab-file", kind)
    merges = _existing_file(merge_file, "--merge-file", kind)
    implementations = _package("tokenizers.implementations", "tokenizers", kind)
    backend = _load(
        lambda: implementations.ByteLevelBPETokenizer(str(vocab), str(merges)),
        vocab,
        "--vocab-file",
    )
    eod = backend.token_to_id(end)
    if reads_names and eod is not None:
        backend.add_special_tokens([end])
    return LibraryTokenizer(
        kind=kind,
        source=str(vocab),
        vocab_size=_rows_of(backend.get_vocab(with_added_tokens=True)),
        eod=NO_EOD if eod is None else eod,
        around=Around(),
        library=_FastTokenizer(backend),
        missing_eod=f"--vocab-file {vocab} has no {end}, which ends a document of {kind}; use "
        "--tokenizer-type HuggingFaceTokenizer with a folder whose tokenizer_config.json names an "
        "eos_token",
    )


def _rows_of(vocab: dict[str, int]) -> int:
    # Numbers may have holes, and the embedding needs a row for the largest one.
    return max(vocab.values()) + 1


def _hugging_face(tokenizer_model: str | None, *, adds: bool) -> Tokenizer:
    kind, flag = "HuggingFaceTokenizer", "--tokenizer-model"
    path = Path(tokenizer_model) if tokenizer_model else None
    if path is None or not path.is_dir():
        path = _existing_file(tokenizer_model, flag, kind)
    if path.name == "tokenizer.json":
        # What Megatron-LM and transformers take is its folder: the names of tokens lie beside it.
        path = path.parent
    transformers = _package("transformers", "transformers", kind)
    backend = _load(lambda: _auto_tokenizer(transformers, path), path, flag)
    before, after = _template_of(backend) if adds else ((), ())
    # megatron-core's class takes one for the other.
    ends = (backend.eos_token_id, backend.sep_token_id)
    eod = next((token for token in ends if token is not None), NO_EOD)
    return LibraryTokenizer(
        kind=kind,
        source=str(path / "tokenizer.json" if path.is_dir() else path),
        vocab_size=_rows_of(backend.get_vocab()),
        eod=eod,
        around=Around(
            before=before,
            after=after,
            bos_token_id=backend.bos_token_id,
            pad_token_id=backend.pad_token_id,
        ),
        library=_AutoTokenizer(backend, adds=adds),
        adds=True,
        missing_eod=_unnamed(backend, path),
    )


def _auto_tokenizer(transformers: Any, path: Path) -> Any:
    if not path.is_dir():
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    return transformers.AutoTokenizer.from_pretrained(
        str(path), local_files_only=True, trust_remote_code=False
    )


def _template_of(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that a tokenizer of `transformers` puts before and after each text."""
    # A vocabulary may lack all of these letters; a token of its own then shows the place.
    vocab, special = backend.get_vocab(), {*backend.all_special_tokens, *backend.get_added_vocab()}
    own = (backend.convert_tokens_to_string([x]) for x in sorted(vocab, key=vocab.get))
    plain = (text for text in itertools.islice(own, 1000) if text not in special)
    for text in itertools.chain(("x", "a", "1", "."), plain):
        inner = tuple(backend(text, add_special_tokens=False).input_ids)
        whole = tuple(backend(text).input_ids)
        for at in range(len(whole) - len(inner) + 1) if inner else ():
            if whole[at : at + len(inner)] == inner:
                return whole[:at], whole[at + len(inner) :]
    return (), ()


def _unnamed(backend: Any, path: Path) -> str:
    """What to do about a tokenizer of `transformers` that names no end."""
    known = sorted(backend.get_added_vocab(), key=backend.get_added_vocab().get)[:8]
    such = f" ({', '.join(known)})" if known else ""
    where = path / "tokenizer_config.json"
    fix = f"set eos_token in {where}"
    if not path.is_dir():
        fix = (
            "copy it as tokenizer.json into a folder, give that folder, and set eos_token in its "
            "tokenizer_config.json"
        )
    return (
        f"--tokenizer-model {path} names no eos_token; {fix} to one of its own tokens{such}, "
        "which leaves the model as it is"
    )


_SPECIAL_PIECES = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")
"""Pieces that Megatron-LM's SentencePieceTokenizer adds where a model has none."""


def _sentence_piece(kind: str, tokenizer_model: str | None) -> Tokenizer:
    flag, plain = "--tokenizer-model", "GPTSentencePieceTokenizer"
    path = _existing_file(tokenizer_model, flag, kind)
    sentencepiece = _package("sentencepiece", "sentencepiece", kind)
    core = importlib.import_module(
        "megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer"
    ).SentencePieceTokenizer
    model = _load(lambda: sentencepiece.SentencePieceProcessor(model_file=str(path)), path, flag)
    bos, eod, pad = model.bos_id(), model.eos_id(), model.pad_id()
    before: tuple[int, ...] = ()
    if kind == "SentencePieceTokenizer":
        backend = core(
            str(path),
            special_tokens=_special_pieces(model),
            legacy=True,
            trim_spm_separator_after_special_token=False,
        )
        eod = backend.special_token_to_id["<EOD>"]
    else:
        backend = core(str(path))
    if kind == "Llama2Tokenizer":
        if bos < 0:
            raise UsageError(
                f"{flag} {path} has no piece that begins a text, which {kind} adds; use "
                f"--tokenizer-type {plain}, which adds none"
            )
        before = (bos,)
    return LibraryTokenizer(
        kind=kind,
        source=str(path),
        vocab_size=backend.vocab_size,
        eod=eod if eod >= 0 else NO_EOD,
        around=Around(
            before=before,
            bos_token_id=bos if bos >= 0 else None,
            pad_token_id=pad if pad >= 0 else None,
        ),
        library=_CoreTokenizer(backend),
        missing_eod=f"{flag} {path} has no piece that ends a text; use --tokenizer-type "
        "SentencePieceTokenizer, which adds <EOD> behind its pieces",
    )


def _special_pieces(model: Any) -> list[str]:
    """Pieces that SentencePieceTokenizer reads as one token in a text: those that it adds, and the
    model's own for padding, begin and end, or names for those that the model lacks."""
    names = {"<PAD>": model.pad_id(), "<BOS>": model.bos_id(), "<EOS>": model.eos_id()}
    own = [model.id_to_piece(i) if i >= 0 else name for name, i in names.items()]
    return [*_SPECIAL_PIECES, *own]


def _tiktoken(
    tokenizer_model: str | None,
    *,
    pattern: str,
    num_special_tokens: int,
    special_tokens: tuple[str, ...] | list[str] | None,
    vocab_size: int | None,
    reads_names: bool,
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
        around=Around(bos_token_id=backend.bos_id),
        library=_CoreTokenizer(backend, reads_names=reads_names),
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
