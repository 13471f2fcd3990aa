"""How many of Megatron-LM's own functional-test commands this trainer accepts.

PYTHONPATH=. python scripts/docs/megatron_flags.py            writes docs/megatron-flags.md
PYTHONPATH=. python scripts/docs/megatron_flags.py --print    only prints the counts

A command counts as accepted if its flags are parsed and resolved, with or without notes, on 8 ranks
with CUDA, Transformer Engine and apex present. More ranks are taken where the layout needs them,
fewer where the global batch has too few micro-batches. Nothing is trained.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from copus_ext.controller.flags import CopusConfig
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json
from megatron.trainer.config.arguments import parse_args, resolve

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("megatron_lm_flag_sets_0.20.json")
OLDER_DATA = Path(__file__).with_name("megatron_lm_flag_sets_0.16.json")
"""From NVIDIA/Megatron-LM: tests/functional_tests/test_cases/*/*/model_config.yaml, the flags under
`MODEL_ARGS` as the shell passes them on. The older ones are those of core_v0.16.1."""
PAGE = ROOT / "docs" / "megatron-flags.md"

_RANKS = 8
_FILLED_IN = {"REPEAT": "1"}
"""Word of a command that the test harness replaces by a number -> that number."""
_REFUSED = re.compile(r"(--[\w-]+)(?: .*?)? is refused: (.*)")
_HEAD = """# Megatron-LM's own commands

Does `pretrain_gpt.py` take the commands of Megatron-LM's own functional tests as they are? These
are all {total} that pre-train at core 0.20.0 (22 August 2026, commit d98e8a64): GPT, mixtures of
experts, and hybrids of attention and Mamba. Each is read and checked for {ranks} ranks, or as many
as its layout and batch need, with CUDA, Transformer Engine and apex present. Nothing is trained for
this page; `tests/distributed/test_megatron_commands.py` trains one of each kind at core_v0.16.1,
scaled down, on CPU ranks. `{command}` writes this page.

| commands | in all | accepted | refused |
|---|---|---|---|"""
_APART = """
Not counted are {total} commands of programs that do something else: {kinds}.
"""
_WHY = """
## Why commands are refused

A command may have several reasons; "alone" counts those with no other.

| reason, and the way on | flags | commands | alone |
|---|---|---|---|"""
_NOTES = """
## What accepted commands go without

The run says so in a note. Only 8-bit matrix products touch what is computed; they need Transformer
Engine, and nobody has run them here.

| what happens instead | flags | commands |
|---|---|---|"""
_EACH = """
## Refused commands

Every other command is accepted as it is.

| command | outcome | what to change |
|---|---|---|"""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What became of one command."""

    outcome: str
    """accepted, refused or crashed."""
    lines: tuple[str, ...]
    """Its notes, its refusals or the exception."""


def read_sets(data: Path = DATA) -> dict[str, list[str]]:
    """The flags of every command, by the name of its test."""
    sets: dict[str, str] = parse_json(data.read_text(encoding="utf-8"))["sets"]
    return {
        name: [_FILLED_IN.get(word, word) for word in shlex.split(flags)]
        for name, flags in sets.items()
    }


def read_apart() -> dict[str, int]:
    """How many commands of other programs there are, by what they do."""
    apart: dict[str, int] = parse_json(DATA.read_text(encoding="utf-8"))["apart"]
    return apart


def judge_all(data: Path) -> dict[str, Judgement]:
    """Reads and checks every command of a file."""
    return {name: judge(flags) for name, flags in read_sets(data).items()}


def judge(argv: Sequence[str]) -> Judgement:
    """Reads and checks one command."""
    try:
        config = resolve(
            parse_args(argv, {"copus controller": CopusConfig}),
            _ranks_of(argv),
            cuda_available=True,
            transformer_engine_available=True,
            apex_available=True,
        )
    except UsageError as error:
        return Judgement(outcome="refused", lines=tuple(str(error).split("\n")))
    except Exception as error:  # what a crash is
        return Judgement(outcome="crashed", lines=(f"{type(error).__name__}: {error}",))
    return Judgement(outcome="accepted", lines=config.runtime.notes)


def _ranks_of(argv: Sequence[str]) -> int:
    pairs = dict(itertools.pairwise(argv))

    def size(flag: str) -> int:
        return int(pairs.get(flag, 1))

    tp, pp = size("--tensor-model-parallel-size"), size("--pipeline-model-parallel-size")
    cp = size("--context-parallel-size")
    experts = 1
    if "--num-experts" in pairs:
        experts = int(pairs.get("--expert-tensor-parallel-size", tp))
        experts *= size("--expert-model-parallel-size")
    replicas = size("--global-batch-size") // size("--micro-batch-size")
    replica = tp * cp * pp
    return max(replica, math.lcm(experts, tp * cp) * pp, min(_RANKS, replica * replicas))


