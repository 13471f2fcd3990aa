"""What do a change of layout, short messages and short gradients gain over a slow link?

    sudo python -m bench.slow_link PART

Network namespaces on this machine are the nodes, with a rank and a core each, or a share of one.

* layout: a live job starts as dp=2 over 200 Mbit/s, where gradients cross the link every step.
  Three runs over the same samples: all layouts allowed, the layout kept, and started as pp=2 and
  kept. Writes slow_link.json and the journal of the first. Eight minutes.
* messages: `--pipeline-message-bits 8` between 2 and 4 stages, over 4, 1 and .2 Gbit/s. One run of
  each takes whole and short messages in turn, step by step. Then three seeds train with each over
  .2 Gbit/s, to the held-out loss at which whole messages end. Numbers are fp32, so that a short
  message has a quarter of the bytes; of bf16 ones it has a half. Writes stage_messages.json. Twenty
  minutes.
* gradients: `--grad-compression-rank 8` on data parallelism. Seconds of a step of the quickstart's
  model over 200 Mbit/s, then the loss of S4's model over 100 Mbit/s (`real_clock.py`), with the
  rate that is best for whole ones. And steps with `--clip-group-size`, without a limit on the link,
  in turn with steps without it. Writes grad_options.json. Twenty minutes.

Results go to docs/results. It needs root, iproute2, two cores and nothing else running.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import nodes
from bench.nodes import QUOTA, Nodes
from bench.support import (
    QUICKSTART_MODEL,
    RESULTS,
    TRAINER,
    RunRecord,
    arguments,
    make_dataset,
    origin,
    read_run,
    write,
)
from bench.time_to_loss.real_clock import S4, best_static, flags_of
from copus_ext.commands.replay import replayed
from copus_ext.controller.decision_log import NAME

LIVE = """--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4
--lr-decay-style cosine --lr-warmup-fraction 0.03 --adam-beta2 0.95 --split 95,4,1
--eval-interval 100000 --log-interval 20 --copus --copus-mode act"""
"""The rest of the flags of scripts/quickstart.sh."""
KINDS = {
    "all": "--copus-layouts all",
    "current": "--copus-layouts current",
    "pp2": "--copus-layouts current --pipeline-model-parallel-size 2",
}
"""Runs of a live job, and the flags in which they differ."""
STAGED = """--hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4
--seq-length 128 --max-position-embeddings 128 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer
--tokenizer-type ByteLevelTokenizer --split 95,4,1 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine
--lr-warmup-fraction 0.05 --adam-beta2 0.95 --log-interval 100 --micro-batch-size 4"""
SHORT_MESSAGES = ["--pipeline-message-bits", "8"]
RATES_MBIT, COUNTS, STAGES = (4000.0, 1000.0, 200.0), (4, 16), (2, 4)
"""Links, micro-batches of a step, stages."""
WARM_UP, STEPS, LOSS_STEPS, SEEDS = 4, 48, 300, (1, 2, 3)
SHORT_GRADIENTS = ["--grad-compression-rank", "8"]
CLIP = ["--clip-group-size", "8", "--clip-group-norm", "1.0"]
STEPPED = """--lr 1e-3 --split 98,1,1 --log-interval 1000 --micro-batch-size 4
--global-batch-size 16 --train-iters"""


class Trainer:
    """Runs the trainer on nodes, on Python's standard library unless it is told of other data."""

    def __init__(self, work: Path, data_path: str = "") -> None:
        self.work, self._count = work, 0
        self._data = ["--data-path", data_path or make_dataset(work / "stdlib")]
        self._data += ["--data-cache-path", str(work / "cache")]

    def run(self, site: Nodes, flags: list[str], program: list[str] | None = None) -> RunRecord:
        """A finished run; its directory is `folder`."""
        self._count += 1
        self.folder = self.work / f"run{self._count}"
        words = [*(program or [TRAINER]), *flags, *self._data, "--run-dir", str(self.folder)]
        site.run(words, self.work / "log")
        return read_run(self.folder)


def account(run: RunRecord, kind: str) -> dict[str, Any]:
    """What a live job did, from its own records."""
    moves, decisions = run.of("relayout"), run.of("decision")
    paused = sum(r["outcome"]["pause_s"] for r in moves)
    return {
        "kind": kind,
        "total_s": sum(r["seconds"] for r in run.steps) + paused,
        "paused_s": paused,
        "steps": len(run.steps),
        "moves": [{k: r[k] for k in ("iteration", "start", "to", "outcome")} for r in moves],
        "last_losses": statistics.fmean(r["losses"]["lm loss"] for r in run.steps[-20:]),
        "decided_again_the_same": sum(replayed(r, {})[0] for r in decisions),
        "decisions": [
            {"iteration": r["iteration"], "rows": r["situation"]["rows"]}
            | {"current": r["situation"]["current"], **r["decision"]}
            for r in decisions
        ],
        "curves": {
            "seconds": [r["seconds"] for r in run.steps],
            "layout": [r["layout"] for r in run.steps],
            "batch": [r["global_batch_size"] for r in run.steps],
            "loss": [r["losses"]["lm loss"] for r in run.steps],
        },
    }


