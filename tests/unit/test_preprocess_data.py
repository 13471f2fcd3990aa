"""Text to indexed data sets."""

from __future__ import annotations

import codecs
import dataclasses
import gc
import gzip
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.trainer.common.errors import UsageError
from megatron.trainer.data import preprocess as preprocessing
from megatron.trainer.data.documents import stdlib_sources
from megatron.trainer.data.preprocess import Job, preprocess
from megatron.trainer.data.tokenizer import TOKENIZER_TYPES
from tests.helpers.processes import wait_until
from tests.helpers.tokenizer_files import flags_of

pytestmark = pytest.mark.unit

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
EOD = 256


def run_tool(*argv: str) -> int:
    spec = importlib.util.spec_from_file_location("preprocess_data", TOOL)
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return tool.main(list(argv))
    finally:
        signal.signal(signal.SIGTERM, handler)


def documents_of(prefix: Path, key: str = "text") -> list[bytes]:
    dataset: Any = IndexedDataset(f"{prefix}_{key}_document")
    return [bytes(document.tolist()) for document in dataset]


def job(tmp_path: Path, *inputs: Path | str, **options) -> Job:
    return Job(
        input=tuple(map(str, inputs)), output_prefix=str(tmp_path / "out" / "set"), **options
    )


def test_text_files_folders_and_patterns_keep_their_order(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("b.txt", "a.txt"):
        (folder / name).write_text(name)
    (tmp_path / "z.txt").write_text("grüße")
    (tmp_path / "y.txt").write_text("")
    (result,) = preprocess(job(tmp_path, tmp_path / "z.txt", folder, tmp_path / "[y]*.txt"))
    assert documents_of(tmp_path / "out/set") == ["grüße".encode(), b"a.txt", b"b.txt"]
    assert (result.num_documents, result.num_empty, result.num_tokens) == (3, 1, 7 + 5 + 5)
    assert result.num_bytes == 2 * result.num_tokens
    assert Path(result.data_path + ".bin").stat().st_size == result.num_bytes


@pytest.mark.parametrize("packed", [False, True])
def test_json_lines_and_keys(tmp_path, packed):
    lines = "".join(json.dumps({"text": f"t{i}", "note": f"n{i}"}) + "\n\n" for i in range(3))
    path = tmp_path / ("data.jsonl.gz" if packed else "data.json")
    path.write_bytes(gzip.compress(lines.encode()) if packed else lines.encode())
    results = preprocess(job(tmp_path, path, json_keys=("text", "note")))
    assert documents_of(tmp_path / "out/set", "text") == [b"t0", b"t1", b"t2"]
    assert documents_of(tmp_path / "out/set", "note") == [b"n0", b"n1", b"n2"]
    assert [result.num_documents for result in results] == [3, 3]


def test_in_a_folder_a_json_file_over_several_lines_is_one_text(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    settings = '{\n  "name": "a",\n  "text": 1\n}\n'
    (folder / "a.json").write_text(settings)
    (folder / "b.json").write_text('\n{"text": "b0"}\n{"text": "b1"}\n')
    (folder / "c.json.gz").write_bytes(gzip.compress(b"[\n1]"))
    (folder / "d.jsonl").write_text('{"text": "d"}\n')
    preprocess(job(tmp_path, folder))
    expected = [settings.encode(), b"b0", b"b1", b"[\n1]", b"d"]
    assert documents_of(tmp_path / "out/set") == expected
    for name in (folder / "a.json", folder / "*.json"):
        with pytest.raises(UsageError, match=r"a\.json:1 is not JSON"):
            preprocess(job(tmp_path, name))


def test_end_of_document_token_is_appended_when_asked(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    preprocess(job(tmp_path, tmp_path / "a.txt", append_eod=True))
    dataset: Any = IndexedDataset(str(tmp_path / "out/set_text_document"))
    assert dataset[0].tolist() == [ord("a"), ord("b"), EOD]


def test_workers_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(preprocessing, "_CHUNK_BYTES", 40)
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (i % 7)}) + "\n" for i in range(200)))
    (alone,) = preprocess(job(tmp_path, path))
    before = [Path(alone.data_path + end).read_bytes() for end in (".bin", ".idx")]
    (several,) = preprocess(job(tmp_path, path, workers=3))
    after = [Path(several.data_path + end).read_bytes() for end in (".bin", ".idx")]
    assert before == after
    assert several.num_empty == alone.num_empty == 29


