"""More wrong inputs for `bad_inputs`: what comes over sockets, and files that are quickly read."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import json
import pickle
import random
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers import spoil

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""`config.json` of a small model."""


# Sockets


def _generation() -> Any:
    from copus_ext.elastic.messages import Generation, Member

    members = tuple(Member(n, 0) for n in range(3))
    return Generation(number=2, members=members, store="127.0.0.1:1", kind="start")


class _Quiet:
    """Other nodes that say nothing."""

    def __init__(self) -> None:
        self.lines: dict[int, Any] = {}

    def tell(self, **message: Any) -> None:
        pass


def _agent(folder: Path) -> Any:
    from copus_ext.elastic.node import Agent
    from copus_ext.launch.workers import Launch

    shared = folder / "control" / "elastic" / "launch"
    shared.mkdir(parents=True)
    launch = Launch(
        name="launch",
        node=0,
        nodes=[0, 1, 2],
        num_ranks=1,
        endpoint="",
        folder=str(folder),
        shared=str(shared),
    )
    one = Agent(launch=launch, command=[], folder=shared)
    one._peers, one._store = _Quiet(), "127.0.0.1:1"  # pyright: ignore[reportAttributeAccessIssue]
    one._take(_generation())
    return one


def _said(data: bytes, takes: Any) -> list[dict[str, Any]]:
    """What is read of some bytes, up to where the connection counts as ended."""
    from copus_ext.elastic.messages import Lines

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        ours.sendall(data[: 1 << 16])
        ours.shutdown(socket.SHUT_WR)
        lines, found = Lines(theirs, takes), []
        while (messages := lines.read()) is not None:
            found += messages
        return found


_OF_PEERS: tuple[dict[str, Any], ...] = (
    {"beat": 1},
    {"died": [[1, 0, 0]]},
    {"gone": [[2, 0, 1]], "left": []},
    {"asked": [3, 1764374400000000000]},
    {"left": [[1, 0]]},
    {"is_ready": [[1, 0, 0], [2, 0, 0]]},
    {"ready": [[1, 0, 1]]},
    {"broken": 2},
)


def peer(rng: random.Random, folder: Path) -> str | None:
    """What a launcher is told by another, whose hello was right."""
    from copus_ext.elastic.messages import FROM_PEER
    from copus_ext.elastic.peers import Fenced

    generation = dataclasses.replace(_generation(), number=rng.randrange(5)).to_json()
    message = rng.choice((*_OF_PEERS, {"generation": generation}))
    data = spoil.spoiled_json(rng, message) + b"\n"
    agent = _agent(folder)

    def hear() -> None:
        for one in _said(data, FROM_PEER):
            agent._hear_peer(1, one)
            agent._propose()

    return spoil.problem_of(hear, Fenced)


def launcher(rng: random.Random, folder: Path) -> str | None:
    """What a rank is told by its launcher, and a launcher by its rank."""
    from copus_ext.elastic.messages import FROM_LAUNCHER, FROM_RANK, Generation

    whole = _generation().to_json()
    told = spoil.spoiled_json(rng, {"generation": whole}) + b"\n"
    said = (
        spoil.spoiled_json(rng, rng.choice(({"ready": 1}, {"broken": 3}, {"leaving": 1}))) + b"\n"
    )

    def hear() -> None:
        for message in _said(told, FROM_LAUNCHER):
            for one in message.values():
                Generation.from_json(one)
        for message in _said(said, FROM_RANK):
            assert all(type(value) is int for value in message.values())

    return spoil.problem_of(hear)


@functools.lru_cache(maxsize=1)
def _peers() -> tuple[Any, Any]:
    """A launcher that listens, for as long as the process lives."""
    import selectors
    import tempfile

    from copus_ext.elastic.peers import Peers
    from copus_ext.launch.listen import LOOPBACK
    from copus_ext.launch.workers import Launch

    launch = Launch(name="l", node=0, nodes=[0, 1], num_ranks=1, endpoint="", folder="")
    folder = Path(tempfile.mkdtemp())
    return Peers(launch, folder, selectors.DefaultSelector(), LOOPBACK), folder


