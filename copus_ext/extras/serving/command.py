"""Plans how to serve a trained model: bits of every layer, stages, micro-batches; and writes it.

copus plan-serving checkpoints --cluster mixed.json --prompt 512 --generate 128
copus plan-serving checkpoints --cluster here --max-loss-increase 0.02 --apply served
copus plan-serving --model llama-3-70b --sensitivity losses.json --cluster mixed.json

The loss that each layer's bits cost is measured on held-out text, and kept beside the checkpoint.
Seconds are predicted. Exit codes: 0 done, 1 I/O, 2 wrong flags, 3 refused or nothing fits, 4 the
written model's loss is above the limit; without 0 there is no OUT.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

from megatron.trainer.common.errors import Refused, UsageError
from megatron.trainer.common.optional import require
from megatron.trainer.common.program import json_failure, run_command, tell
from megatron.trainer.config.arguments import Parser, add_checkpoint_flags

_NAME = "copus plan-serving"
_BITS = (3, 4, 8, 16)
_VLLM_GROUPS = (32, 64, 128)
_LIMIT = 0.02


def parser() -> argparse.ArgumentParser:
    p = Parser(prog=_NAME, description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    model = p.add_argument_group("model")
    words = "the --save directory of a run, or the folder of one iteration"
    model.add_argument("checkpoint", metavar="CHECKPOINT", nargs="?", type=Path, help=words)
    add_checkpoint_flags(model)
    model.add_argument("--model", help="instead: a name such as llama-3-70b, or a config.json")
    model.add_argument("--megatron-args", metavar="FLAGS", help="instead: Megatron's flags")
    work = p.add_argument_group("workload")
    work.add_argument("--prompts", type=int, default=32, help="of a batch (%(default)s)")
    work.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (%(default)s)")
    words = "tokens to generate for each prompt (%(default)s)"
    work.add_argument("--generate", type=int, default=128, help=words)
    where = p.add_argument_group("cluster")
    words = "KIND:GPUS such as h100-80g:8, a JSON file, or here; each device is a stage or unused"
    where.add_argument("--cluster", required=True, help=words)
    words = "share of each memory to leave free (%(default)s)"
    where.add_argument("--memory-margin", type=float, default=0.04, help=words)
    limits = p.add_argument_group("bits and loss")
    words = "bits to choose from (3,4,8,16; with --apply 4,8,16)"
    limits.add_argument("--bits", metavar="LIST", help=words)
    words = "weights of a row that share a scale (%(default)s)"
    limits.add_argument("--group-size", type=int, default=128, help=words)
    words = f"most nats per token that all layers together may cost ({_LIMIT}; none with --theta)"
    limits.add_argument("--max-loss-increase", type=float, metavar="NATS", help=words)
    words = "seconds that a loss increase of one nat is worth (0)"
    limits.add_argument("--theta", type=float, help=words)
    loss = p.add_argument_group("measuring the loss")
    words = "loss increases in place of measuring: serving_sensitivity.json of an earlier plan, or "
    words += "a file of that form (docs/serving.md, The file of losses)"
    loss.add_argument("--sensitivity", type=Path, metavar="FILE", help=words)
    words = "text, as of the trainer; default: what the checkpoint was trained on"
    loss.add_argument("--data-path", nargs="+", default=[], metavar="WORD", help=words)
    words = "shares of train, valid and test; default: those of the run. The second one is read"
    loss.add_argument("--split", help=words)
    words = "samples of the run's length (%(default)s)"
    loss.add_argument("--eval-samples", type=int, default=64, metavar="N", help=words)
    loss.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    out = p.add_argument_group("answer")
    out.add_argument("--json", action="store_true", help="print JSON")
    words = "write the model with these bits, for transformers and vLLM; must not exist"
    out.add_argument("--apply", type=Path, metavar="OUT", help=words)
    others = ("intra", "nic", "gpu", "nodes", "gpus_per_node", "seq_length")
    p.set_defaults(**dict.fromkeys(others), nic_is_measured=False)
    return p


def bits_of(args: argparse.Namespace) -> tuple[int, ...]:
    """The bits to choose from, ascending."""
    text = args.bits or ",".join(map(str, _BITS[1:] if args.apply else _BITS))
    parts = text.split(",")
    if not all(x.isdecimal() and int(x) in (*range(2, 9), 16) for x in parts):
        raise UsageError(f"--bits {text}: write numbers from 2 to 8, and 16, such as 4,8,16")
    found = tuple(sorted(set(map(int, parts))))
    if args.apply:
        from copus_ext.extras.serving.plan import check_bits

        check_bits(found)
    return found


def check(args: argparse.Namespace) -> None:
    """Refuses flags that make no sense; sets the limit of the loss where nothing else does."""
    for name in ("prompts", "prompt", "generate", "group_size", "eval_samples"):
        if not 1 <= getattr(args, name) <= 1 << 24:
            flag, value = name.replace("_", "-"), getattr(args, name)
            raise UsageError(f"--{flag} {value} must be from 1 to {1 << 24}")
    for name in ("max_loss_increase", "theta"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} {value:g} must be at least 0 and finite")
    if not 0 <= args.memory_margin < 1:
        raise UsageError(f"--memory-margin {args.memory_margin} must be from 0 to below 1")
    named = args.model is not None or args.megatron_args is not None
    if (args.checkpoint is None) != named:
        raise UsageError("give either CHECKPOINT, or --model or --megatron-args with --sensitivity")
    if named and args.sensitivity is None:
        raise UsageError("--model has no weights to measure; give --sensitivity FILE or CHECKPOINT")
    if args.apply is not None and named:
        raise UsageError("--apply writes a checkpoint; give CHECKPOINT in place of --model")
    if args.apply is not None and args.apply.exists():
        raise UsageError(f"--apply {args.apply} exists; name another or remove it")
    if args.max_loss_increase is None and args.theta is None:
        args.max_loss_increase = _LIMIT
    require("scipy", extra="fit", what="a serving plan")


def described(args: argparse.Namespace) -> tuple[Any, Any]:
    """The cluster; and the model of `--model`, or None. Its samples have the tokens of a prompt and
    its answer: a config.json says only how long they may be.

    Raises:
        UsageError: they cannot be read.
    """
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.planner.request import InputProblem, UsageProblem, cluster_of, model_of

    try:
        named = args.checkpoint is None
        if named and str(args.model).endswith(".json"):
            args.seq_length = args.prompt + args.generate
        return cluster_of(args), model_of(args) if named else None
    except (SpecError, InputProblem, UsageProblem) as error:
        raise UsageError(str(error)) from error


def source_of(args: argparse.Namespace) -> Any:
    from megatron.trainer.resilience.env_checks import check_environment, set_process_defaults

    set_process_defaults()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    check_environment()
    from copus_ext.extras.serving.source import Source

    return Source(
        args.checkpoint,
        step=args.ckpt_step,
        device=args.device,
        trust_unverified=args.ckpt_trust_unverified,
        data_path=args.data_path,
        split=args.split,
        num_samples=args.eval_samples,
    )


def measured_of(args: argparse.Namespace, source: Any, bits: tuple[int, ...]) -> Any:
    """The loss increases: given, kept from before, or measured now with a bar."""
    from tqdm import tqdm

    from copus_ext.extras.serving.sensitivity import Sensitivity

    if args.sensitivity is not None:
        try:
            found = Sensitivity.read(args.sensitivity)
        except UsageError as error:
            raise UsageError(f"--sensitivity {error}") from error
        if found.group_size != args.group_size:
            raise UsageError(
                f"--sensitivity {args.sensitivity} was measured with --group-size "
                f"{found.group_size}; give that"
            )
        return found
    tqdm.monitor_interval = 0
    with tqdm(unit="layer", delay=1, leave=False, desc="measuring") as bar:

        def on_layer(done: int, layers: int) -> None:
            bar.total = layers
            bar.update(done - bar.n)

        return source.sensitivity(
            bits, args.group_size, on_layer=on_layer, tell=lambda text: tell(_NAME, text)
        )


def answer(args: argparse.Namespace, model: Any, cluster: Any, measured: Any) -> tuple[Any, Any]:
    """The plan, and its record as JSON.

    Raises:
        Refused: nothing fits.
    """
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.extras.serving import plan as plans
    from copus_ext.extras.serving.costs import ServingCosts, Workload

    bits, limit = bits_of(args), args.max_loss_increase
    if len(measured.loss_increase) != model.num_layers:
        raise UsageError(
            f"the sensitivity has {len(measured.loss_increase)} layers and the model "
            f"{model.num_layers}; give that of this model"
        )
    if limit is not None and measured.rounding > limit:
        raise Refused(
            f"rounding to 16 bits alone costs {measured.rounding:.5f}, above --max-loss-increase "
            f"{limit:g}; raise it"
        )
    work = Workload(prompts=args.prompts, prompt=args.prompt, generate=args.generate)
    try:
        costs = ServingCosts(
            model,
            cluster,
            work,
            bits=bits,
            group_size=args.group_size,
            memory_margin=args.memory_margin,
        )
        best, uniform = plans.plan_serving(
            costs,
            measured.table(bits),
            max_loss_increase=None if limit is None else limit - measured.rounding,
            theta=args.theta or 0.0,
        )
    except SpecError as error:
        raise UsageError(str(error)) from error
    if best is None:
        raise Refused(
            f"no plan of {cluster.world_size} devices fits within their memory and the loss; give "
            "more devices, fewer --prompts, lower --bits, or a higher --max-loss-increase"
        )
    return best, plans.record_of(best, uniform, costs, limit=limit, rounding=measured.rounding)


def check_model(model: Any) -> None:
    """Refuses a model that cannot be priced, before anything is measured."""
    from copus_ext.cost_model.spec_file import SpecError

    try:
        model.check_dense("`plan-serving`")
        model.check_predictable()
    except SpecError as error:
        raise UsageError(str(error)) from error


def run(args: argparse.Namespace) -> int:
    from copus_ext.extras.serving.plan import applied_line, table

    check(args)
    bits = bits_of(args)
    cluster, model = described(args)
    source = None
    if args.checkpoint is not None:
        source = source_of(args)
        model = source.model
    check_model(model)
    best, record = answer(args, model, cluster, measured_of(args, source, bits))
    if not args.json:
        print("\n".join(table(record)), flush=True)
    if args.apply is not None and source is not None:
        limit = args.max_loss_increase
        done = source.apply(args.apply, best.bits, args.group_size, max_loss_increase=limit)
        record["applied"] = {**dataclasses.asdict(done), "folder": str(args.apply)}
        notes = list(done.notes)
        if args.group_size not in _VLLM_GROUPS:
            known = ", ".join(map(str, _VLLM_GROUPS))
            notes.append(f"vLLM has kernels for --group-size {known}, and may not load this one")
        for note in notes:
            tell(_NAME, f"note: {note}")
        if not args.json:
            print(applied_line(record["applied"]))
    if args.json:
        print(json.dumps(record))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Reads flags, plans, and turns problems into one line and an exit code."""
    failed = json_failure(argv)
    return run_command(_NAME, lambda: run(parser().parse_args(argv)), on_failure=failed)


if __name__ == "__main__":
    sys.exit(main())
