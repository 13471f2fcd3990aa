"""Indexed data sets on disk, checked before megatron-core opens them.

A data set is two files with one prefix: `.bin` holds the token numbers one after another, `.idx`
holds the lengths and the offsets of its documents. megatron-core trusts them; a missing or
truncated file ends there in an assertion, or in an endless loop when a split holds no token. Here
each such case is one sentence that names the flag.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.program import other_command
from megatron.trainer.data.tokenizer import Tokenizer

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_SCANNED_TOKENS = 1_000_000
_HASHED_DOCUMENTS = 1_000_000
_SCANNED_DOCUMENTS = 1_000_000
_LOOKED_DOCUMENTS = 256


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """An indexed data set that was found complete."""

    prefix: str
    """Path without `.bin` and `.idx`."""
    flag: str
    """The flag that named it."""
    lengths: numpy.ndarray
    """int32 [documents], tokens of each document."""
    dtype: str
    """Number format of the tokens."""

    @property
    def num_documents(self) -> int:
        """Number of documents, the unit of `--split`."""
        return len(self.lengths)

    def span(self, share: tuple[float, float]) -> slice:
        """Documents from one part of the whole to another, rounded as megatron-core does."""
        begin, end = (round(edge * self.num_documents) for edge in share)
        return slice(begin, end)

    def num_tokens(self, share: tuple[float, float] = (0.0, 1.0)) -> int:
        return int(self.lengths[self.span(share)].sum(dtype=numpy.int64))

    def fingerprint(self) -> int:
        """A number that changes with the documents; for the names of cached indices."""
        head = self.lengths[:_HASHED_DOCUMENTS].tobytes()
        return zlib.crc32(head, zlib.crc32(f"{self.num_documents} {self.dtype}".encode()))


def open_corpus(prefix: str, flag: str) -> Corpus:
    """Check an indexed data set and read its document lengths.

    Args:
        prefix: Path without `.bin` and `.idx`.
        flag: The flag to name in messages.

    Raises:
        UsageError: A file is missing, of another kind, or shorter than its header says.
    """
    idx, bin_ = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise UsageError(f"{flag} {prefix}: there is no file {path}{_hint(prefix)}")
    remake = f"make it again with {other_command('preprocess_data.py')}, or correct {flag}"
    size = idx.stat().st_size
    with idx.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise UsageError(f"{flag} {prefix}: {idx} is not the index of a data set; {remake}")
    _, version, code, num_sequences, num_documents = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise UsageError(
            f"{flag} {prefix}: {idx} has version {version} and token format {code}, "
            f"known are version 1 and formats {sorted(_DTYPES)}; {remake}"
        )
    expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if size < expected:
        raise UsageError(f"{flag} {prefix}: {idx} has {size} of {expected} bytes; {remake}")
    if not num_sequences:
        raise UsageError(f"{flag} {prefix}: the data set holds no document; {remake}")
    lengths = numpy.memmap(idx, dtype="<i4", mode="r", offset=_HEADER.size, shape=(num_sequences,))
    corpus = Corpus(prefix=prefix, flag=flag, lengths=lengths, dtype=_DTYPES[code])
    if problem := _contradiction(corpus, idx, num_documents):
        raise UsageError(f"{flag} {prefix}: {idx} is damaged, {problem}; {remake}")
    expected = corpus.num_tokens() * numpy.dtype(corpus.dtype).itemsize
    size = bin_.stat().st_size
    if size < expected:
        raise UsageError(f"{flag} {prefix}: {bin_} has {size} of {expected} bytes; {remake}")
    if not corpus.num_tokens():
        raise UsageError(f"{flag} {prefix}: the data set holds no token; {remake}")
    return corpus


def _contradiction(corpus: Corpus, idx: Path, num_entries: int) -> str | None:
    """What in an index cannot be. Of its offsets the first and last million are looked at.

    Args:
        num_entries: in its list of documents, which begins with 0 and ends with their number.
    """
    lengths, count = corpus.lengths, len(corpus.lengths)
    if int(lengths.min()) < 0:
        return "it has a document of negative length"
    size = numpy.dtype(corpus.dtype).itemsize
    start = _HEADER.size + lengths.nbytes
    offsets = numpy.memmap(idx, dtype="<i8", mode="r", offset=start, shape=(count,))
    for first in {0, max(count - _SCANNED_DOCUMENTS, 0)}:
        part = slice(first, first + _SCANNED_DOCUMENTS)
        ends = offsets[part] + lengths[part].astype(numpy.int64) * size
        if (ends[:-1] != offsets[part][1:]).any():
            return "its offsets do not follow from its lengths"
    if offsets[0] != 0 or offsets[-1] + int(lengths[-1]) * size != corpus.num_tokens() * size:
        return "its offsets do not cover the tokens"
    if num_entries < 2:
        return "it lists no document"
    start += offsets.nbytes
    listed = numpy.memmap(idx, dtype="<i8", mode="r", offset=start, shape=(num_entries,))
    if (listed[0], listed[-1]) != (0, count):
        return "its list of documents is that of another"
    return None


def check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    """Refuse a data set whose first or last million tokens do not fit the vocabulary.

    The bound keeps the start quick on large data; a data set made with another tokenizer shows
    early.

    Raises:
        UsageError: A token number is negative, or not below `vocab_size`.
    """
    total = corpus.num_tokens()
    count = min(total, _SCANNED_TOKENS)
    dtype = numpy.dtype(corpus.dtype)
    for first in sorted({0, total - count}):
        with open(corpus.prefix + ".bin", "rb") as stream:
            stream.seek(first * dtype.itemsize)
            tokens = numpy.fromfile(stream, dtype=dtype, count=count)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            raise UsageError(
                f"{corpus.flag} {corpus.prefix} holds token {low if low < 0 else high}, but the "
                f"vocabulary has {vocab_size} tokens; "
                "give the --tokenizer-type (or --vocab-size) it was made with"
            )


def notes_on_documents(corpus: Corpus, tokenizer: Tokenizer, *, eod_flags: str) -> list[str]:
    """Says where the first documents do not have the tokens that a tokenizer puts around them, as
    data of another tokenizer, or of a release that added others.

    Args:
        corpus: that was found complete.
        eod_flags: the flags of the run that look for ends of documents, or "".

    Raises:
        OSError: the tokens cannot be read.
    """
    documents = _first_documents(corpus)
    if not documents:
        return []
    where, notes = f"{corpus.flag} {corpus.prefix}", []
    before = numpy.array(tokenizer.around.before, dtype=numpy.int64)
    if before.size and not any(numpy.array_equal(d[: before.size], before) for d in documents):
        names = " ".join(map(tokenizer.name_of, map(int, before)))
        notes.append(
            f"{where}: no document begins with {names}, which this tokenizer puts before each "
            "text; give --tokenizer-hf-no-include-special-tokens (or the --tokenizer-type "
            "GPTSentencePieceTokenizer) if that is meant, else make the data again"
        )
    ends = {int(d[-1]) for d in documents}
    if tokenizer.eod < 0 or tokenizer.eod in ends:
        return notes
    own = f"{tokenizer.name_of(tokenizer.eod)} ({tokenizer.eod})"
    last = next(iter(ends))
    is_mark = len(ends) == 1 and len(documents) > 1 and not any(last in d[:-1] for d in documents)
    if is_mark:
        notes.append(
            f"{where}: documents end with {tokenizer.name_of(last)} ({last}), and the "
            f"end-of-document token of this tokenizer is {own}; set its eos_token to the former, "
            "or make the data again"
        )
    elif eod_flags:
        notes.append(
            f"{where}: no document ends with {own}, so that {eod_flags} may find no end; make the "
            "data again with --append-eod"
        )
    return notes


def _first_documents(corpus: Corpus) -> list[numpy.ndarray]:
    """Tokens of the first documents that have any, up to a bound."""
    lengths = corpus.lengths[:_LOOKED_DOCUMENTS].astype(numpy.int64)
    lengths = lengths[numpy.cumsum(lengths) <= _SCANNED_TOKENS]
    with open(corpus.prefix + ".bin", "rb") as stream:
        tokens = numpy.fromfile(stream, dtype=corpus.dtype, count=int(lengths.sum()))
    parts = numpy.split(tokens.astype(numpy.int64), numpy.cumsum(lengths)[:-1])
    return [part for part in parts if part.size]


def check_writable(folder: Path) -> bool:
    """Whether index files can be written into a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _hint(prefix: str) -> str:
    path = Path(prefix)
    if path.suffix in (".bin", ".idx") and path.is_file():
        return f"; leave out {path.suffix}"
    if Path(prefix + "_text_document.idx").is_file():
        return f"; did you mean {prefix}_text_document"
    command = other_command("preprocess_data.py")
    return f"; give the path without .bin and .idx, as {command} prints it"