def stranger(rng: random.Random, folder: Path) -> str | None:
    """A connection with a launcher that says a wrong hello, or a right one in pieces."""
    from copus_ext.elastic.peers import hello

    peers, _ = _peers()
    right = hello(peers._token, 1)
    said = rng.choice(
        (spoil.spoiled_bytes(rng, right), spoil.spoiled_json(rng, {"hello": 1}), right)
    )
    host, _, port = peers._address.rpartition(":")

    def speak() -> None:
        with socket.create_connection((host, int(port)), timeout=10) as one:
            try:
                one.sendall(said[:100_000])
                one.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # closed already
            met: list[Any] = []
            while not met:
                events = peers._select.select(0 if peers._strangers else 10)
                if not events and not peers._strangers:
                    break
                for key, _ in events:
                    if key.data[0] == "server":
                        met += peers.accept()
                    elif (found := peers.greet(key.fileobj)) is not None:
                        met.append(found)
                if not peers._strangers:
                    break
            for _, connection in met:
                connection.close()
        assert bool(met) == said.startswith(right), (said[:80], met)
        assert not peers._strangers

    return spoil.problem_of(speak)


def contact(rng: random.Random, folder: Path) -> str | None:
    """What a launcher leaves for the others."""
    from copus_ext.elastic.peers import Contact
    from copus_ext.reshard.checked import read_value

    whole = Contact(address="127.0.0.1:4000", token="ab" * 16, ranks=8)
    path = folder / "node-1.json"
    path.write_bytes(spoil.spoiled_json(rng, whole.to_json()))

    def read() -> None:
        found = read_value(path, Contact.from_json)
        assert found is None or 0 <= int(found.address.rpartition(":")[2]) < 100_000

    return spoil.problem_of(read, ValueError)


def error_file(rng: random.Random, folder: Path) -> str | None:
    """The error that a rank leaves for its launcher, and what a user asks a run for."""
    from copus_ext.elastic.messages import Member
    from copus_ext.elastic.rank_process import RankProcess
    from megatron.training.common.control import RANKS_FILE, ranks_asked

    path = folder / "error.json"
    message = {"message": "ValueError: x", "extraInfo": {"py_callstack": "a\nb", "time": 1.0}}
    path.write_bytes(spoil.spoiled_json(rng, {"message": message}))
    nothing: Any = None
    rank = RankProcess(Member(0, 0), nothing, nothing, path)
    asked = folder / RANKS_FILE
    asked.parent.mkdir(parents=True)
    asked.write_bytes(spoil.spoiled_bytes(rng, b"16\n"))

    def read() -> None:
        rank.failure(1, 0).to_json()
        ranks_asked(folder)

    return spoil.problem_of(read)


# Files of people and other programs


def settings(rng: random.Random, folder: Path) -> str | None:
    """`--copus-config`."""
    from copus_ext.controller.flags import read_settings
    from megatron.training.common.errors import UsageError

    lines = [
        "objective: copus",
        "min-global-batch-size: 8",
        "interval: 1e6",
        "batch-grid: [8, 16]",
        "# é",
    ]
    text = spoil.spoiled_text(rng, "\n".join(lines)) if rng.random() < 0.7 else ""
    path = folder / "copus.yaml"
    data = text.encode(errors="surrogatepass") or spoil.spoiled_json(rng, {"objective": "copus"})
    path.write_bytes(data)
    return spoil.problem_of(lambda: read_settings(path), UsageError)


def too_large(rng: random.Random, folder: Path) -> str | None:
    """What ran out of memory in a run."""
    from copus_ext.controller.out_of_memory import FILE, TooLarge, remembered

    whole = TooLarge(
        configuration="tp1.pp1,micro_batch=1,none",
        replicas=2,
        micro_batch_size=4,
        seq_length=64,
    )
    path = folder / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(spoil.spoiled_lines(rng, [dataclasses.asdict(whole)] * 3))

    def read() -> None:
        for one in remembered(folder):
            one.is_at_most(whole)
            str(one)

    return spoil.problem_of(read)


