"""B8: does a run reach a loss sooner? Real processes, real clock, two nodes, three link speeds.

    sudo python bench/time_to_loss_real.py --plan      # how long it will take
    sudo python bench/time_to_loss_real.py             # again to go on where it was ended
    python bench/time_to_loss_real.py --draw           # tables and figures from the results file

Two network namespaces, one core and one rank in each, torchrun on both, `pretrain_gpt.py` as it is.
Every policy trains the same samples of the Python standard library's sources with the same learning
rates by sample and batch; held-out loss at fixed samples. Policies follow each other, then the next
link, then the next seed. Writes docs/results/time_to_loss_real.json and figures beside it.
Needs root, iproute2, two cores and nothing else running.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nodes
from support import RESULTS, ROOT, open_source, origin
from time_to_loss_account import account
from time_to_loss_campaign import SIZES, Campaign
from time_to_loss_policies import ABLATIONS, BASELINES, MORE, OURS, STATIC, flags_of
from time_to_loss_report import report

if TYPE_CHECKING:
    from copus_ext.planner.configuration import Configuration

LINKS = "5000,2000,0"
"""Mbit/s, nominal; 0 is a link without limit. Chosen before any time to loss was seen."""


def prepare_data(campaign: Campaign) -> str:
    """The prefix of the data set; made of the standard library's sources if none is given."""
    if campaign.args.data_path:
        return str(Path(campaign.args.data_path).resolve())
    prefix = campaign.work / "data" / "stdlib"
    if not prefix.with_name("stdlib_text_document.idx").exists():
        print("making a data set of the standard library's sources", flush=True)
        tool = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--python-stdlib"]
        words = [*tool, "--output-prefix", str(prefix), "--append-eod"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return f"{prefix}_text_document"


def shared_flags(campaign: Campaign, data: str) -> list[str]:
    """Of every run: model, data, and what the links make worth having."""
    words = [*campaign.settings["model"].split(), "--split", "95,5,0", "--log-interval", "100"]
    # A profile times data parallelism with these; a layout that is moved to has them too.
    words += ["--overlap-grad-reduce", "--overlap-param-gather"]
    return [*words, "--data-path", data, "--data-cache-path", str(campaign.work / "cache")]


def take_profile(campaign: Campaign, names: nodes.Names, link: str, shared: list[str]) -> None:
    """Times every layout and micro-batch on the link, then the best few at each batch again."""
    recipe, store = campaign.recipe, campaign.store(link)
    tool, flags = _profiling(campaign, store, shared)
    log = campaign.work / f"profile_{link}"
    store.unlink(missing_ok=True)  # what it costs is measured with it
    print(f"link {link}: profile", flush=True)
    seconds = nodes.run(names, [*tool, *flags], log, say=lambda: _last_line(log))
    campaign.result["links"][link]["profile"] = {"records": _records(store)}
    profile = campaign.profile(link)
    assert profile is not None
    for c, batches in profile.contenders(recipe.batches).values():
        own = _only(c, batches)
        seconds += nodes.run(names, [*tool, *own, *flags], log, say=lambda: _last_line(log))
    profile = {"seconds": round(seconds, 1), "records": _records(store)}
    campaign.result["links"][link]["profile"] = profile
    campaign.write()


def take_clock(campaign: Campaign, names: nodes.Names, link: str, shared: list[str]) -> None:
    """Times what all runs had on a link, in turn."""
    request, log = campaign.work / f"clock_{link}.json", campaign.work / f"clock_{link}"
    output = request.with_suffix(".timed.json")
    ways = campaign.untimed(link)
    request.write_text(json.dumps({"ways": ways, "output": str(output)}))
    print(f"link {link}: {len(ways)} configurations of its runs, timed in turn", flush=True)
    command = [str(ROOT / "bench/time_to_loss_clock.py"), str(request)]
    before = origin()
    flags = _flags_for_timing(campaign, shared)
    nodes.run(names, [*command, *flags], log, say=lambda: _last_line(log))
    kept = {k: before[k] for k in ("date", "commit", "load_average")}
    found = {"ways": json.loads(output.read_text()), **kept}
    campaign.result["links"][link]["clock"] = found
    campaign.write()


def _profiling(campaign: Campaign, store: Path, shared: list[str]) -> tuple[list[str], list[str]]:
    """Command that times layouts, and the flags of the run that it is for."""
    last = campaign.recipe.batches[-1]
    tool = [str(ROOT / "tools/profile_layouts.py"), "--store", str(store)]
    tool += ["--steps", str(SIZES[campaign.args.size]["steps"])]
    tool += ["--global-batch-size", str(last), "--max-micro-batch", str(min(last, 8))]
    return tool, _flags_for_timing(campaign, shared)


def _flags_for_timing(campaign: Campaign, shared: list[str]) -> list[str]:
    recipe = campaign.recipe
    flags = ["--", *shared, "--micro-batch-size", "1", "--eval-iters", "0"]
    return [*flags, "--train-samples", str(recipe.samples), *recipe.rates(recipe.first_batch)]


def _only(c: Configuration, batches: list[int]) -> list[str]:
    fixed = f"tp={c.tp},pp={c.pp},vpp={c.vpp},micro_batch={c.micro_batch_size}"
    return ["--fix", fixed, "--batches", ",".join(map(str, batches))]


def _records(store: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.read_text().splitlines()]


def _last_line(log: Path) -> str:
    lines = log.with_name(f"{log.name}.0.txt").read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if "samples/s" in line), "")


