"""Makes indexed data sets: tokenizes documents on workers and writes .bin and .idx in one go."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tqdm import tqdm

from megatron.trainer.common.child_processes import end_with_parent
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.common.program import was_interrupted
from megatron.trainer.data.documents import (
    MEND,
    Document,
    find_inputs,
    read_documents,
    stdlib_sources,
)
from megatron.trainer.data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    require_eod,
    tokens_line,
)

_CHUNK_BYTES = 1 << 20
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to make from what; the fields are the flags of `copus preprocess-data`."""

    output_prefix: str
    """Path of the result; `_KEY_document.bin` and `.idx` are added."""
    input: tuple[str, ...] | None = None
    """Files, folders and patterns, or None for the standard library's sources."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON line; a data set is made of each."""
    tokenizer_type: str = "ByteLevelTokenizer"
    """See `tokenizer.build_tokenizer`, also for the fields that follow."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer."""
    vocab_size: int | None = None
    """Vocabulary size, where the tokenizer asks for one."""
    vocab_file: str | None = None
    """Vocabulary of GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merges of GPT2BPETokenizer."""
    tiktoken_pattern: str | None = None
    """Split pattern of TikTokenizer."""
    tiktoken_num_special_tokens: int = 1000
    """Special tokens of TikTokenizer."""
    tiktoken_special_tokens: tuple[str, ...] | None = None
    """Names of the special tokens of TikTokenizer."""
    tokenizer_hf_include_special_tokens: bool = True
    """Whether HuggingFaceTokenizer adds what its post-processor adds."""
    legacy_tokenizer: bool = False
    """Whether TikTokenizer reads the names of special tokens in a text as text."""
    append_eod: bool = False
    """Whether each document ends with the end-of-document token."""
    workers: int = 1
    """Processes that tokenize."""
    log_interval: int = 1000
    """Documents between two lines of progress where there is no progress bar."""
    skip_bad_lines: bool = False
    """Whether documents that cannot be read or tokenized are counted instead of refused."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers} is not positive; give 1 or more")
        if self.log_interval < 1:
            raise UsageError(f"--log-interval {self.log_interval} is not positive; give 1 or more")
        if len(set(self.json_keys)) != len(self.json_keys):
            raise UsageError(f"--json-keys {' '.join(self.json_keys)} names a key twice")

    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(
            tokenizer_type=self.tokenizer_type,
            tokenizer_model=self.tokenizer_model,
            vocab_size=self.vocab_size,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            tiktoken_pattern=self.tiktoken_pattern,
            tiktoken_num_special_tokens=self.tiktoken_num_special_tokens,
            tiktoken_special_tokens=self.tiktoken_special_tokens,
            tokenizer_hf_include_special_tokens=self.tokenizer_hf_include_special_tokens,
            legacy_tokenizer=self.legacy_tokenizer,
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """A data set that was made."""

    data_path: str
    """What `--data-path` takes."""
    num_documents: int
    num_tokens: int
    num_bytes: int
    """Size of the .bin file."""
    num_empty: int
    """Documents left out because they hold no text."""
    num_bad: int
    """Documents left out because they could not be read or tokenized."""
    num_broken: int
    """Documents in which bytes that are no UTF-8 were replaced."""
    seconds: float
    """Wall-clock time."""
    tokens_line: str
    """What was written around each text."""

    def summary(self) -> str:
        return (
            f"{self.data_path}: {self.num_documents} documents, {self.num_tokens} tokens, "
            f"{self.num_bytes} bytes in {self.seconds:.1f} s; left out: {self.num_empty} empty "
            f"documents, {self.num_bad} bad lines; not UTF-8: {self.num_broken} documents"
        )


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Tokens of one document, or why there are none."""

    tokens: tuple[numpy.ndarray, ...]
    """One array per key; an empty one stands for a text that is left out."""
    error: str | None = None
    """Why the document cannot be read."""
    is_broken: bool = False
    """Whether bytes that are no UTF-8 were replaced."""


