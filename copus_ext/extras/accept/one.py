"""Checks for which one rank is enough."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from typing import Any

from copus_ext.extras.accept.finding import Failed, Finding, Skipped, apart, judged, most_apart
from copus_ext.extras.accept.runs import ALONE, Bench, RunResult, last_lines

OBSERVE = ["--copus", "--copus-mode", "observe", "--copus-policy", "static"]
EVERY_SAMPLE = ["--no-gradient-accumulation-fusion"]
"""Where NVIDIA's apex is installed: its kernel adds gradients of micro-batches without a trace."""
_MAX_BF16, _MAX_ENGINE, _MAX_NOISE = 2e-2, 1e-2, 1e-3
_MAX_MEMORY, _MAX_ALONE = 0.12, 0.02
_MIN_SPEED, _MAX_MEASURING = 0.97, 1.02
_UNFUSED = ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"]
_UNFUSED += ["--no-persist-layer-norm", "--no-rope-fusion"]
"""What Megatron-LM's own program has to be told without Transformer Engine. Ours knows."""
_WALK = ["tp2.pp1.dp1", "tp1.pp1.dp2", "tp2.pp1.dp1", "tp1.pp1.dp1"]
"""Layouts of `arithmetic`; dp2 cuts tensors in flat ranges, tp2 by rows and columns."""


def implementations(bench: Bench) -> Finding:
    """Each implementation of layers in bf16 against the local one in fp32, over 20 steps from the
    same weights; and the same run twice, bit for bit."""
    repeats = "--bf16 --deterministic-mode"
    kinds = {
        "fp32": "--transformer-impl local",
        "bf16": f"--transformer-impl local {repeats}",
    }
    if bench.has_engine:
        kinds["engine"] = f"--transformer-impl transformer_engine {repeats}"
    kinds["again"] = list(kinds.values())[-1]
    base = [*bench.flags(), "--train-iters", "20"]
    runs = {
        name: bench.train(f"implementations-{name}", [*base, *flags.split()], task={})
        for name, flags in kinds.items()
    }
    plain, again = runs.pop("fp32"), runs.pop("again")
    norms = {name: apart(run.norms[0], plain.norms[0]) for name, run in runs.items()}
    losses = {name: most_apart(run.losses, plain.losses) for name, run in runs.items()}
    first = list(runs.values())[-1]
    is_same = first.losses == again.losses and _sums(first) == _sums(again)
    holds = max(norms.values()) < _MAX_BF16 and max(losses.values()) < _MAX_ENGINE and is_same
    line = (
        f"bf16 against fp32: first gradient norm {max(norms.values()):.1e} apart (below "
        f"{_MAX_BF16:g}), losses {max(losses.values()):.1e} (below {_MAX_ENGINE:g}); "
        f"twice the same run is {'' if is_same else 'NOT '}bit-equal"
    )
    if not bench.has_engine:
        line += "; no Transformer Engine here"
    numbers = {"gradient_norm": norms, "losses": losses, "is_bit_equal": is_same}
    return judged(holds, line, **numbers)