def run_one(
    campaign: Campaign, names: nodes.Names, job: tuple[int, str, str], shared: list[str]
) -> None:
    """Trains with one policy and keeps what came of it."""
    seed, link, policy = job
    profile, recipe = campaign.profile(link), campaign.recipe
    assert profile is not None
    at = campaign.work / "runs" / f"{link}_{seed}_{policy}"
    shutil.rmtree(at, ignore_errors=True)
    at.parent.mkdir(parents=True, exist_ok=True)
    flags = flags_of(policy, recipe, profile, str(campaign.store(link)))
    trainer = [str(ROOT / "pretrain_gpt.py"), *shared, *flags, "--seed", str(seed)]
    before = origin()
    say = functools.partial(nodes.progress, at, recipe.samples, at.name)
    most_s = 10 * campaign.estimate_s(link, policy) + 600
    command = [*trainer, "--run-dir", str(at)]
    wall_s = nodes.run(names, command, at, most_s=most_s, say=say)
    kept = {k: before[k] for k in ("date", "commit", "load_average")}
    run = {"policy": policy, "link": link, "seed": seed, "flags": flags, "wall_s": round(wall_s, 1)}
    campaign.result["runs"].append({**run, **kept, **account(at)})
    campaign.write()
    if not campaign.args.keep:
        shutil.rmtree(at)


def warm_up(campaign: Campaign, names: nodes.Names, seed: int, link: str, data: list[str]) -> None:
    """One step, so that no policy is the one that makes the index of the samples."""
    profile = campaign.profile(link)
    assert profile is not None
    flags = campaign.recipe.of(profile.best(campaign.recipe.first_batch))
    at = campaign.work / "warm_up"
    command = [str(ROOT / "pretrain_gpt.py"), *data, *flags, "--seed", str(seed)]
    nodes.run(names, [*command, "--exit-interval", "1", "--run-dir", str(at)], at)
    shutil.rmtree(at)