LONE = r'{"text": "\ud800 lone"}'
BAD = {
    "{not json": "is not JSON",
    '["a list"]': "no text under text",
    "null": "no text under text",
    '{"other": "key"}': "no text under text",
    '{"text": 3}': "no text under text",
    '{"text": null}': "no text under text",
    LONE: r"\ud800 under text",
    r'{"text": "swapped \udc00\ud800"}': r"\udc00 under text",
    '{"text": "raw \0"}': "is not JSON",
    '{"text": "deep", "x": ' + "[" * 200_000 + "]" * 200_000 + "}": "nested too deeply",
    '{"text": "large", "x": ' + "9" * 5000 + "}": "a number is too long",
}
"""Lines that are no document, and what is said of each."""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, bad, workers):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + bad + "\n")
    with pytest.raises(UsageError, match=r"data\.jsonl:2 .*--skip-bad-lines") as caught:
        preprocess(job(tmp_path, path, workers=workers))
    assert BAD[bad] in str(caught.value) and "\n" not in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_no_tokenizer_meets_what_is_no_text(tmp_path, kind):
    path = tmp_path / "data.jsonl"
    odd = [json.dumps({"text": text}) for text in ("1 2", "", "\ud83c\udf88 \0", "3\0 4")]
    path.write_text("\n".join([*odd, *BAD, json.dumps({"text": "5"})]))
    with_files = job(tmp_path, path, **flags_of(kind, tmp_path))
    last = str(len(odd) + len(BAD) + 1)
    for workers in (1, 2):
        skipping = dataclasses.replace(with_files, skip_bad_lines=True, workers=workers)
        (result,) = preprocess(skipping)
        # This one takes numbers alone.
        also = 2 if kind == "NullTokenizer" else 0
        # Megatron-LM writes what the tokenizer gives: BOS of an empty text, too.
        num_empty = 0 if kind == "Llama2Tokenizer" else 1
        assert (result.num_bad, result.num_empty) == (len(BAD) + also, num_empty)
        assert result.num_documents + result.num_bad + result.num_empty == int(last)
    path.write_text(LONE)
    with pytest.raises(UsageError, match=r"data\.jsonl:1 has .*ud800.*--skip-bad-lines"):
        preprocess(with_files)


