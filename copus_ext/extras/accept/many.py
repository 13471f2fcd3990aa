"""Checks that need several ranks."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter
from itertools import pairwise
from typing import Any

from copus_ext.extras.accept.finding import Finding, Skipped, apart, judged, most_apart
from copus_ext.extras.accept.one import EVERY_SAMPLE, OBSERVE
from copus_ext.extras.accept.runs import Bench, RunResult

_MAX_LOSS, _MAX_LOSS_BF16, _MAX_NOISE, _MAX_MEMORY = 1e-5, 1e-2, 1e-3, 0.12
_MAX_NORM, _MAX_NORM_BF16, _MAX_NORMS = 1e-4, 2e-2, 1e-3
_MAX_LEAK_MIB, _MAX_RECOVERY_S = 100, 30.0
_TOO_LARGE = r"[0-9.]+ GB are needed beside the old state and [0-9.]+ GB are free"
_EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128
--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-balance lagged"""


def layouts(ranks: int) -> list[str]:
    """Layouts of so many ranks, unlike each other, the first without model parallelism."""
    half, quarter = ranks // 2, ranks // 4
    found = [f"tp1.pp1.dp{ranks}", f"tp2.pp1.dp{half}", f"tp1.pp2.dp{half}"]
    if ranks % 4:
        return [*found, f"tp1.cp2.pp1.dp{half}"]
    both = f"tp2.pp2.dp{quarter}" if ranks % 8 else f"tp4.pp2.dp{ranks // 8}"
    return [*found, f"tp2.cp2.pp1.dp{quarter}", both, f"tp4.pp1.dp{quarter}"]


def flags_of(layout: str) -> list[str]:
    """The flags that start a run on a layout."""
    names = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size"}
    names |= {"cp": "context-parallel-size", "ep": "expert-model-parallel-size"}
    names |= {"etp": "expert-tensor-parallel-size"}
    return [
        word
        for name, size in re.findall(r"([a-z]+)(\d+)", layout)
        if name in names
        for word in (f"--{names[name]}", size)
    ]


def flags_for(bench: Bench, layouts: list[str], model: str = "model") -> list[str]:
    """Those of a model that is to run in all these layouts."""
    flags = bench.flags(model)
    # Transformer Engine's attention over several ranks has no fp32.
    needs = bench.has_engine and "--bf16" not in flags and any("cp" in name for name in layouts)
    return [*flags, *(["--bf16"] if needs else [])]


def moves(bench: Bench) -> Finding:
    """To every layout and back to the first, two rounds of it, a step in each: losses against a run
    that stays, all bits over each change, and what a process holds after the step."""
    home, *others = every = layouts(bench.ranks)
    walk = [to for away in others for to in (away, home)]
    return _walked(bench, "moves", flags_for(bench, every, "large"), home, walk)


def moves_of_experts(bench: Bench) -> Finding:
    """The same of a mixture of experts."""
    if bench.ranks % 2:
        raise Skipped("needs an even number of ranks")
    home, half = f"tp1.pp1.ep2.dp{bench.ranks}", bench.ranks // 2
    walk = [f"tp2.pp1.ep2.etp1.dp{half}", home, f"tp1.pp2.dp{half}", home]
    if bench.ranks % 4 == 0:
        walk += [f"tp1.pp1.ep4.dp{bench.ranks}", home]
    return _walked(bench, "moves-experts", [*bench.flags(), *_EXPERTS.split()], home, walk)


