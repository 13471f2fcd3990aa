"""More wrong inputs for `bad_inputs`: what comes over sockets, and files that are quickly read."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import pickle
import random
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


# Files of people and other programs


def settings(rng: random.Random, folder: Path) -> str | None:
    """`--copus-config`."""
    from copus_ext.controller.flags import read_settings
    from megatron.trainer.common.errors import UsageError

    lines = [
        "gns_estimator: micro",
        "min-global-batch-size: 8",
        "interval: 1e6",
        "batch-grid: [8, 16]",
        "# é",
    ]
    text = spoil.spoiled_text(rng, "\n".join(lines)) if rng.random() < 0.7 else ""
    path = folder / "copus.yaml"
    data = text.encode(errors="surrogatepass") or spoil.spoiled_json(
        rng, {"gns_estimator": "micro"}
    )
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
    """Index and common state of a checkpoint; damaged, nested, or of other classes."""
    from megatron.trainer.checkpoint.files import COMMON
    from megatron.trainer.checkpoint.safe_index import METADATA, read_common, read_index
    from megatron.trainer.common.errors import Refused

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
    readers: tuple[Callable[[], Any], ...] = (
        lambda: read_index(folder / METADATA),
        lambda: read_common(folder),
    )
    found = (spoil.problem_of(read, Refused) for read in readers)
    return next((problem for problem in found if problem), None)


def tracker(rng: random.Random, folder: Path) -> str | None:
    """Tracker, names and manifest of a `--save` directory."""
    from megatron.trainer.checkpoint import files

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
    """A line of a text to be tokenized, and a list of layers with experts."""
    from megatron.trainer.common.errors import UsageError
    from megatron.trainer.config.moe_flags import layers_with_experts
    from megatron.trainer.data.documents import Document

    raw = spoil.spoiled_json(rng, {"text": "once upon a time \u00e9"})
    freq = spoil.spoiled_text(rng, rng.choice(("[0]*1+[1]*3", "2", "([1, 0] + [1]) * 2")))
    if rng.random() < 0.1:
        freq = rng.choice("([-") * rng.choice((90, 300, 5000))
    return spoil.problem_of(
        lambda: Document(where="f:1", raw=raw, is_json=True).texts(["text"]), UsageError
    ) or spoil.problem_of(lambda: layers_with_experts(freq, 4), ValueError)


def hosts(rng: random.Random, folder: Path) -> str | None:
    """A file of hosts, and a list of nodes as SLURM writes it."""
    from copus_ext.launch.slurm import expand_nodes, read_hosts
    from megatron.trainer.common.errors import UsageError

    path = folder / "hosts"
    path.write_bytes(spoil.spoiled_bytes(rng, b"node-1\nnode-2 # first\n\nnode-3\n"))
    text = spoil.spoiled_text(rng, "gpu[01-04,7],cpu-[1-2]x")
    return spoil.problem_of(lambda: read_hosts(path), UsageError) or spoil.problem_of(
        lambda: expand_nodes(text), UsageError, ValueError
    )


def run_directory(rng: random.Random, folder: Path) -> str | None:
    """A run, as status and report see it."""
    from copus_ext.monitor.run_files import RunReader
    from megatron.trainer.logging.metrics import METRICS_FILE, next_number, previous_launches

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
    from megatron.trainer.common.errors import UsageError
    from megatron.trainer.data.tokenizer import build_tokenizer

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
        *(settings, too_large),
        *(model_shape, pickled, tracker),
        *(document, hosts, run_directory, tokenizer),
    )
}
"""What can be wrong, and its check."""