def test_a_text_that_its_tokenizer_refuses_is_one_line_and_skipped_when_asked(tmp_path):
    good, bad, long = (tmp_path / f"{name}.txt" for name in ("good", "bad", "long"))
    good.write_text("1 2")
    bad.write_bytes(b"caf\xe9 \xed\xa0\x80")
    long.write_text("9" * 30)
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": 9}
    for path in (bad, long):
        with pytest.raises(UsageError, match=rf"{path.name} cannot be tok.*--skip-bad-lines"):
            preprocess(job(tmp_path, good, path, **null))
    (result,) = preprocess(job(tmp_path, good, bad, long, **null, skip_bad_lines=True))
    assert (result.num_documents, result.num_bad) == (1, 2)
    (result,) = preprocess(job(tmp_path, good, bad))
    assert (result.num_documents, result.num_broken) == (2, 1)


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"text": "first"}\n{"text": "second"}\n')
    preprocess(job(tmp_path, path))
    assert documents_of(tmp_path / "out/set") == [b"first", b"second"]
    path.write_bytes('{"text": "of two bytes"}\n'.encode("utf-16"))
    with pytest.raises(UsageError, match=r"data\.jsonl:1 is not JSON.*--skip-bad-lines"):
        preprocess(job(tmp_path, path))


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.txt"])
def test_files_without_a_text_are_one_line(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    with pytest.raises(UsageError, match="no text to write for text; check --input"):
        preprocess(job(tmp_path, path))


def test_a_damaged_archive_is_one_line(tmp_path):
    whole = gzip.compress(json.dumps({"text": "x" * 5000}).encode(), compresslevel=0)
    path = tmp_path / "data.jsonl.gz"
    for at in (2, 12, 2000, len(whole) - 6):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(UsageError, match=r"data\.jsonl\.gz"):
            preprocess(job(tmp_path, path))


def test_bad_lines_are_counted_when_asked(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\nbad\n{"text": "caf\xe9"}\n')
    (result,) = preprocess(job(tmp_path, path, skip_bad_lines=True))
    assert (result.num_documents, result.num_bad, result.num_broken) == (2, 1, 1)
    assert documents_of(tmp_path / "out/set") == [b"a", "caf\ufffd".encode()]


def test_failing_again_keeps_the_old_data_set(tmp_path):
    good, bad = tmp_path / "a.txt", tmp_path / "b.jsonl"
    good.write_text("good")
    bad.write_text("bad")
    preprocess(job(tmp_path, good))
    with pytest.raises(UsageError):
        preprocess(job(tmp_path, bad))
    assert documents_of(tmp_path / "out/set") == [b"good"]
    assert len(list((tmp_path / "out").iterdir())) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--input", "nothing-*.txt"], "--input nothing-"),
        (["--input", str(TOOL), "--workers", "0"], "--workers 0"),
        (["--input", str(TOOL), "--log-interval", "0"], "--log-interval 0"),
        (["--input", os.devnull], "matches no file"),
        (["--input", str(TOOL), "--tokenizer-type", "NullTokenizer"], "--vocab-size"),
        (
            ["--input", str(TOOL), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
            "cannot be tokenized",
        ),
    ],
)
def test_wrong_flags_exit_with_2_and_one_line(tmp_path, capsys, argv, message):
    assert run_tool(*argv, "--output-prefix", str(tmp_path / "set")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_pipes_are_read_once_as_they_come(tmp_path: Path) -> None:
    """As Megatron-LM does: a shell's `<(...)`, standard input, and pipes with a name."""
    lines = "".join(f'{{"text": "line {i}"}}\n' for i in range(5000))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("p.txt", "p.jsonl.gz"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "a.txt").write_text("a\nb")
    want = [f"line {i}".encode() for i in range(5000)]
    for number, (words, documents) in enumerate(
        (
            ("--input <(cat a.jsonl)", want),
            ("--input <(cat a.jsonl) <(head -n 2 a.jsonl) --workers 2", [*want, *want[:2]]),
            ("--input /dev/stdin < a.jsonl", want),
            ("--input p.jsonl.gz & cat a.jsonl.gz > p.jsonl.gz; wait $!", want),
            ("--input p.txt & cat a.txt > p.txt; wait $!", [b"a\nb"]),
        )
    ):
        out = tmp_path / f"out{number}"
        tool = f"{sys.executable} {TOOL} --output-prefix {out} {words}"
        done = subprocess.run(
            ["bash", "-c", tool], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert documents_of(out) == documents
    tool = f"{sys.executable} {TOOL} --output-prefix out --input p.txt ./p.txt"
    done = subprocess.run(tool.split(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "./p.txt is a pipe, which is read once" in done.stderr


def test_a_place_that_cannot_be_written_exits_with_1(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert run_tool("--input", str(TOOL), "--output-prefix", str(tmp_path / "file" / "set")) == 1
    assert "--output-prefix" in capsys.readouterr().err


def test_the_tool_prints_what_to_use(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    prefix = str(tmp_path / "set")
    assert run_tool("--input", str(tmp_path / "a.txt"), "--output-prefix", prefix) == 0
    assert f"--data-path {prefix}_text_document" in capsys.readouterr().out


def interrupted(tmp_path, number):
    """A tool with two workers that got a signal at work, and ended with them: its code, what it
    said, and its output folder."""
    big, said, out = tmp_path / "big.jsonl", tmp_path / "said", tmp_path / "out"
    big.write_text((json.dumps({"text": "word " * 200}) + "\n") * 30_000)
    argv = ["--input", str(big), "--output-prefix", str(out / "set"), "--workers", "2"]

    def tool():
        # Python drops what a signal handler raises in a callback of the collector, as hypothesis
        # has one.
        gc.disable()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever other tests have left
        with said.open("w") as file:
            os.dup2(file.fileno(), 2)
            sys.stderr = file
            sys.exit(run_tool(*argv))

    # Forked, it imports nothing again.
    process = multiprocessing.get_context("fork").Process(target=tool)
    process.start()
    assert process.pid is not None
    # Its first line of progress.
    assert wait_until(lambda: said.exists() and "documents" in said.read_text(), 60)
    workers = psutil.Process(process.pid).children()
    os.kill(process.pid, number)
    process.join(60)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert len(workers) == 2 and not alive
    return process.exitcode, said.read_text(), out


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_interrupt_leaves_nothing(tmp_path, number, code, line):
    found, error, out = interrupted(tmp_path, number)
    assert found == code, error
    assert error.endswith(f"preprocess_data.py: {line}\n")
    assert list(out.iterdir()) == []


def test_workers_end_with_a_tool_that_is_killed(tmp_path):
    code, _, _ = interrupted(tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL


def test_standard_library_sources_are_complete_and_ordered(tmp_path):
    names = ["os.py", "json/decoder.py", "test/test_os.py", "site-packages/x.py", "a/b.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = [path.relative_to(tmp_path).as_posix() for path in stdlib_sources(tmp_path)]
    assert found == ["json/decoder.py", "os.py", "test/test_os.py"]
    real = stdlib_sources()
    assert len(real) > 100 and not any("site-packages" in path.parts for path in real)


SWALLOWED = """
import contextlib, signal, sys
from copus_ext.commands.main import main
from megatron.trainer.data.tokenizer import ByteLevelTokenizer

def tokenize(self, text):
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    raise AttributeError("module 'numpy' has no attribute 'matrix'")

ByteLevelTokenizer.tokenize = tokenize
sys.exit(main(["preprocess-data", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("more", [(), ("--skip-bad-lines",)])
def test_an_interrupt_that_a_package_swallowed_is_no_fault_of_the_text(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    (tmp_path / "in.txt").write_text("hello")
    words = ["--input", str(tmp_path / "in.txt"), "--output-prefix", str(tmp_path / "set"), *more]
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED, *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "copus preprocess-data: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


INTERRUPTED_TWICE = """
import multiprocessing, pathlib, signal, sys
from megatron.trainer.data import preprocess

ended, shutdown = [], preprocess.ProcessPoolExecutor.shutdown

def interrupted(self, *args, **options):
    signal.raise_signal(signal.SIGINT)
    shutdown(self, *args, **options)
    ended.append(self)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    preprocess.ProcessPoolExecutor.shutdown = interrupted
    folder = pathlib.Path(sys.argv[1])
    job = preprocess.Job(
        output_prefix=str(folder / "set"), input=(str(folder / "in.jsonl"),), workers=2
    )
    try:
        preprocess.preprocess(job)
    except KeyboardInterrupt:
        assert ended and not multiprocessing.active_children()
        print("interrupted")
"""


def test_a_second_interrupt_waits_until_the_workers_have_ended(tmp_path: Path) -> None:
    # In a process of its own: Ctrl-C would end the one that runs the tests.
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED_TWICE)
    (tmp_path / "in.jsonl").write_text('{"text": "hello"}\n')
    result = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # Cut off, it leaves workers that wait for ever, and the process with them.
    assert result.stdout == "interrupted\n", result.stderr
    assert not [x.name for x in tmp_path.iterdir() if x.name.startswith("set")]