def _walked(bench: Bench, name: str, flags: list[str], home: str, walk: list[str]) -> Finding:
    """Two rounds of a walk from and to `home`, and what is compared of them."""
    walk = walk * 2
    flags = [*flags, *_steps_of(walk), *flags_of(home)]
    stayed = bench.train(f"{name}-stayed", flags, ranks=bench.ranks, task={})
    run = bench.train(name, flags, ranks=bench.ranks, task={"walk": walk, "at": 2})
    rows = run.ranks[0]["moves"]
    failed = [f"{row['to']}: {row['reason']}" for row in rows if row["kind"] != "moved"]
    apart, limit = most_apart(run.losses, stayed.losses), _limit(flags)
    lost = [row["to"] for row in rows if not row.get("keeps_bits")]
    # In bf16 roundings grow with each step: only the one behind the first change is compared.
    reach, most = (3, _MAX_NORM_BF16) if "--bf16" in flags else (len(stayed.norms), _MAX_NORMS)
    norms = most_apart(run.norms[:reach], stayed.norms[:reach])
    leaks = _leaks([rank["moves"] for rank in run.ranks])
    pause_s = statistics.median(row["pause_s"] for row in rows)
    line = (
        f"{len(rows) - len(failed)} of {len(walk)} moves done, {pause_s:.2f} s each; losses "
        f"{apart:.1e} apart (at most {limit:g}), gradient norms {norms:.1e} (at most {most:g}); "
        "each change "
        f"{f'to {lost[0]} CHANGES bits' if lost else 'keeps every bit'}"
    )
    if failed:
        line += f"; {failed[0]}"
    if leaks:
        line += f"; {leaks}"
    holds = not failed and len(rows) == len(walk) and not leaks and not lost
    holds = holds and apart <= limit and norms <= most
    return judged(holds, line, moves=[rank["moves"] for rank in run.ranks][:1])


def _steps_of(walk: list[str]) -> list[str]:
    """Two before the first change, and one behind each."""
    return ["--train-iters", str(2 + len(walk))]


