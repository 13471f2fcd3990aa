"""Checks for which one rank is enough."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from typing import Any

from copus_ext.extras.accept.finding import Finding, Skipped, apart, judged, most_apart
from copus_ext.extras.accept.runs import Bench, RunResult

OBSERVE = ["--copus", "--copus-mode", "observe", "--copus-policy", "static"]
_MAX_BF16, _MAX_ENGINE, _MAX_NOISE, _MAX_MEMORY = 2e-2, 1e-2, 1e-3, 0.12
_MIN_SPEED, _MAX_MEASURING = 0.97, 1.02


def implementations(bench: Bench) -> Finding:
    """Each implementation of layers in bf16 against the local one in fp32, over 20 steps from the
    same weights; and the same run twice, bit for bit."""
    kinds = {"fp32": "--transformer-impl local", "bf16": "--transformer-impl local --bf16"}
    if bench.has_engine:
        kinds["engine"] = "--transformer-impl transformer_engine --bf16"
    steps = ["--train-iters", "20"]
    runs = {
        name: bench.train(f"implementations-{name}", [*bench.flags(), *steps, *flags.split()])
        for name, flags in kinds.items()
    }
    twice = [
        bench.train(
            f"twice-{i}", [*bench.flags(), *steps, "--bf16", "--deterministic-mode"], task={}
        )
        for i in range(2)
    ]
    plain = runs.pop("fp32")
    norms = {name: apart(run.norms[0], plain.norms[0]) for name, run in runs.items()}
    losses = {name: most_apart(run.losses, plain.losses) for name, run in runs.items()}
    is_same = twice[0].losses == twice[1].losses and _sums(twice[0]) == _sums(twice[1])
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
    still = ["--lr", "0", "--min-lr", "0", "--clip-grad", "1e9"]
    norms = {
        size: bench.train(
            f"norms-{size}",
            [*bench.flags(), *still, *_batches(size, steps=8 // size)],
        ).norms
        for size in (1, 4, 8)
    }
    singles = [norm * norm for norm in norms[1]]
    # Of halves the first is measured.
    small = {"micro": sum(singles) / len(singles), "half": norms[4][0] ** 2}
    differences = {}
    for estimator, wanted in small.items():
        settings = bench.folder / f"{estimator}.yaml"
        settings.write_text(f"gns_estimator: {estimator}\n")
        watched = [*OBSERVE, "--copus-config", str(settings), "--train-iters", "2"]
        run = bench.train(f"noise-{estimator}", [*bench.flags(), *still, *watched])
        squares = run.steps[0]["noise"]["squares"]
        found = {kind: sum(squares[kind].values()) for kind in ("small", "big")}
        of_batch = apart(found["big"], norms[8][0] ** 2)
        differences[estimator] = max(apart(found["small"], wanted), of_batch)
    flags = [*bench.flags(), "--train-iters", "6", "--bf16"]
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


def sums(bench: Bench) -> Finding:
    """The sums by which a change of layout is checked, on the device and on the CPU."""
    run = bench.train("sums", [*bench.flags(), "--train-iters", "2", "--bf16"], task={})
    holds = run.ranks[0]["device_sums_as_on_cpu"]
    found = "as on the CPU" if holds else "OTHERS than on the CPU"
    return judged(holds, f"sums over {len(_sums(run))} tensors of weights and moments: {found}")


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
    """Predicted against measured peaks of four configurations."""
    _need_gpu(bench)
    base, rows = [*bench.flags("fast"), "--train-iters", "4"], {}
    kinds = {
        "as it is": "",
        "half the micro-batch": f"--micro-batch-size {_micro(base) // 2 or 1}",
        "recompute": "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "twice the length": f"--seq-length {2 * _number(base, '--seq-length')} "
        f"--max-position-embeddings {2 * _number(base, '--seq-length')} "
        f"--micro-batch-size {_micro(base) // 2 or 1}",
    }
    for i, (name, flags) in enumerate(kinds.items()):
        row = bench.train(f"memory-{i}", [*base, *flags.split()], task={}).ranks[0]
        if "predicted_bytes" not in row:
            raise Skipped("the planner has no preset for this GPU; copus plan takes a file")
        rows[name] = {key: row[key] for key in ("peak_bytes", "predicted_bytes")}
    errors = {name: row["predicted_bytes"] / row["peak_bytes"] - 1 for name, row in rows.items()}
    worst = max(map(abs, errors.values()))
    # Beside the context of a process, which is a guess, a small model needs hardly anything.
    limit = _MAX_MEMORY * (2 if bench.size == "small" else 1)
    line = f"predicted peaks at most {worst:.1%} from measured ones (below {limit:.0%})"
    return judged(worst < limit, line, errors=errors, rows=rows)


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
    peaks = [
        bench.train(f"full-{m}", [*flags, "--micro-batch-size", str(m)], task={}).ranks[0]
        for m in (micro // 2, micro)
    ]
    low, high = (row["peak_bytes"] for row in peaks)
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
    """Seconds of the median step of a checkout's own program under the same flags."""
    assert bench.megatron_lm is not None
    # Flags of ours alone.
    own = flags[:]
    for name in ("--device", "--tokenizer-type"):
        at = own.index(name)
        del own[at : at + 2]
    own += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--eval-interval", "1000"]
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words = [sys.executable, "-m", *start, str(bench.megatron_lm / "pretrain_gpt.py"), *own]
    env = {"PYTHONPATH": str(bench.megatron_lm), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    code, output = bench.run(words, bench.folder / "megatron_lm.txt", env)
    took = re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", output)
    if code or len(took) < 12:
        raise Skipped(f"Megatron-LM's own program ended with code {code}; see megatron_lm.txt")
    rows = sorted(float(ms) / 1e3 for ms in took[4:])
    return rows[len(rows) // 2]


def _batches(size: int, *, steps: int) -> list[str]:
    return ["--global-batch-size", str(size), "--train-iters", str(steps)]


def _sums(run: RunResult) -> dict[str, int]:
    return run.ranks[0]["sums"]


def _number(flags: list[str], name: str) -> int:
    return next(int(b) for a, b in reversed(list(pairwise(flags))) if a == name)


def _micro(flags: list[str]) -> int:
    return _number(flags, "--micro-batch-size")


def _need_gpu(bench: Bench) -> None:
    if bench.device == "cpu":
        raise Skipped("CPU ranks have no memory of their own")