class Encoder:
    def __init__(self, job: Job) -> None:
        self._keys = job.json_keys
        self._append_eod = job.append_eod
        self._tokenizer = job.tokenizer()
        self._dtype = DType.optimal_dtype(self._tokenizer.vocab_size)

    def __call__(self, document: Document) -> Encoded:
        """Tokens of a document, in the smallest number format that holds the vocabulary."""
        try:
            arrays = tuple(self._encode(text) for text in document.texts(self._keys))
        except UsageError as error:
            return Encoded(tokens=(), error=str(error))
        except MemoryError:
            raise
        except Exception as error:  # the packages raise many kinds
            if was_interrupted():  # within an import, which a package then lacks
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            line = f"{document.where} cannot be tokenized ({reason}); {MEND}"
            return Encoded(tokens=(), error=line)
        return Encoded(tokens=arrays, is_broken=document.is_broken())

    def _encode(self, text: str) -> numpy.ndarray:
        ids = numpy.array(self._tokenizer.tokenize(text), dtype=numpy.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size:
            raise ValueError(f"a token is not below the vocabulary, {self._tokenizer.vocab_size}")
        if ids.size and self._append_eod:
            ids = numpy.append(ids, self._tokenizer.eod)
        return ids.astype(self._dtype)


def preprocess(job: Job) -> list[Result]:
    """Make a data set of each JSON key; text files take part in each.

    Returns:
        What was made, in the order of `--json-keys`.

    Raises:
        UsageError: The input or the flags do not work; nothing is left behind.
        OSError: The result cannot be written; nothing is left behind.
        KeyboardInterrupt: It was interrupted; nothing is left behind.
    """
    began = time.monotonic()
    files = stdlib_sources() if job.input is None else find_inputs(job.input)
    counts: Counter[str] = Counter()
    tokenizer = job.tokenizer()
    if job.append_eod:
        require_eod(tokenizer, "--append-eod")
    with (
        _Outputs(job, tokenizer) as outputs,
        contextlib.closing(_encode_all(job, read_documents(files, job.input or ()))) as encoded,
    ):
        for one in _progress(encoded, job.log_interval):
            if one.error and not job.skip_bad_lines:
                raise UsageError(one.error)
            if one.error:
                counts["bad"] += 1
            counts["broken"] += one.is_broken
            for key, tokens in zip(job.json_keys, one.tokens):
                outputs.add(key, tokens)
        if was_interrupted():  # and a package has swallowed it
            raise KeyboardInterrupt
        return [
            outputs.result(
                key,
                num_bad=counts["bad"],
                num_broken=counts["broken"],
                seconds=time.monotonic() - began,
            )
            for key in outputs.commit()
        ]


class _Outputs:
    """The files being written, one pair per key, under temporary names until `commit`."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._line = tokens_line(tokenizer, append_eod=job.append_eod)
        self._prefixes = {key: f"{job.output_prefix}_{key}_document" for key in job.json_keys}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._builders: dict[str, IndexedDatasetBuilder] = {}
        self._dtype = DType.optimal_dtype(tokenizer.vocab_size)

    def __enter__(self) -> _Outputs:
        try:
            for key, prefix in self._prefixes.items():
                Path(prefix).parent.mkdir(parents=True, exist_ok=True)
                self._builders[key] = IndexedDatasetBuilder(
                    self._temporary(prefix, ".bin"), dtype=self._dtype
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for builder in self._builders.values():
            # A full disk shows again when the rest of the buffer is written out here.
            with contextlib.suppress(OSError):
                builder.data_file.close()
        for prefix in self._prefixes.values():
            for suffix in (".bin", ".idx"):
                Path(self._temporary(prefix, suffix)).unlink(missing_ok=True)

    def add(self, key: str, tokens: numpy.ndarray) -> None:
        """Append a document; an empty one is only counted."""
        if not len(tokens):
            self._counts[key, "empty"] += 1
            return
        self._builders[key].add_document(tokens, [len(tokens)])  # type: ignore[arg-type]
        self._counts[key, "documents"] += 1
        self._counts[key, "tokens"] += len(tokens)

    def commit(self) -> list[str]:
        """Give the files their names, each index last since it is what makes a data set."""
        for key in self._prefixes:
            if not self._counts[key, "documents"]:
                raise UsageError(f"there is no text to write for {key}; check --input")
        for key, prefix in self._prefixes.items():
            self._builders[key].finalize(self._temporary(prefix, ".idx"))
            for suffix in (".bin", ".idx"):
                _flush_to_disk(self._temporary(prefix, suffix))
        for prefix in self._prefixes.values():
            # An old index must never describe the new tokens.
            Path(prefix + ".idx").unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                os.replace(self._temporary(prefix, suffix), prefix + suffix)
        return list(self._prefixes)

    def result(self, key: str, *, num_bad: int, num_broken: int, seconds: float) -> Result:
        prefix = self._prefixes[key]
        return Result(
            data_path=prefix,
            num_documents=self._counts[key, "documents"],
            num_tokens=self._counts[key, "tokens"],
            num_bytes=Path(prefix + ".bin").stat().st_size,
            num_empty=self._counts[key, "empty"],
            num_bad=num_bad,
            num_broken=num_broken,
            seconds=seconds,
            tokens_line=self._line,
        )

    def _temporary(self, prefix: str, suffix: str) -> str:
        return f"{prefix}.partial-{os.getpid()}{suffix}"


def _flush_to_disk(path: str) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def _encode_all(job: Job, documents: Iterable[Document]) -> Generator[Encoded, None, None]:
    """Tokens of all documents, in order; the workers stop when the iterator is closed."""
    if job.workers == 1:
        yield from map(_encoder(job), documents)
        return
    methods = multiprocessing.get_all_start_methods()
    executor = ProcessPoolExecutor(
        job.workers,
        # A fresh interpreter would import torch once more for each worker.
        mp_context=multiprocessing.get_context("fork" if "fork" in methods else "spawn"),
        initializer=_start_worker,
        initargs=(os.getpid(),),
    )
    try:
        with _stop_signals_held():
            # The first task starts all processes.
            executor.submit(_encode_chunk, job, [])
        # A bounded queue: the whole input may be larger than memory.
        waiting: deque[Future[list[Encoded]]] = deque()
        for chunk in _chunks(documents):
            waiting.append(executor.submit(_encode_chunk, job, chunk))
            if len(waiting) > 4 * job.workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenExecutor as error:
        raise TrainingFailure(
            f"a worker process died ({error}); give fewer --workers or more memory"
        ) from error
    finally:
        with _interrupts_deferred():
            executor.shutdown(cancel_futures=True)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    num_bytes = 0
    for document in documents:
        chunk.append(document)
        num_bytes += len(document.raw)
        if num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _encode_chunk(job: Job, documents: list[Document]) -> list[Encoded]:
    return list(map(_encoder(job), documents))


@functools.cache
def _encoder(job: Job) -> Encoder:
    """The encoder of this process: a tokenizer may take seconds to load."""
    return Encoder(job)


@contextlib.contextmanager
def _stop_signals_held() -> Iterator[None]:
    # Python drops an exception that a signal handler raises while it forks.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Answers Ctrl-C and SIGTERM afterwards: one that cuts off the end of the workers leaves them
    waiting for ever. A mask would not do, since the threads of the executor take the signal too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    before = {n: signal.signal(n, lambda number, _: late.append(number)) for n in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if late:
            signal.raise_signal(late[0])


def _start_worker(parent: int) -> None:
    end_with_parent(parent)
    # Ctrl-C reaches every process of the terminal; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def _progress(encoded: Iterator[Encoded], log_interval: int) -> Iterator[Encoded]:
    """The same items, with a progress bar on a terminal, else a line every `log_interval`."""
    if sys.stderr.isatty():
        yield from tqdm(encoded, unit=" documents")
        return
    began = time.monotonic()
    for number, one in enumerate(encoded, start=1):
        yield one
        if number % log_interval == 0:
            rate = number / max(time.monotonic() - began, 1e-9)
            print(f"{number} documents, {rate:.0f} documents/s", file=sys.stderr, flush=True)
