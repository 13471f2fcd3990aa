"""Recomputes the decisions of a journal, and checks that they match.

copus replay runs/quickstart/journal.jsonl

Exit codes: 0 all decisions are the same, bit for bit; 1 some differ; 2 wrong usage; 5 the journal
cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from copus_ext.controller.decision_log import NAME, read_journal
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.monitor.run_files import run_problem, unread_words
from megatron.trainer.common.program import CommandParser, about, refused, tell
from megatron.trainer.config.layout import Layout


def parser() -> argparse.ArgumentParser:
    p = CommandParser(**about("replay.py", __doc__))
    p.add_argument("journal", type=Path, help="journal.jsonl, or the directory of a run")
    p.add_argument("--all", action="store_true", help="print decisions to stay, too")
    p.add_argument(
        "--noise-scale-multiplier",
        type=float,
        help="compare the choices with those under another noise scale multiplier",
    )
    return p


def replayed(record: dict[str, Any], changes: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether a repeated decision is that of the journal, and the repeated one.

    Args:
        record: a line of kind `decision`.
        changes: rules to decide with instead of the journal's. With them only the choice counts:
            the numbers that lead to it are others.
    """
    compared = _choice if changes else _numbers
    situation = DecisionInputs.from_json(record["situation"])
    if changes:
        rules = dataclasses.replace(situation.rules, **changes)
        situation = dataclasses.replace(situation, rules=rules)
    # Through JSON, as the journal's: tuples become lists, floats stay.
    again = json.loads(json.dumps(decide(situation).to_json()))
    return compared(again) == compared(record["decision"]), again


def _numbers(decision: dict[str, Any]) -> dict[str, Any]:
    """A decision without its texts, whose wording may change within a version."""
    candidates = [
        {**c, "blocked_reason": c["blocked_reason"] == ""} for c in decision["candidates"]
    ]
    return {**decision, "reason": "", "candidates": candidates}


def _choice(decision: dict[str, Any]) -> tuple[str, Layout, int, int]:
    """What a decision chose, without how it was found."""
    to = ConfigThroughput.from_json(decision["to"])
    return decision["kind"], to.layout, to.global_batch_size, to.micro_batch_size


def main(argv: list[str] | None = None) -> int:
    """Replays and prints; returns the exit code."""
    return answer(parser().parse_args(argv))


def answer(args: argparse.Namespace) -> int:
    path = args.journal / NAME if args.journal.is_dir() else args.journal
    try:
        problem = run_problem(args.journal, takes_journal=True)
    except OSError as error:
        problem = f"{path} cannot be read: {error}"
    if not problem and not path.exists():
        problem = f"RUN {args.journal} has no {NAME}: it ran without --copus"
    if problem:
        return refused("replay.py", problem, 5)
    multiplier = args.noise_scale_multiplier
    changes = {} if multiplier is None else {"noise_scale_multiplier": multiplier}
    same = different = 0
    unread = list[None]()
    try:
        for record in read_journal(path, on_unread=lambda: unread.append(None)):
            if record["kind"] != "decision":
                continue
            is_same, again = replayed(record, changes)
            same, different = same + is_same, different + (not is_same)
            if args.all or not is_same or again["kind"] != "stay":
                mark = "same" if is_same else "DIFFERENT"
                print(f"{record['number']:5d}  step {record['iteration']:7d}  {mark:9s}  ", end="")
                print(f"{again['kind']:8s} {again['reason']}")
    except TypeError as error:
        return refused("replay.py", f"{path}: no journal of this version of copus: {error}", 5)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return refused("replay.py", f"{path}: {type(error).__name__}: {error}", 5)
    if unread:
        tell("replay.py", f"note: unreadable: {unread_words({path.name: len(unread)})}")
    if not same + different:
        print("no decisions: the run made none, or ended before its first")
        return 0
    print(f"{same} {'choices' if changes else 'decisions'} the same, {different} different")
    return 1 if different and not changes else 0


if __name__ == "__main__":
    sys.exit(main())
