"""Shows what a checkpoint holds, whether it is complete, and under which layouts it loads.

copus inspect-checkpoint checkpoints [--ckpt-step N] [--verify] [--json]

SRC is a --save directory or the folder of one iteration. One CPU process; reads the index, with
--verify every byte. Exit codes: 0 complete, 1 I/O, 2 usage, 3 not complete or of another format,
4 --verify found it changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.program import about, other_command, run_command, tell
from megatron.trainer.config.arguments import Parser, add_checkpoint_flags

_SCRIPT = "inspect_checkpoint.py"


def parser() -> argparse.ArgumentParser:
    p = Parser(**about(_SCRIPT, __doc__))
    p.add_argument("source", metavar="SRC", type=Path)
    add_checkpoint_flags(p)
    p.add_argument(
        "--verify",
        action="store_true",
        help="read every file and compare checksums, and weights with their masters",
    )
    p.add_argument("--json", action="store_true")
    return p


def text_of(record: dict[str, Any]) -> str:
    lines = [
        f"{record['folder']}: iteration {record['iteration']}, "
        f"{record['consumed_samples']} samples, saved under {record['layout']}"
    ]
    if "dtype" in record:
        lines.append(f"weights {record['dtype']}, optimizer {record['optimizer']}")
    if (experts := record["experts"]) is not None:
        shared = f", and one of width {experts['shared']} for all" if experts["shared"] else ""
        lines.append(
            f"{experts['num_experts']} experts in {experts['layers']} layers, {experts['topk']} of "
            f"them for each token{shared}"
        )
    true = record["true_vocab_size"]
    lines.append(
        f"vocabulary {record['padded_vocab_size']} rows"
        + (f", {true} of them tokens" if true else "")
    )
    sizes = ", ".join(f"{k} {v / 1e6:.1f}" for k, v in record["bytes_by_state"].items())
    lines.append(f"{record['bytes'] / 1e6:.1f} MB on disk; MB of {sizes}")
    for t in record["tensors"]:
        lines.append(f"  {t['key']}  {t['dtype']} {tuple(t['shape'])}  {t['num_chunks']} chunks")
    lines.append(f"  and {record['num_objects']} small objects")
    for size, values in record.get("loads_under", {}).items():
        shown = ", ".join(map(str, values)) or "any"
        lines.append(f"loads under --{size} {shown}")
    lines += [f"note: {note}" for note in record["notes"]]
    if record["problem"] is None:
        how = "and every byte is as it was written" if record["verified"] else "by its index"
        lines.append(f"complete: every tensor is there and filled once, {how}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    from megatron.trainer.resilience.env_checks import import_core

    import_core()
    from megatron.trainer.checkpoint.formats import format_of
    from megatron.trainer.extras.inspect_checkpoint.archive import open_archive
    from megatron.trainer.extras.inspect_checkpoint.describe import describe

    found = format_of(args.source)
    if found is not None:
        other = other_command("convert_checkpoint.py")
        raise UsageError(f"SRC {args.source} is {found.title}; {other} checks and reads it")
    archive = open_archive(
        args.source, step=args.ckpt_step, trust_unverified=args.ckpt_trust_unverified
    )
    record = describe(archive, verify=args.verify)
    print(json.dumps(record) if args.json else text_of(record))
    if record["problem"] is not None:
        tell(_SCRIPT, f"error: {record['problem']}")
    return record["exit_code"]


def main(argv: list[str] | None = None) -> int:
    """Reads flags, reports, and turns problems into one line and an exit code."""

    def fail(code: int, text: str) -> None:
        if "--json" in (sys.argv[1:] if argv is None else argv):
            print(json.dumps({"verified": False, "problem": text, "exit_code": code}))

    return run_command(_SCRIPT, lambda: run(parser().parse_args(argv)), on_failure=fail)


if __name__ == "__main__":
    sys.exit(main())