def _leaks(ranks: list[list[dict[str, Any]]]) -> str:
    """What a rank holds more of at the end of the second round than at the end of the first, which
    loads the kernels of every layout; empty if nothing."""
    for rows in ranks:
        first, last = rows[(len(rows) - 1) // 2], rows[-1]
        if last["groups"] > first["groups"]:
            return f"{last['groups'] - first['groups']} groups are left"
        lost = first.get("free_mib", 0) - last.get("free_mib", 0)
        if lost > _MAX_LEAK_MIB:
            return f"{lost} MiB of the GPU are left"
    return ""


def moves_when_full(bench: Bench) -> Finding:
    """Changes of layout, each with a step behind it: while a tenth of the GPU is free beside what
    steps have taken, done or refused for want of memory; and with 3 % less and 3 % more memory than
    a change says that it needs, refused and then done."""
    if bench.device == "cpu":
        raise Skipped("CPU ranks have no memory of their own")
    home, *others = every = layouts(bench.ranks)
    walk = [to for away in others for to in (away, home)]
    flags = [*flags_for(bench, every, "large"), *_steps_of(walk), *flags_of(home)]
    rows, holds = [], True
    for name, more in {"full": {"free": 0.1}, "edge": {"edge": True}}.items():
        task = {"walk": walk, "at": 2, **more}
        run = bench.train(f"moves-{name}", flags, ranks=bench.ranks, task=task)
        found = run.ranks[0]["moves"]
        holds = holds and len(found) == len(walk) and len(run.steps) == 2 + len(walk)
        rows += [{**row, "memory": name} for row in found]
    ends = [_end_of(row) for row in rows]
    # Where the old layout gives back more than the new one needs, nothing is refused.
    wanted = {
        "full": r"moved|cancelled .*" + _TOO_LARGE,
        "edge": rf"moved|moved after .*{_TOO_LARGE}",
    }
    pairs = zip(rows, ends, strict=True)
    holds = holds and all(re.fullmatch(wanted[row["memory"]], end) for row, end in pairs)
    line = "; ".join(f"{count} times {end}" for end, count in Counter(ends).items())
    return judged(holds, line, moves=rows)


def _end_of(row: dict[str, Any]) -> str:
    """How a change has ended, in words."""
    before = row.get("refused")
    return f"{row['kind']} {row['reason']}".strip() + (f" after {before}" if before else "")


def noise_of_layouts(bench: Bench) -> Finding:
    """Squares of gradients of the first step in three layouts."""
    found, base = {}, [*bench.flags(), *OBSERVE, *EVERY_SAMPLE]
    for layout in layouts(bench.ranks)[:3]:
        flags = [*base, "--train-iters", "2", *flags_of(layout)]
        run = bench.train(f"noise-{layout}", flags, ranks=bench.ranks)
        squares = run.steps[0]["noise"]["squares"]
        # The groups of weights that all layouts name.
        found[layout] = {kind: squares[kind] for kind in ("small", "big")}
    first, *others = found.values()
    rows = []
    for kind in ("small", "big"):
        for other in others:
            shared = sorted(first[kind].keys() & other[kind].keys())
            rows.append(
                most_apart([other[kind][k] for k in shared], [first[kind][k] for k in shared])
            )
    worst = max(rows)
    line = f"squares of gradients in {', '.join(found)}: {worst:.1e} apart (below {_MAX_NOISE:g})"
    return judged(worst < _MAX_NOISE, line, squares=found)


def checkpoints(bench: Bench) -> Finding:
    """Every layout saves, and every layout loads all of them into one job, the last one to go on
    from: weights and moments bit for bit, and losses."""
    every, places, saved, norms = layouts(bench.ranks), {}, {}, 0.0
    base = [*flags_for(bench, every), "--train-iters", "6"]
    whole = bench.train("layouts-whole", [*base, *flags_of(every[0])], ranks=bench.ranks)
    for layout in every:
        name = f"saved-{layout}"
        places[layout] = str(bench.folder / name / "checkpoints")
        flags = [*base, *flags_of(layout), "--save", places[layout], "--exit-interval", "3"]
        run = bench.train(name, flags, ranks=bench.ranks, task={})
        saved[layout] = run.ranks[0]["sums"]
        # Adam and clipping would hide a wrong scale of all gradients from losses.
        norms = max(norms, apart(run.norms[0], whole.norms[0]))
    worst, others = 0.0, []
    for layout, first in zip(every, [*every[1:], every[0]], strict=True):
        flags = [*base, *flags_of(layout), "--load", places[first]]
        run = bench.train(f"loaded-{layout}", flags, ranks=bench.ranks, task={"load": places})
        worst = max(worst, most_apart(run.losses, whole.losses[3:]))
        loaded = run.ranks[0]["loaded"]
        others += [f"{a} in {layout}" for a in every if loaded[a] != saved[a]]
    limit = _MAX_NORM_BF16 if "--bf16" in base else _MAX_NORM
    bench.forget(*(f"saved-{layout}" for layout in every))
    line = (
        f"{len(every) ** 2} pairs of {len(every)} layouts: weights and moments are "
        f"{f'NOT those of {others[0]}' if others else 'bit-equal'}, losses {worst:.1e} apart (at "
        f"most {_limit(base):g}), first gradient norms {norms:.1e} (at most {limit:g})"
    )
    return judged(
        worst <= _limit(base) and norms <= limit and not others, line, layouts=every, differ=others
    )


def communicators(bench: Bench) -> Finding:
    """A start and a change of layout with the communicators of NCCL made when they are first used,
    and with all of them made at once, since torch was told of the GPU. The times are noted."""
    if bench.device == "cpu":
        raise Skipped("gloo makes no communicators ahead")
    home, away, *_ = layouts(bench.ranks)
    flags = [*bench.flags("large"), "--train-iters", "4", "--deterministic-mode", *flags_of(home)]
    rows, losses, kinds = {}, [], set()
    for name, is_bound in (("lazy", False), ("eager", True)):
        begin_s = time.time()
        task = {"walk": [away], "at": 2, "bind": is_bound}
        run = bench.train(f"communicators-{name}", flags, ranks=bench.ranks, task=task)
        ends_s = [step["t"] for step in run.steps]
        # The next step makes those that are only then used.
        rows[name] = {"start_s": ends_s[0] - begin_s, "move_s": ends_s[2] - ends_s[1]}
        losses.append(run.losses)
        kinds |= {move["kind"] for move in run.ranks[0]["moves"]}
    is_same = losses[0] == losses[1]
    line = "; ".join(
        f"{name}: a start takes {row['start_s']:.1f} s, a change with its next step "
        f"{row['move_s']:.1f} s"
        for name, row in rows.items()
    )
    line += f"; losses are {'' if is_same else 'NOT '}bit-equal"
    return judged(is_same and kinds == {"moved"}, line, times=rows)


def speeds(bench: Bench) -> Finding:
    """The steps of several layouts, and of a GPU their time and memory beside what the planner
    predicts. No limit is set for the time, as its constants are fitted to no machine like this."""
    rows: dict[str, dict[str, Any]] = {}
    every = layouts(bench.ranks)
    for layout in every:
        flags = [*flags_for(bench, every, "large"), "--train-iters", "12", *flags_of(layout)]
        run = bench.train(f"speed-{layout}", flags, ranks=bench.ranks, task={})
        rows[layout] = {"step_s": run.step_s(), **_peak(run)}
    errors = [
        row["predicted_bytes"] / row["peak_bytes"] - 1
        for row in rows.values()
        if "predicted_bytes" in row
    ]
    line = ", ".join(_timed(layout, row) for layout, row in rows.items())
    if not errors:
        line += "; only noted, as the planner predicts no memory of these"
        return Finding(verdict="skipped", line=line, numbers={"layouts": rows})
    worst = max(map(abs, errors))
    line += f"; predicted peaks at most {worst:.1%} from measured ones (below {_MAX_MEMORY:.0%})"
    return judged(worst < _MAX_MEMORY, line, layouts=rows)


def _timed(layout: str, row: dict[str, Any]) -> str:
    """Seconds of a step, and how many were planned, if any."""
    planned = f" (planned {row['predicted_s']:.3f})" if "predicted_s" in row else ""
    return f"{layout} {row['step_s']:.3f} s{planned}"


def recovery(bench: Bench) -> Finding:
    """An elastic run that loses a rank in the forward pass, behind the reduction, and before the
    ranks share the numbers of a step: how long until the next step, and with which losses."""
    batch = ["--global-batch-size", str(batch_of_recovery(bench.ranks))]
    flags = [*bench.flags(), *batch, "--train-iters", "30"]
    elastic = ["--elastic", "--copy-interval", "4"]
    whole = bench.train("recovery-whole", flags, ranks=bench.ranks)
    rows: dict[str, dict[str, Any]] = {}
    for event in ("forward", "reduce", "share"):
        name = f"recovery-{event}"
        task = {"kill": {"rank": 1, "iteration": 10, "event": event}}
        place = ["--save", str(bench.folder / name / "checkpoints")]
        run = bench.train(name, [*flags, *place], ranks=bench.ranks, task=task, supervisor=elastic)
        losses = {step["iteration"]: step["losses"]["lm loss"] for step in run.steps}
        last = [losses.get(i, float("nan")) for i in range(1, len(whole.losses) + 1)]
        rows[event] = {"apart": most_apart(last, whole.losses), "pause_s": _longest_gap(run)}
        rows[event]["was_killed"] = (run.folder / "killed").exists()
    slowest = max(row["pause_s"] for row in rows.values())
    worst = max(row["apart"] for row in rows.values())
    holds = slowest < _MAX_RECOVERY_S and worst < 1e-3
    holds = holds and all(row["was_killed"] for row in rows.values())
    line = (
        f"a rank killed in {len(rows)} places: the next step after {slowest:.1f} s at most (below "
        f"{_MAX_RECOVERY_S:.0f}), losses {worst:.1e} apart"
    )
    return judged(holds, line, kills=rows)


def batch_of_recovery(ranks: int) -> int:
    """A batch of at least eight that all ranks can have, and all but one: losses of another batch
    cannot be compared."""
    both = ranks * (ranks - 1)
    return both * math.ceil(8 / both)


def _longest_gap(run: RunResult) -> float:
    """Seconds of the longest time without a finished step."""
    ends = [step["t"] for step in run.steps]
    return max(later - earlier for earlier, later in pairwise(ends))


def _peak(run: RunResult) -> dict[str, float]:
    """Of the rank that needs most."""
    rows = [rank for rank in run.ranks if "peak_bytes" in rank]
    if not rows:
        return {}
    most = max(rows, key=lambda row: row["peak_bytes"])
    return {k: most[k] for k in ("peak_bytes", "predicted_bytes", "predicted_s") if k in most}


def _limit(flags: list[str]) -> float:
    """How far losses of other layouts may be apart."""
    return _MAX_LOSS_BF16 if "--bf16" in flags else _MAX_LOSS
