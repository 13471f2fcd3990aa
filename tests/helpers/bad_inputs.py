"""Inputs that are wrong in drawn ways, and what each reader of the project does with them: an
answer or one line, never a traceback, never a half-made output."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.trainer.common.extras import extras
from tests.helpers import bad_files, spoil
from tests.helpers.jobs import TINY
from tests.helpers.launch import ROOT

Check = Callable[[random.Random, Path], str | None]
"""Spoils one input in an empty folder and reads it; what is wrong with the reader, or None."""

_JOURNAL = ROOT / "docs" / "results" / "act_run.journal.jsonl"


def flags(rng: random.Random, folder: Path) -> str | None:
    """`pretrain_gpt.py`, up to where processes would start."""
    from copus_ext.commands import pretrain
    from copus_ext.controller.flags import CopusConfig
    from megatron.trainer.common.errors import UsageError
    from megatron.trainer.config.arguments import parse_args, resolve

    cli = json.loads((ROOT / "tests/unit/data/cli.json").read_text())
    base = [*TINY.split(), "--train-iters", "100"] + (["--copus"] if rng.random() < 0.5 else [])
    words = spoil.spoiled_flags(rng, base, list(cli))

    def read() -> None:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            try:
                args = parse_args(words, {"copus controller": CopusConfig})
            except SystemExit as error:
                assert error.code in (0, 2), error.code
                return
        pretrain.controllers(args, resolve(args, rng.choice((1, 2, 3, 4, 8))))

    problem = spoil.problem_of(read, UsageError)
    return problem and f"{problem}: {words!r}"


def data_set(rng: random.Random, folder: Path) -> str | None:
    """An indexed data set."""
    import numpy

    from megatron.trainer.common.errors import UsageError
    from megatron.trainer.data.indexed import check_vocabulary, open_corpus

    prefix = folder / "data"
    lengths = numpy.array([rng.randrange(1, 50) for _ in range(rng.randrange(1, 9))], dtype="<i4")
    places = 2 * numpy.concatenate([[0], numpy.cumsum(lengths)[:-1]]).astype("<i8")
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08"
    header += len(lengths).to_bytes(8, "little") + (len(lengths) + 1).to_bytes(8, "little")
    documents = numpy.arange(len(lengths) + 1, dtype="<i8")
    index = header + lengths.tobytes() + places.tobytes() + documents.tobytes()
    tokens = numpy.arange(lengths.sum(), dtype="<u2").tobytes()
    for end, data in ((".idx", index), (".bin", tokens)):
        Path(f"{prefix}{end}").write_bytes(data)
    spoil.spoil_file(rng, Path(str(prefix) + rng.choice((".idx", ".bin"))))
    return spoil.problem_of(
        lambda: check_vocabulary(open_corpus(str(prefix), "--data-path"), 500), UsageError
    )


def request(rng: random.Random, folder: Path) -> str | None:
    """`control/request.json`."""
    from copus_ext.reshard.relaunch import REQUEST_FILE, Request, merged, read_request
    from megatron.trainer.config.layout import Layout

    whole = Request(
        launch="job.0.1",
        kind="relayout",
        iteration=10,
        consumed_samples=80,
        reason="faster",
        layout=Layout(tp=2, pp=2, dp=1),
        micro_batch_size=1,
        global_batch_size=8,
        checkpoint="save",
    )
    path = folder / REQUEST_FILE
    path.parent.mkdir()
    path.write_bytes(spoil.spoiled_json(rng, whole.to_json()))

    def read() -> None:
        found = read_request(folder, launch="job.0.1")
        if found is not None and found.kind == "relayout":
            merged(["--save", "save"], found)

    return spoil.problem_of(read, ValueError)


def told(rng: random.Random, folder: Path) -> str | None:
    """What supervisors tell each other."""
    from copus_ext.launch.failure import Failure
    from copus_ext.launch.rendezvous import LaunchPlan, LaunchResult, NodeHeartbeat
    from copus_ext.reshard.checked import read_value

    failure = Failure(rank=1, code=-9, host="a", time_s=1.0)
    messages: list[Any] = [
        NodeHeartbeat(node=1, token="ab", num_ranks=8, host="a"),
        LaunchPlan(
            launch="job.0.1",
            number=3,
            tokens={"1": "ab"},
            num_ranks={"0": 8, "1": 8},
            flags=["--x"],
        ),
        LaunchResult(launch="job.0.1", node=1, code=137, failure=failure),
    ]
    message, path = rng.choice(messages), folder / "message.json"
    path.write_bytes(spoil.spoiled_json(rng, dataclasses.asdict(message)))
    kind = type(message)
    return spoil.problem_of(lambda: read_value(path, kind.from_json, max_bytes=1 << 20), ValueError)


def lock(rng: random.Random, folder: Path) -> str | None:
    """A lock that somebody left."""
    from megatron.trainer.common.control import LOCK_FILE
    from megatron.trainer.common.errors import UsageError
    from megatron.trainer.resilience.lock import Holder, Lock

    path = folder / LOCK_FILE
    path.parent.mkdir()
    holder = Holder(host="elsewhere", pid=7, launch="job.0.0", machine="m", token="t")
    path.write_bytes(spoil.spoiled_json(rng, dataclasses.asdict(holder)))

    def take() -> None:
        with Lock(folder, flag="--save", launch="job.0.1", is_supervised=True):
            pass

    return spoil.problem_of(take, UsageError)


def _journal_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in _JOURNAL.read_text().splitlines()[:6]]


def journal(rng: random.Random, folder: Path) -> str | None:
    """`tools/replay.py`."""
    from copus_ext.commands import replay

    path = folder / "journal.jsonl"
    path.write_bytes(spoil.spoiled_lines(rng, _journal_lines()))
    code, said = spoil.code_of(replay.main, path)
    said = re.sub(r"^replay.py: note: unreadable: \d+ lines? of journal.jsonl\n$", "", said)
    # 1 is an answer: decisions that come out otherwise.
    return None if code == 1 and not said else spoil.tool_problem((code, said), 5)


def metrics(rng: random.Random, folder: Path) -> str | None:
    """`metrics.jsonl`."""
    from copus_ext.launch.checkpoint_flags import recorded_flags
    from copus_ext.launch.restart_policy import progress_of
    from megatron.trainer.logging.metrics import previous_launches, read_metrics

    kinds = ("run.start", "step", "step", "eval", "run.end")
    records = [
        {"v": 1, "kind": kind, "launch": f"a.0.{i // 5}", "iteration": i, "consumed_samples": 8 * i}
        for i, kind in enumerate(kinds * 2)
    ]
    (folder / "metrics.jsonl").write_bytes(spoil.spoiled_lines(rng, records))

    def read() -> None:
        read_metrics(folder)
        list(previous_launches(folder))
        progress_of(folder, "a.0.1")
        recorded_flags(folder, folder, 5)

    return spoil.problem_of(read)


def profile(rng: random.Random, folder: Path) -> str | None:
    """Measured times."""
    from copus_ext.planner.profile import ForeignProfile, ProfileStore, Timing, read_profile

    path = folder / "profile.jsonl"
    store = ProfileStore(path, {"model": "m", "ranks": 2})
    for count in (1, 2, 4):
        sizes = {"tp": 1, "pp": 1, "dp": 2, "micro_batch_size": 1, "num_microbatches": count}
        store.add(Timing.from_json({**sizes, "step_s": 0.1 * count}))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_bytes(spoil.spoiled_lines(rng, records))
    return spoil.problem_of(store.read, ForeignProfile, OSError) or spoil.problem_of(
        lambda: read_profile(path), ForeignProfile, OSError
    )


_CLUSTER = {
    "num_nodes": 2,
    "gpus_per_node": 4,
    "intra_bytes_per_s": "450GB/s",
    "nic_bytes_per_s": "50GB/s",
    "gpu": "H100-80GB",
}
_MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def plan(rng: random.Random, folder: Path) -> str | None:
    """`tools/plan.py`, with its files and flags."""
    from copus_ext.commands import plan as tool

    constants = json.loads((ROOT / "copus_ext/cost_model/data/cpu.json").read_text())
    inputs = {"--cluster": _CLUSTER, "--model": _MODEL, "--constants": constants}
    spoiled = rng.choice((*inputs, "words"))
    words = ["--seq-length", "2048", "--global-batch-size", "64", "--top", "1"]
    for flag, value in inputs.items():
        path = folder / f"{flag[2:]}.json"
        data = spoil.spoiled_json(rng, value) if flag == spoiled else json.dumps(value).encode()
        path.write_bytes(data)
        words += [flag, str(path)]
    if spoiled == "words":
        known = ["--fix", "--max", "--recompute", "--train-tokens", "--memory-margin", "--profile"]
        words = spoil.spoiled_flags(rng, words, known)
    output = folder / "answer.json"
    result = spoil.code_of(tool.main, *words, "--json", "--output", output)
    problem = spoil.tool_problem(result, 2, 3, 4, 5)
    if problem is None and output.exists():
        problem = spoil.problem_of(lambda: json.loads(output.read_text()))
    return problem and f"{spoiled}: {problem}"


def texts(rng: random.Random, folder: Path) -> str | None:
    """`tools/preprocess_data.py`."""
    from copus_ext.commands import preprocess_data

    lines = [json.dumps({"text": f"line {i} of a document, é"}) for i in range(20)]
    source, prefix = folder / "texts.jsonl", folder / "made"
    source.write_bytes(spoil.spoiled_bytes(rng, "\n".join(lines).encode()))
    result = spoil.code_of(
        preprocess_data.main,
        *("--input", source, "--output-prefix", prefix, "--workers", 1),
        *("--tokenizer-type", "ByteLevelTokenizer"),
    )
    problem = spoil.tool_problem(result, 1, 2)
    left = sorted(path.name for path in folder.iterdir() if path != source)
    if problem is None and result[0] != 0 and left:
        problem = f"left {left} with exit code {result[0]}"
    return problem


def of_extras(name: str) -> list[tuple[str, Any]]:
    """`KINDS` or `FEW` of `bad_files.py` beside the tests of each extra that is there."""
    found = []
    for extra in extras():
        if (Path(__file__).parents[1] / "extras" / extra.name / "bad_files.py").is_file():
            module = importlib.import_module(f"tests.extras.{extra.name}.bad_files")
            found += getattr(module, name, {}).items()
    return found


KINDS: dict[str, tuple[int, Check]] = {
    "flags": (24, flags),
    "data set": (15, data_set),
    "request": (6, request),
    "told": (6, told),
    "lock": (4, lock),
    "journal": (8, journal),
    "metrics": (8, metrics),
    "profile": (8, profile),
    "plan": (4, plan),
    "texts": (2, texts),
    **{kind: (8, check) for kind, check in [*bad_files.KINDS.items(), *of_extras("KINDS")]},
}
"""What can be wrong: how often, compared with the others, and the check."""
FEW_OF_EXTRAS: dict[str, int] = dict(of_extras("FEW"))
"""Of ten thousand, for readers that take milliseconds or more."""


def spoil_and_read(kind: str, seed: int, index: int, folder: Path) -> str | None:
    """One case.

    Args:
        kind: of `KINDS`.
        seed: of the campaign.
        index: of the case; the same seed and index are the same case.
        folder: to work in; emptied.

    Returns:
        What the reader did wrong, or None.
    """
    work = folder / "case"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return KINDS[kind][1](random.Random(f"{seed} {kind} {index}"), work)