def noise(bench: Bench) -> Finding:
    """The squares that hooks measure, against the gradient norms of steps that take single samples
    and halves of the batch at a learning rate of zero; and whether they change a weight."""
    base = [*bench.flags(), *EVERY_SAMPLE]
    still = ["--lr", "0", "--min-lr", "0", "--clip-grad", "1e9"]
    norms = {
        size: bench.train(
            f"norms-{size}",
            [*base, *still, *_batches(size, steps=8 // size)],
        ).norms
        for size in (1, 4)
    }
    singles = [norm * norm for norm in norms[1]]
    # Of halves the first is measured.
    small = {"micro": sum(singles) / len(singles), "half": norms[4][0] ** 2}
    differences = {}
    for estimator, wanted in small.items():
        settings = bench.folder / f"{estimator}.yaml"
        settings.write_text(f"gns_estimator: {estimator}\n")
        watched = [*OBSERVE, "--copus-config", str(settings), "--train-iters", "2"]
        run = bench.train(f"noise-{estimator}", [*base, *still, *watched])
        squares = run.steps[0]["noise"]["squares"]
        found = {kind: sum(squares[kind].values()) for kind in ("small", "big")}
        of_batch = apart(found["big"], run.norms[0] ** 2)
        differences[estimator] = max(apart(found["small"], wanted), of_batch)
    # Without it, attention adds up gradients in another order each time.
    flags = [*base, "--train-iters", "6", "--bf16", "--deterministic-mode"]
    plain = bench.train("unwatched", flags, task={})
    watched = bench.train("watched", [*flags, *OBSERVE], task={})
    is_same = plain.losses == watched.losses and _sums(plain) == _sums(watched)
    worst = max(differences.values())
    line = (
        f"squares of gradients {worst:.1e} from those of single samples (below {_MAX_NOISE:g}); "
        f"weights with and without hooks are {'' if is_same else 'NOT '}bit-equal"
    )
    numbers = {"differences": differences, "is_bit_equal": is_same}
    return judged(worst < _MAX_NOISE and is_same, line, **numbers)


def arithmetic(bench: Bench) -> Finding:
    """The state of a run through layouts of two ranks and back, all shards on one device; and the
    sums by which a change of layout is checked, on the device and on the CPU."""
    flags = [*bench.flags(), "--train-iters", "2", "--bf16"]
    run = bench.train("arithmetic", flags, task={"reshard": _WALK})
    row = {**run.ranks[0]["reshards"], "sums": run.ranks[0]["device_sums_as_on_cpu"]}
    on_cpu = row["as_on_cpu"] and row["sums"]
    line = (
        f"{len(_WALK)} changes of {len(_sums(run))} tensors: sums over bits are "
        f"{'as before' if row['as_before'] else 'NOT as before'}, "
        f"{'and those of the CPU' if on_cpu else 'and NOT those of the CPU'}"
    )
    return judged(row["as_before"] and on_cpu, line, **row)


def resume(bench: Bench) -> Finding:
    """Eight steps, and the same with a stop and a new process after four."""
    flags = [*bench.flags(), "--train-iters", "8", "--bf16", "--deterministic-mode"]
    whole = bench.train("resume-whole", flags, task={})
    save = str(bench.folder / "resume-parts" / "checkpoints")
    flags += ["--save", save, "--load", save]
    bench.train("resume-parts", [*flags, "--exit-interval", "4"])
    parts = bench.train("resume-parts", flags, task={})
    bench.forget("resume-parts")
    is_same = parts.losses == whole.losses and _sums(parts) == _sums(whole)
    line = f"losses, weights and moments after a resume: {'' if is_same else 'NOT '}bit-equal"
    return judged(is_same and len(whole.losses) == 8, line, losses=whole.losses)


def memory(bench: Bench) -> Finding:
    """Measured peaks of four configurations, against the planner's and against those of one rank
    that takes a few steps by itself."""
    _need_gpu(bench)
    base = [*bench.flags("fast"), "--train-iters", "4"]
    micro, length = _micro(base), _number(base, "--seq-length")
    half = f"--micro-batch-size {micro // 2 or 1}"
    kinds = {
        "as it is": f"--micro-batch-size {micro}",
        "half the micro-batch": half,
        "recompute": "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "twice the length": f"--seq-length {2 * length} --max-position-embeddings {2 * length} "
        f"{half}",
    }
    rows: dict[str, dict[str, Any]] = {}
    for i, (name, more) in enumerate(kinds.items()):
        flags = [*base, *more.split()]
        row = rows[name] = _peaks(bench.once(f"memory-{i}", flags))
        vocabulary = ["--padded-vocab-size", str(row["padded_vocab_size"])]
        row["alone"] = bench.peak_of_rank(f"memory-{i}-alone", [*flags, *vocabulary])
    alone = max(apart(row["alone"]["peak"], row["allocated_bytes"]) for row in rows.values())
    line = (
        f"peaks of a rank by itself at most {alone:.1%} from those of runs (below {_MAX_ALONE:.0%})"
    )
    errors = {
        name: row["predicted_bytes"] / row["peak_bytes"] - 1
        for name, row in rows.items()
        if "predicted_bytes" in row
    }
    holds = alone < _MAX_ALONE
    if errors:
        worst = max(map(abs, errors.values()))
        # Beside the context of a process, which is a guess, a small model needs hardly anything.
        limit = _MAX_MEMORY * (2 if bench.size == "small" else 1)
        line += f"; predicted ones at most {worst:.1%} (below {limit:.0%})"
        holds &= worst < limit
    else:
        line += "; the planner has no preset for this GPU, and copus plan takes a file"
    return judged(holds, line, errors=errors, rows=rows)


def throughput(bench: Bench) -> Finding:
    """Steps without the controller, with it, and of Megatron-LM's own program."""
    flags = [*bench.flags("fast"), "--train-iters", "24"]
    took = {
        name: bench.train(f"speed-{name}", [*flags, *more]).step_s()
        for name, more in {"plain": [], "observe": OBSERVE, "again": []}.items()
    }
    plain_s = min(took["plain"], took["again"])
    measuring = took["observe"] / plain_s
    line = f"a step takes {plain_s:.3f} s, with the controller {measuring:.3f} times that"
    holds = measuring < _MAX_MEASURING
    numbers: dict[str, Any] = {"step_s": took}
    if bench.megatron_lm is None:
        line += "; not compared with Megatron-LM, for want of --megatron-lm FOLDER"
    else:
        theirs_s = numbers["megatron_lm_s"] = _of_megatron_lm(bench, flags)
        ratio = theirs_s / plain_s
        line += f"; {ratio:.3f} times as fast as Megatron-LM (at least {_MIN_SPEED})"
        holds &= ratio >= _MIN_SPEED
    if bench.device == "cpu":
        line += "; on CPU ranks it is only noted"
        return Finding(verdict="skipped", line=line, numbers=numbers)
    return judged(holds, line + f" (measuring below {_MAX_MEASURING})", **numbers)


def out_of_memory(bench: Bench) -> Finding:
    """A micro-batch that does not fit into what a limit leaves of the GPU, and the next launch."""
    _need_gpu(bench)
    base = bench.flags("fast")
    micro = max(2, _micro(base))
    flags = [*base, "--train-iters", "4"]
    low, high = (
        _peaks(bench.once(f"full-{m}", [*flags, "--micro-batch-size", str(m)]))["peak_bytes"]
        for m in (micro // 2, micro)
    )
    if high < 1.02 * low:
        raise Skipped("the micro-batch makes no difference to the memory of this model")
    limit, save = (low + high) / 2, str(bench.folder / "full" / "checkpoints")
    flags += ["--micro-batch-size", str(micro), "--save", save, "--load", save]
    flags += ["--copus", "--copus-policy", "static"]
    first = bench.train("full", flags, task={"limit_bytes": limit}, code=1)
    second = bench.train("full", flags, task={"limit_bytes": limit})
    taken = second.steps[-1]["micro_batch_size"]
    is_told = "out of memory" in first.output
    line = f"micro-batch {micro} runs out of memory, the next launch takes {taken}"
    return judged(is_told and taken < micro, line, peaks=[low, high], limit=limit)


def _of_megatron_lm(bench: Bench, flags: list[str]) -> float:
    """Seconds of the median step of a checkout's own program under the same flags.

    Raises:
        Failed: it did not end well.
    """
    assert bench.megatron_lm is not None
    # Flags of ours alone.
    own = flags[:]
    for name in ("--device", "--tokenizer-type"):
        at = own.index(name)
        del own[at : at + 2]
    own += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--eval-interval", "1000"]
    if not bench.has_engine:
        own += _UNFUSED
    words = [sys.executable, str(bench.megatron_lm / "pretrain_gpt.py"), *own]
    # In front of the megatron-core that is installed.
    path = os.pathsep.join(filter(None, [str(bench.megatron_lm), os.environ.get("PYTHONPATH")]))
    env = {**ALONE, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    code, output = bench.run(words, bench.folder / "megatron_lm.txt", env)
    took = re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", output)
    if code or len(took) < 12:
        message = f"Megatron-LM's own program ended with code {code} after {len(took)} steps"
        raise Failed(message, last_lines(output))
    rows = sorted(float(ms) / 1e3 for ms in took[4:])
    return rows[len(rows) // 2]


def _batches(size: int, *, steps: int) -> list[str]:
    return ["--global-batch-size", str(size), "--train-iters", str(steps)]


def _sums(run: RunResult) -> dict[str, int]:
    return run.ranks[0]["sums"]


def _peaks(run: RunResult) -> dict[str, Any]:
    names = ("peak_bytes", "allocated_bytes", "predicted_bytes", "padded_vocab_size")
    return {name: run.ranks[0][name] for name in names if name in run.ranks[0]}


def _number(flags: list[str], name: str) -> int:
    return next(int(b) for a, b in reversed(list(pairwise(flags))) if a == name)


def _micro(flags: list[str]) -> int:
    return _number(flags, "--micro-batch-size")


def _need_gpu(bench: Bench) -> None:
    if bench.device == "cpu":
        raise Skipped("CPU ranks have no memory of their own")
