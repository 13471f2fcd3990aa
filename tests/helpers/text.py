"""A small data set of real text, which the runs of tests train on: sources of Python's standard
library, a top-level block for each document.

Its tokens are ASCII codes, and 127 ends a document, so that it fits a NullTokenizer of 127 tokens
and every tokenizer of more.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    import torch

VARIABLE = "COPUS_TEST_TEXT"
"""Environment variable with the prefix, for all processes that a test process starts."""
_VOCAB_SIZE = 127
_ROOT = Path(__file__).resolve().parents[2]
_NAME, _LINES = "stdlib_text_document", "stdlib_lines_text_document"
_NUM_DOCUMENTS, _MAX_BYTES = 1000, 1000


@functools.cache
def text_prefix() -> str:
    """What `--data-path` takes: a data set of this process and of all that it starts, so that no
    other process writes the same index files. It goes with this process."""
    if prefix := os.environ.get(VARIABLE):
        return prefix
    if "RANK" in os.environ:
        raise RuntimeError(f"ranks share a data set: give its prefix in {VARIABLE}")
    folder = Path(tempfile.mkdtemp(prefix="copus-text-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in _made_once().glob("*_document.*"):
        shutil.copy(file, folder)
    os.environ[VARIABLE] = str(folder / _NAME)
    return os.environ[VARIABLE]


def lines_prefix() -> str:
    """A data set of the same sources whose documents are single lines, for what depends on the ends
    of documents: of a sample of some tokens many are masked by `--eod-mask-loss`."""
    return str(Path(text_prefix()).with_name(_LINES))


def tokens() -> torch.Tensor:
    """int64 [n] all tokens of the text, for tests that cut documents of their own."""
    import numpy
    import torch

    found = numpy.fromfile(f"{text_prefix()}.bin", dtype=numpy.uint16)
    return torch.from_numpy(found.astype(numpy.int64))


def _made_once() -> Path:
    """A folder with the data set, which the first process of this machine makes."""
    recipe = zlib.crc32(Path(__file__).read_bytes() + sys.version.encode())
    folder = Path(tempfile.gettempdir()) / f"copus-test-text-{os.getuid()}-{recipe:08x}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                _make(Path(work) / "made")
                (Path(work) / "made").rename(folder)
    return folder


def _make(folder: Path) -> None:
    """Writes the data sets as a user would: documents as JSON lines, and the tool."""
    folder.mkdir()
    blocks = list(itertools.islice(_blocks(), _NUM_DOCUMENTS))
    lines = [line for block in blocks for line in block.split(b"\n") if line.strip()]
    for name, documents in (("stdlib", blocks), ("stdlib_lines", lines)):
        texts = folder / f"{name}.jsonl"
        with texts.open("w") as file:
            for document in documents:
                file.write(json.dumps({"text": " ".join(map(str, document))}) + "\n")
        tool = [sys.executable, str(_ROOT / "tools/preprocess_data.py"), "--input", str(texts)]
        tool += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(_VOCAB_SIZE)]
        tool += ["--append-eod", "--output-prefix", str(folder / name)]
        subprocess.run(tool, check=True, cwd=_ROOT, stdout=subprocess.DEVNULL)


def _blocks() -> Iterator[bytes]:
    """Short definitions of the standard library, and what stands between them."""
    from megatron.trainer.data.documents import stdlib_sources

    for path in stdlib_sources():
        text = path.read_text(encoding="utf-8", errors="replace")
        for block in text.encode("ascii", errors="replace").split(b"\n\n\n"):
            if block.strip() and len(block) <= _MAX_BYTES:
                yield block
