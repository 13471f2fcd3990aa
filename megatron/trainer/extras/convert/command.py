"""Converts a checkpoint: layout, vocabulary, number format, optimizer, or format of the model.

python tools/convert_checkpoint.py checkpoints converted --tp 4 --pp 2 --dp 8 --verify

One CPU process, no process group, no model. SRC is a --save directory, the folder of an iteration,
or a model in a format of --format; DST must not exist. Exit codes: 0 done, 1 I/O, 2 usage,
3 refused, 4 verification failed; without 0 there is no DST.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron.trainer.checkpoint.formats import format_of, model_formats
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.program import about, json_failure, run_command
from megatron.trainer.config.arguments import Parser, add_checkpoint_flags

_SCRIPT = "convert_checkpoint.py"
_OURS = "torch_dist"


def parser() -> argparse.ArgumentParser:
    p = Parser(**about(_SCRIPT, __doc__))
    p.add_argument("source", metavar="SRC", type=Path)
    p.add_argument("destination", metavar="DST", type=Path)
    add_checkpoint_flags(p)
    target = p.add_argument_group("target; flags that are absent keep what SRC has")
    target.add_argument("--tp", type=int, help="tensor parallel size")
    target.add_argument("--cp", type=int, help="context parallel size")
    target.add_argument("--pp", type=int, help="pipeline parallel size")
    target.add_argument("--vpp", type=int, help="virtual pipeline size")
    target.add_argument("--dp", type=int, help="data parallel size")
    target.add_argument("--ep", type=int, help="expert parallel size")
    target.add_argument("--etp", type=int, help="tensor parallel size of experts")
    target.add_argument("--vocab", type=int, help="rows of the embedding, padding included")
    target.add_argument("--true-vocab", type=int, help="number of tokens, if SRC does not say")
    target.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="format of the weights")
    target.add_argument("--optimizer", choices=("distributed", "plain", "none"))
    formats = model_formats()
    target.add_argument("--format", choices=(_OURS, *formats), default=_OURS)
    for one in formats.values():
        one.add_flags(target)
    p.add_argument("--verify", action="store_true", help="compare every tensor of SRC and DST")
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    return p


def run(args: argparse.Namespace) -> int:
    from megatron.trainer.resilience.env_checks import import_core

    import_core()
    from megatron.trainer.extras.convert.convert import convert
    from megatron.trainer.extras.convert.target import LAYOUT_FLAGS, Changes

    names = (*LAYOUT_FLAGS, "vocab", "true_vocab", "dtype", "optimizer")
    changes = Changes(**{name: getattr(args, name) for name in names})
    folders = args.source, args.destination
    of_checkpoint = {
        "step": args.ckpt_step,
        "verify": args.verify,
        "trust_unverified": args.ckpt_trust_unverified,
    }
    model = format_of(args.source)
    if model is not None:
        if args.format != _OURS:
            raise UsageError(f"SRC {args.source} is {model.title}; drop --format {args.format}")
        if args.ckpt_step is not None:
            raise UsageError("--ckpt-step goes with a --save directory, not with a model")
        outcome = model.load(*folders, changes, verify=args.verify)
    elif args.format != _OURS:
        wanted = model_formats()[args.format]
        outcome = wanted.save(*folders, changes, **of_checkpoint, flags=args)
    else:
        outcome = convert(*folders, changes, **of_checkpoint)
    if args.json:
        print(json.dumps({"status": "done", **outcome.to_json()}))
        return 0
    how = f"{outcome.num_rewritten} written anew" if outcome.num_rewritten else "files copied"
    compared = "" if outcome.num_compared is None else f", {outcome.num_compared} compared equal"
    print(f"{outcome.source} -> {outcome.destination}")
    print(f"{outcome.num_tensors} tensors, {how}{compared}; {outcome.num_bytes / 1e6:.1f} MB")
    if outcome.layout:
        print(f"layout {outcome.layout}")
    for note in outcome.notes:
        print(f"note: {note}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Reads flags, converts, and turns problems into one line and an exit code."""
    failed = json_failure(argv)
    return run_command(_SCRIPT, lambda: run(parser().parse_args(argv)), on_failure=failed)


if __name__ == "__main__":
    sys.exit(main())