def trace(rng: random.Random, folder: Path) -> str | None:
    """A trace of steps, from torch's profiler."""
    from copus_ext.monitor.trace import base_of, with_steps, write_trace

    events = [
        {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "pid": 7, "tid": 1, "ts": 5.5, "dur": 2.0, "name": "step", "id": 3},
    ]
    path = folder / "rank0.steps1-2.json.gz"
    content = spoil.spoiled_json(rng, {"baseTimeNanoseconds": 5, "traceEvents": events})
    packed = gzip.compress(content, 1)
    path.write_bytes(spoil.spoiled_bytes(rng, packed) if rng.random() < 0.3 else packed)

    def read() -> None:
        base_of(path)
        whole, problems = with_steps({"baseTimeNanoseconds": 0, "traceEvents": []}, [path])
        write_trace(folder / "whole.json", whole)
        assert all("\n" not in problem for problem in problems)

    return spoil.problem_of(read)


def model_shape(rng: random.Random, folder: Path) -> str | None:
    """`config.json`, by the planner."""
    from copus_ext.cost_model.hugging_face import spec_of_config

    path = folder / "config.json"
    path.write_bytes(spoil.spoiled_json(rng, MODEL))
    return spoil.problem_of(lambda: spec_of_config(path, seq_length=128), ValueError)


@functools.lru_cache(maxsize=1)
def _index() -> tuple[bytes, bytes]:
    """A small index of a checkpoint, and a common state."""
    import tempfile

    import torch
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        state = {"a": torch.ones(4), "b": torch.ones(2, 2)}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        common = io.BytesIO()
        torch.save({"iteration": 3, "content_metadata": {}, "checkpoint_version": 3.0}, common)
        return (Path(folder) / ".metadata").read_bytes(), common.getvalue()


def pickled(rng: random.Random, folder: Path) -> str | None:
    """Index, common state and mark of a checkpoint; damaged, nested, or of other classes."""
    from megatron.training.checkpoint.convert.archive import _check_format
    from megatron.training.checkpoint.files import COMMON, CORE_MARK
    from megatron.training.checkpoint.safe_index import METADATA, read_common, read_index
    from megatron.training.common.errors import Refused

    index, common = _index()
    damaged = spoil.spoiled_bytes(rng, index)
    how = rng.choice(("bytes", "bytes", "nest", "length", "other"))
    if damaged == index:
        how = "bytes"
    hostile = {
        "nest": b"\x80\x04" + b"(" * 3000 + b"]" * rng.choice((10, 20_000)),
        "length": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x",
        "other": pickle.dumps(rng.choice(([[]], {"a": 1}, 1 << 5000, "x", None, {3: {4: (5,)}}))),
    }
    (folder / METADATA).write_bytes(hostile.get(how) or damaged)
    data = spoil.spoiled_bytes(rng, common)
    if how in hostile:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as packed:
            packed.writestr("archive/data.pkl", hostile[how])
            packed.writestr("archive/version", "3\n")
        data = out.getvalue()
    (folder / COMMON).write_bytes(data)
    (folder / CORE_MARK).write_bytes(spoil.spoiled_json(rng, {"sharded_backend": "torch_dist"}))
    readers: tuple[Callable[[], Any], ...] = (
        lambda: read_index(folder / METADATA),
        lambda: read_common(folder),
        lambda: _check_format(folder),
    )
    found = (spoil.problem_of(read, Refused) for read in readers)
    return next((problem for problem in found if problem), None)


def tracker(rng: random.Random, folder: Path) -> str | None:
    """Tracker, names and manifest of a `--save` directory."""
    from megatron.training.checkpoint import files

    names = ("iter_0000003", "iter_\u00b2", "iter_\u0663", "iter_", "iter_-1", "iter_" + "9" * 200)
    own = files.folder_of(folder, 3)
    for name in {own.name, *rng.sample(names, 2)}:
        (folder / name).mkdir()
    (own / files.CORE_MARK).write_text("{}")
    files.write_manifest(own, 3, {"a.distcp": (5, 6)})
    path = own / files.MANIFEST
    path.write_bytes(spoil.spoiled_json(rng, json.loads(path.read_text())))
    (folder / files.TRACKER).write_bytes(spoil.spoiled_bytes(rng, b"3\n"))
    found = spoil.problem_of(lambda: (files.complete_iterations(folder), files.damage(own)))
    return (
        found
        or spoil.problem_of(lambda: files.read_latest(folder), ValueError)
        or spoil.problem_of(lambda: files.read_manifest(own), ValueError)
    )