def layout(work: Path, args: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """A live job whose layout is chosen by the controller or kept."""
    trainer, runs = Trainer(work, args.data_path), []
    with nodes.emulated(2, args.rate) as site:
        for kind in args.runs:
            flags = [*QUICKSTART_MODEL.split(), *LIVE.split(), *KINDS[kind].split()]
            run = trainer.run(site, [*flags, "--train-samples", str(args.samples)])
            runs.append(account(run, kind))
            if kind == "all":
                journal = args.output.with_suffix(".journal.jsonl")
                shutil.copy(trainer.folder / NAME, journal)
            names = runs[-1]["curves"]["layout"]
            path = [names[0], *(b for a, b in itertools.pairwise(names) if a != b)]
            print(f"{kind}: {runs[-1]['total_s']:.1f} s, {' -> '.join(path)}", flush=True)
    what = "a live job over a slow link, its layout chosen by the controller or kept"
    say({"what": what, "rate_mbit_per_s": args.rate, "samples": args.samples, "runs": runs})


def stages_on(stages: int, rate_mbit: float) -> Any:
    """A node for each stage. Two cores hold all of them, four with the usual quota."""
    return nodes.emulated(stages, rate_mbit, [4.0 * QUOTA / stages] * stages)


def staged(stages: int, count: int, steps: int) -> list[str]:
    """Flags of a run with a layer on every stage, and so many micro-batches of four samples."""
    sizes = {"--num-layers": stages, "--pipeline-model-parallel-size": stages}
    sizes |= {"--global-batch-size": 4 * count, "--train-samples": 4 * count * steps}
    return [*STAGED.split(), *(word for flag, x in sizes.items() for word in (flag, str(x)))]


def timed(trainer: Trainer, site: Nodes, stages: int, count: int, rate: float) -> dict[str, Any]:
    """Seconds of steps with whole messages, and with short ones in between."""
    flags = [*staged(stages, count, WARM_UP + STEPS), *SHORT_MESSAGES, "--eval-iters", "0"]
    run = trainer.run(site, flags, [__file__, "--every-second", str(stages)])
    seconds = [step["seconds"] for step in run.steps[WARM_UP:]]
    whole, short = map(statistics.median, (seconds[0::2], seconds[1::2]))
    pairs = np.log(np.array(seconds[1::2]) / np.array(seconds[0::2]))
    error = 1.25 * float(np.std(pairs, ddof=1)) / len(pairs) ** 0.5
    return {
        "stages": stages,
        "num_microbatches": count,
        "rate_mbit": rate,
        "whole_s": whole,
        "short_s": short,
        "saved": 1 - short / whole,
        "saved_error": error * short / whole,
    }


def every_second(world_size: int, flags: list[str]) -> None:
    """One rank of `timed`: messages are whole in steps of even number, the first being 0."""
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.resilience.env_checks import check_environment, set_process_defaults
    from megatron.trainer.train.callbacks import Callback, CallbackContext
    from megatron.trainer.train.pretrain import pretrain

    class EverySecondStep(Callback):
        def on_train_step_start(self, context: CallbackContext) -> None:
            context.needs_exact_step = context.state.iteration % 2 == 0

    set_process_defaults()
    check_environment()
    pretrain(resolve(parse_args(flags), world_size), [EverySecondStep()])


def curve_of(run: RunRecord) -> tuple[list[float], list[float]]:
    """Seconds of training until each evaluation, and its loss."""
    clock = np.cumsum([step["seconds"] for step in run.steps]).tolist()
    passed = dict(zip((step["iteration"] for step in run.steps), clock))
    at = [e for e in run.evaluations if e["iteration"] in passed]
    return [passed[e["iteration"]] for e in at], [e["losses"]["lm loss"] for e in at]


def compared(seed: int, whole: RunRecord, short: RunRecord) -> dict[str, Any]:
    """How much sooner short ones reach the loss at which whole ones end."""
    curves = [curve_of(run) for run in (whole, short)]
    target, reached = curves[0][1][-1], []
    for seconds, losses in curves:
        under = next((i for i, loss in enumerate(losses) if loss <= target), None)
        if under is None:  # prolonged at its last slope
            slope = (losses[-1] - losses[-2]) / (seconds[-1] - seconds[-2])
            reached.append(seconds[-1] + (target - losses[-1]) / min(slope, -1e-9))
        else:
            ends = [(losses[i], seconds[i]) for i in (under, max(under - 1, 0))]
            reached.append(
                float(np.interp(target, [loss for loss, _ in ends], [s for _, s in ends]))
            )
    return {
        "seed": seed,
        "target_loss": target,
        "last_losses": [losses[-1] for _, losses in curves],
        "seconds_to_target": reached,
        "times_faster": reached[0] / reached[1],
        "curves": [[seconds, losses] for seconds, losses in curves],
    }


def by_seed(
    trainer: Trainer, site: Nodes, whole: list[str], short: list[str], more: Any
) -> list[dict[str, Any]]:
    """Both ways by seed, the one or the other first."""
    rows = []
    for seed in SEEDS:
        ways = [whole, short] if seed % 2 else [short, whole]
        found = {
            way is short: trainer.run(site, [*way, "--seed", str(seed), *more]) for way in ways
        }
        rows.append(compared(seed, found[False], found[True]))
        print(rows[-1]["last_losses"], rows[-1]["times_faster"], flush=True)
    return rows


def messages(work: Path, args: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """Time of steps, and time to a loss."""
    trainer, points = Trainer(work, args.data_path), []
    for stages, rate in itertools.product(STAGES, RATES_MBIT):
        with stages_on(stages, rate) as site:
            for count in COUNTS:
                points.append(timed(trainer, site, stages, count, rate))
                print(points[-1], flush=True)
    say({"points": points})
    whole = [*staged(2, COUNTS[0], LOSS_STEPS), "--eval-interval", "25", "--eval-iters", "8"]
    with stages_on(2, RATES_MBIT[-1]) as site:
        losses = by_seed(trainer, site, whole, [*whole, *SHORT_MESSAGES], ())
    say({"points": points, "losses": losses})


def gradients(work: Path, args: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """Steps and losses with thin gradients, and steps with clipped groups."""
    trainer = Trainer(work, args.data_path)

    def step_s(site: Nodes, model: str, flags: list[str], steps: int) -> float:
        own = [*model.split(), *STEPPED.split(), str(steps + 2), *flags]
        return statistics.median(x["seconds"] for x in trainer.run(site, own).steps[2:])

    result: dict[str, Any] = {"rank": int(SHORT_GRADIENTS[1]), "steps": []}
    with nodes.emulated(2, 200.0) as site:
        for is_sharded in (True, False):
            model = QUICKSTART_MODEL
            model = model if is_sharded else model.replace("--use-distributed-optimizer", "")
            whole, short = (step_s(site, model, way, 10) for way in ([], SHORT_GRADIENTS))
            row = {"distributed_optimizer": is_sharded, "whole_s": whole, "short_s": short}
            result["steps"].append({**row, "times_as_fast": whole / short})
    with nodes.emulated(2, 0.0) as site:
        pairs = [[step_s(site, QUICKSTART_MODEL, way, 20) for way in ([], CLIP)] for _ in range(3)]
    more = [clipped / plain - 1 for plain, clipped in pairs]
    result["clipping"] = {"seconds": pairs, "more_of_turns": more}
    say(result)
    whole = flags_of(S4, best_static(S4, 32))
    # Short gradients exclude that the reduction overlaps with the backward pass.
    short = [word for word in whole if not word.startswith("--overlap-")] + SHORT_GRADIENTS
    with nodes.emulated(2, 100.0) as site:
        say({**result, "losses": by_seed(trainer, site, whole, short, ())})


PARTS = {
    "layout": (layout, "slow_link.json"),
    "messages": (messages, "stage_messages.json"),
    "gradients": (gradients, "grad_options.json"),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data-path", default="", help="instead of Python's standard library")
    parser.add_argument("--output", type=Path, help="instead of the file in docs/results")
    parser.add_argument("--rate", type=float, default=200.0, help="layout: Mbit/s of the link")
    parser.add_argument("--samples", type=int, default=600, help="layout: of each run")
    parser.add_argument("--runs", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    nodes.require()
    measure, name = PARTS[args.part]
    args.output, before = args.output or RESULTS / name, origin()
    with tempfile.TemporaryDirectory() as folder:
        say = lambda found: write(args.output, {**found, **before}, hide=["runs", "losses"])  # noqa: E731
        measure(Path(folder), args, say)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--every-second"]:
        every_second(int(sys.argv[2]), sys.argv[3:])
    else:
        main()