def measure(campaign: Campaign) -> None:
    """Everything that is left."""
    campaign.work.mkdir(parents=True, exist_ok=True)
    data = prepare_data(campaign)
    size = Path(f"{data}.bin").stat().st_size
    if campaign.result.setdefault("data_bytes", size) != size:
        raise SystemExit(f"{data}.bin is not the data set that {campaign.args.output} is about")
    campaign.result.setdefault("machine", origin())
    shared = shared_flags(campaign, data)
    warm: set[int] = set()
    for seed in campaign.seeds:
        for link in campaign.links:
            block = [j for j in campaign.left() if j[:2] == (seed, link)]
            if not block:
                continue
            with nodes.two_nodes(float(link)) as names:
                kept = campaign.result["links"].setdefault(link, {"measured_mbit_per_s": []})
                kept["measured_mbit_per_s"].append(nodes.measure_link(names))
                if "profile" not in kept or "seconds" not in kept["profile"]:
                    take_profile(campaign, names, link, shared)
                if seed not in warm:
                    warm_up(campaign, names, seed, link, shared)
                    warm.add(seed)
                for job in block:
                    run_one(campaign, names, job, shared)
                    _say_left(campaign)
    for link in campaign.links:
        if campaign.untimed(link):
            with nodes.two_nodes(float(link)) as names:
                take_clock(campaign, names, link, shared)


def _say_left(campaign: Campaign) -> None:
    run, jobs = campaign.result["runs"][-1], campaign.left()
    left_s = campaign.drift() * sum(campaign.estimate_s(link, name) for _, link, name in jobs)
    print(
        f"{run['policy']}, link {run['link']}, seed {run['seed']}: {run['seconds']:.1f} s, loss "
        f"{run['evaluations'][-1][2]:.4f}; {len(jobs)} runs left, about {left_s / 3600:.1f} h",
        flush=True,
    )


def parse() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [f"{STATIC}_N", *BASELINES, *OURS, *ABLATIONS]
    p.add_argument("--size", choices=SIZES, default="quickstart")
    p.add_argument("--links", default=LINKS, help="nominal Mbit/s; 0: no limit")
    p.add_argument(
        "--everywhere",
        action="store_true",
        help="train on every link what trains the same on all; else on the first only, and its "
        "steps are timed on the others",
    )
    p.add_argument("--seeds", default="1,2,3")
    p.add_argument(
        "--policies",
        default="",
        help=f"run these; with + in front, besides the usual ones ({', '.join(names)}): "
        f"{', '.join(MORE)}",
    )
    p.add_argument("--samples", type=int, help="of a run; rounded to whole evaluations")
    p.add_argument("--minutes", type=float, help="instead: of a run at a batch of 8, about")
    p.add_argument("--batches", default="", help="grid; default: that of the size")
    p.add_argument("--first-batch", type=int, help="of policies that change it")
    p.add_argument("--evaluations", type=int, help="of a run")
    p.add_argument("--eval-samples", type=int, help="held-out samples of an evaluation")
    p.add_argument("--lr", type=float, default=5e-4, help="at the first batch")
    p.add_argument("--decay", choices=("cosine", "constant"), default="cosine")
    p.add_argument("--calibration", type=float, help="c of the baselines; default: as published")
    p.add_argument("--targets", type=int, default=5)
    p.add_argument("--data-path", help="prefix of an indexed data set; default: made")
    p.add_argument("--work", default=str(ROOT / "runs" / "time_to_loss_real"))
    p.add_argument("--keep", action="store_true", help="keep the run directories")
    p.add_argument("--output", type=Path, default=RESULTS / "time_to_loss_real.json")
    p.add_argument("--plan", action="store_true", help="say how long it takes, and no more")
    p.add_argument("--draw", action="store_true", help="tables and figures of --output, no more")
    return p.parse_args()


def main() -> int:
    """Measures what is left, prints and draws."""
    args = parse()
    open_source()
    from tests.helpers.two_nodes import why_not

    if args.draw:
        print(report(json.loads(args.output.read_text()), args.targets, args.output))
        return 0
    try:
        campaign = Campaign(args)
    except ValueError as error:
        print(f"time_to_loss_real: {error}", file=sys.stderr)
        return 2
    if args.plan:
        print(campaign.plan())
        return 0
    if problem := why_not():
        print(f"time_to_loss_real: {problem}", file=sys.stderr)
        return 2
    nodes.unwind_on_signals()
    print(campaign.plan(), flush=True)
    try:
        measure(campaign)
    except KeyboardInterrupt:
        print("ended; the same command goes on with the run that was under way", file=sys.stderr)
        return 130
    print(report(campaign.result, args.targets, args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