def document(rng: random.Random, folder: Path) -> str | None:
    """A line of a text to be tokenized, a prompt, and a list of layers with experts."""
    from copus_ext.commands.generate import _prompt_in
    from megatron.training.common.errors import UsageError
    from megatron.training.config.moe_flags import layers_with_experts
    from megatron.training.data.documents import Document

    raw = spoil.spoiled_json(rng, {"text": "once upon a time \u00e9"})
    freq = spoil.spoiled_text(rng, rng.choice(("[0]*1+[1]*3", "2", "([1, 0] + [1]) * 2")))
    if rng.random() < 0.1:
        freq = rng.choice("([-") * rng.choice((90, 300, 5000))
    return (
        spoil.problem_of(
            lambda: Document(where="f:1", raw=raw, is_json=True).texts(["text"]), UsageError
        )
        or spoil.problem_of(lambda: _prompt_in(raw.decode(errors="replace"), "line 1"), UsageError)
        or spoil.problem_of(lambda: layers_with_experts(freq, 4), ValueError)
    )


def hosts(rng: random.Random, folder: Path) -> str | None:
    """A file of hosts, and a list of nodes as SLURM writes it."""
    from copus_ext.launch.slurm import expand_nodes, read_hosts
    from megatron.training.common.errors import UsageError

    path = folder / "hosts"
    path.write_bytes(spoil.spoiled_bytes(rng, b"node-1\nnode-2 # first\n\nnode-3\n"))
    text = spoil.spoiled_text(rng, "gpu[01-04,7],cpu-[1-2]x")
    return spoil.problem_of(lambda: read_hosts(path), UsageError) or spoil.problem_of(
        lambda: expand_nodes(text), UsageError, ValueError
    )


def run_directory(rng: random.Random, folder: Path) -> str | None:
    """A run, as status and report see it."""
    from copus_ext.monitor.run_files import RunReader
    from megatron.training.logging.metrics import METRICS_FILE, next_number, previous_launches

    about = {"v": 1, "launch": "7.0.1", "t": 1e9}
    records = [
        {**about, "kind": "run.start", "iteration": 0, "config": {"seed": 1}},
        {**about, "kind": "step", "iteration": 1, "consumed_samples": 8, "losses": {"lm loss": 2}},
        {**about, "kind": "eval", "iteration": 1, "split": "valid", "losses": {"lm loss": 2}},
        {**about, "kind": "run.end", "iteration": 1},
    ]
    (folder / METRICS_FILE).write_bytes(spoil.spoiled_lines(rng, records))
    (folder / "config.json").write_bytes(spoil.spoiled_json(rng, {"seed": 1}))

    def read() -> None:
        reader = RunReader(folder)
        reader.refresh()
        reader.history()
        assert next_number("7.0.", previous_launches(folder)) >= 0

    return spoil.problem_of(read)


@functools.lru_cache(maxsize=1)
def _tokenizer() -> bytes:
    import tempfile

    from tests.helpers.tokenizer_files import fast_file

    with tempfile.TemporaryDirectory() as folder:
        return fast_file(Path(folder)).read_bytes()


def tokenizer(rng: random.Random, folder: Path) -> str | None:
    """`tokenizer.json`."""
    from megatron.training.common.errors import UsageError
    from megatron.training.data.tokenizer import build_tokenizer

    path, whole = folder / "tokenizer.json", _tokenizer()
    data = spoil.spoiled_bytes(rng, whole)
    path.write_bytes(data if rng.random() < 0.5 else spoil.spoiled_json(rng, json.loads(whole)))

    def read() -> None:
        made = build_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
        assert made.vocab_size > 0

    return spoil.problem_of(read, UsageError)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {
    check.__name__.replace("_", " "): check
    for check in (
        *(peer, launcher, stranger, contact, error_file, settings, too_large),
        *(trace, model_shape, pickled, tracker),
        *(document, hosts, run_directory, tokenizer),
    )
}
"""What can be wrong, and its check."""