def counts(judgements: Mapping[str, Judgement]) -> Counter[str]:
    """How many commands had each outcome."""
    return Counter(judgement.outcome for judgement in judgements.values())


def page(
    judgements: Mapping[str, Judgement], older: Mapping[str, Judgement], apart: Mapping[str, int]
) -> str:
    """The page of the documentation, in Markdown.

    Args:
        judgements: of the commands that the page is about.
        older: of those of core_v0.16.1, which are only counted.
        apart: commands of other programs, by what they do.
    """
    command = "PYTHONPATH=. python scripts/docs/megatron_flags.py"
    parts = [_HEAD.format(total=len(judgements), ranks=_RANKS, command=command)]
    groups: dict[str, list[Judgement]] = {}
    for name, judgement in judgements.items():
        groups.setdefault(name.split("/")[0], []).append(judgement)
    groups = dict(sorted(groups.items()))
    groups["**all**"] = list(judgements.values())
    groups["all of core_v0.16.1"] = list(older.values())
    for title, some in groups.items():
        accepted = sum(j.outcome == "accepted" for j in some)
        parts.append(f"| {title} | {len(some)} | {accepted} | {len(some) - accepted} |")
    accepted = [j for j in judgements.values() if j.outcome == "accepted"]
    others = [j for j in judgements.values() if j.outcome != "accepted"]
    reasons = [f"{row} {alone} |" for row, alone in _rows(others, _refusal)]
    notes = [row for row, _ in _rows(accepted, _note)]
    each = [_row(name, j) for name, j in judgements.items() if j.outcome != "accepted"]
    kinds = ", ".join(f"{kind} ({number})" for kind, number in apart.items())
    parts.append(_APART.format(total=sum(apart.values()), kinds=kinds).rstrip())
    return "\n".join([*parts, _WHY, *reasons, _NOTES, *notes, _EACH, *each]) + "\n"


def _refusal(line: str) -> tuple[list[str], str]:
    """The flag that a refusal begins with, and the rest of it."""
    found = _REFUSED.fullmatch(line)
    if found is not None:
        return [found[1]], found[2]
    return re.findall(r"--[\w-]+", line)[:1], line


def _note(line: str) -> tuple[list[str], str]:
    """The flags that a note is about, and what happens instead."""
    first, second = line.split(": ", 1)
    names, text = (second, first) if first == "accepted without effect" else (first, second)
    return re.findall(r"--[\w-]+", names), text


def _rows(
    judgements: Iterable[Judgement], split: Callable[[str], tuple[list[str], str]]
) -> Iterator[tuple[str, int]]:
    """What lines say, most frequent first, with the number of commands that have no other."""
    count: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    flags: dict[str, set[str]] = {}
    for judgement in judgements:
        pairs = [split(line) for line in judgement.lines]
        texts = {text for _, text in pairs}
        count.update(texts)
        alone.update(texts if len(texts) == 1 else ())
        for names, text in pairs:
            flags.setdefault(text, set()).update(names)
    for text, number in sorted(count.items(), key=lambda entry: (-entry[1], entry[0])):
        yield f"| {_text(text)} | {_code(sorted(flags[text]))} | {number} |", alone[text]


def _row(name: str, judgement: Judgement) -> str:
    ways: dict[str, list[str]] = {}
    for flags, reason in map(_refusal, judgement.lines):
        ways.setdefault(reason.rsplit("; ", 1)[-1], []).extend(flags)
    told = "; ".join(f"{_code(flags)}: {_text(way)}" for way, flags in ways.items())
    return f"| `{name}` | {judgement.outcome} | {told} |"


def _code(flags: Iterable[str]) -> str:
    return ", ".join(f"`{flag}`" for flag in dict.fromkeys(flags))


def _text(text: str) -> str:
    """Plain words with flags as code, safe in a cell of a table."""
    plain = re.sub(r"([\\`|*_\[\]<])", r"\\\1", text)
    return re.sub(r"--[a-z](?:[\w-]|\\_)*(?:\\\*)?", lambda m: f"`{m[0]}`".replace("\\", ""), plain)


def main() -> None:
    """Prints the counts and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="write nothing")
    args = parser.parse_args()
    judgements, older = judge_all(DATA), judge_all(OLDER_DATA)
    print(f"core 0.20.0: {dict(counts(judgements))}, core_v0.16.1: {dict(counts(older))}")
    if not args.print:
        PAGE.write_text(page(judgements, older, read_apart()), encoding="utf-8")


if __name__ == "__main__":
    main()
