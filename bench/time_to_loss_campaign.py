"""What B8 is made of, what of it is measured, and how long the rest takes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from support import QUICKSTART_MODEL
from time_to_loss import geometric_mean
from time_to_loss_clock import Way, clock_of
from time_to_loss_policies import (
    ABLATIONS,
    STATIC,
    Profile,
    Recipe,
    is_blind_to_speed,
    is_static,
    names_of,
)
from time_to_loss_timed import needed

_TINY_MODEL = """--num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4
--seq-length 64 --max-position-embeddings 64 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer
--tokenizer-type ByteLevelTokenizer"""
SIZES: dict[str, dict[str, Any]] = {
    "quickstart": {
        "model": QUICKSTART_MODEL,
        "batches": "2,4,8,16,32",
        "first": 4,
        "samples": 4096,
        "evaluations": 32,
        "eval_samples": 64,
        "steps": 5,
    },
    "tiny": {
        "model": _TINY_MODEL,
        "batches": "4,8",
        "first": 4,
        "samples": 512,
        "evaluations": 8,
        "eval_samples": 16,
        "steps": 2,
    },
}
"""What --size stands for; the first is the measurement, the second shows that it works."""
_SPEEDS = {2: 9.5, 4: 13.5, 8: 17.0, 16: 18.8, 32: 20.5, 64: 21.5}
"""Samples/s of the quickstart's size, about, for a plan before anything is measured."""
_START_S, _PROFILE_S, _LINK_S, _CLOCK_S = 12.0, 480.0, 6.0, 420.0
"""Seconds of starting a run, of a link's profile, of timing a link and what runs had there."""
_EVALUATION_SPEED = 2.5
"""Held-out samples/s over training samples/s, about."""


class Campaign:
    """The measurement: what it is made of, and what of it is there.

    Args:
        args: the command line.

    Raises:
        ValueError: arguments that do not go together, or a results file of another measurement.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from copus_ext.controller.flags import PUBLISHED_NOISE_SCALE_MULTIPLIER

        self.args, size = args, SIZES[args.size]
        batches = tuple(int(b) for b in (args.batches or size["batches"]).split(","))
        evaluations = args.evaluations or size["evaluations"]
        samples = args.samples or size["samples"]
        if args.minutes:
            samples = args.minutes * 60 * _SPEEDS[8]
        unit = evaluations * batches[-1]
        self.recipe = Recipe(
            batches=batches,
            first_batch=args.first_batch or size["first"],
            samples=max(round(samples / unit), 1) * unit,
            lr=args.lr,
            min_lr_part=0.1,
            decay=args.decay,
            warmup_part=0.1,
            weight_decay=0.01,
            beta2=0.95,
            eval_samples=args.eval_samples or size["eval_samples"],
            evaluations=evaluations,
            calibration=args.calibration or PUBLISHED_NOISE_SCALE_MULTIPLIER,
        )
        self.links = args.links.split(",")
        self.seeds = [int(s) for s in args.seeds.split(",")]
        self.policies = names_of(self.recipe, args.policies)
        self.settings = {
            "size": args.size,
            "recipe": json.loads(json.dumps(dataclasses.asdict(self.recipe))),
            "model": " ".join(size["model"].split()),
        }
        self.work = Path(args.work).resolve()
        self.result = self._read()

    def _read(self) -> dict[str, Any]:
        path = self.args.output
        if not path.exists():
            return {
                "what": "time to loss on two emulated nodes, by the wall clock",
                "settings": self.settings,
                "links": {},
                "runs": [],
            }
        result = json.loads(path.read_text())
        if result["settings"] != self.settings:
            raise ValueError(
                f"{path} holds a measurement with other settings; give another --output, or the "
                f"settings that it was begun with: {json.dumps(result['settings'])}"
            )
        return result

    def write(self) -> None:
        """All of it, or what was there before."""
        path = self.args.output
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(self.result) + "\n")
        os.replace(beside, path)

    def jobs(self) -> list[tuple[int, str, str]]:
        """(seed, link, policy) in the order in which they run. Every block begins with another
        policy, so that none is always the first."""
        order = []
        for number, seed in enumerate(self.seeds):
            for k, link in enumerate(self.links):
                names = [name for name in self.policies if self.is_trained(link, name)]
                turn = (number * len(self.links) + k) * 4 % max(len(names), 1)
                order += [(seed, link, name) for name in [*names[turn:], *names[:turn]]]
        return order

    def is_trained(self, link: str, policy: str) -> bool:
        """Whether a policy trains on a link: all do on the first, on the others those for which
        the link makes a difference, unless everything is asked for."""
        if link == self.links[0] or self.args.everywhere:
            return True
        return not is_blind_to_speed(policy) and policy not in ABLATIONS

    def left(self) -> list[tuple[int, str, str]]:
        """Those that are not in the results."""
        done = {(r["seed"], r["link"], r["policy"]) for r in self.result["runs"]}
        return [job for job in self.jobs() if job not in done]

    def untimed(self, link: str) -> list[Way]:
        """What runs had, or would have had, on a link, if its clock is not known for all of it:
        all is then timed, in turn."""
        known = self.result["links"].get(link, {})
        if "seconds" not in known.get("profile", {}):
            return []
        wanted = needed(self.result, self.recipe, link)
        return wanted if set(wanted) - clock_of(known).keys() else []

    def profile(self, link: str) -> Profile | None:
        """The measured times of a link; None before they are measured."""
        from copus_ext.cost_model.profile import read_profile

        path = self.store(link)
        known = self.result["links"].get(link, {}).get("profile")
        if known is None:
            return None
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(r) + "\n" for r in known["records"]))
        return Profile(read_profile(path)[1])

    def store(self, link: str) -> Path:
        """Where the times of a link are."""
        return self.work / f"profile_{link}.jsonl"

    def estimate_s(self, link: str, policy: str) -> float:
        """Seconds that a run will take, with its start and its evaluations, about."""
        recipe, profile = self.recipe, self.profile(link)
        alone = [int(policy.removeprefix(f"{STATIC}_"))] if is_static(policy) else []
        known = alone or recipe.rising
        speeds = [profile.speed(b) if profile else _reference_speed(b) for b in known]
        speed = geometric_mean(speeds)
        held_out = recipe.eval_samples * (recipe.evaluations + 1) / _EVALUATION_SPEED
        return _START_S + (recipe.samples + held_out) / speed

    def plan(self) -> str:
        """How long what is left will take."""
        jobs = self.left()
        runs_s = sum(self.estimate_s(link, policy) for _, link, policy in jobs)
        profiles = [link for link in self.links if self.profile(link) is None]
        blocks = len({(seed, link) for seed, link, _ in jobs})
        total_s = runs_s * self.drift() + len(profiles) * _PROFILE_S + blocks * _LINK_S
        total_s += _CLOCK_S * sum(1 for link in self.links if self.untimed(link) or jobs)
        known = (
            "as profiled" if len(profiles) < len(self.links) else "taken to be those seen before"
        )
        one = [self.estimate_s(self.links[0], name) for name in self.policies]
        return (
            f"{len(self.policies)} policies, {len(self.links)} links, {len(self.seeds)} seeds, "
            f"{self.recipe.samples} samples: {len(self.jobs())} runs, {len(jobs)} left\n"
            f"policies: {', '.join(self.policies)}\n"
            f"a run takes {min(one) / 60:.1f} to {max(one) / 60:.1f} minutes, one seed of one link "
            f"{sum(one) / 3600:.1f} h (speeds {known}); profiles left: {len(profiles)}\n"
            f"left in all: about {total_s / 3600:.1f} h"
        )

    def drift(self) -> float:
        """Measured over estimated seconds of the runs so far; 1 before the first."""
        done = [r for r in self.result["runs"] if r["link"] in self.links]
        thought = sum(self.estimate_s(r["link"], r["policy"]) for r in done)
        return sum(r["wall_s"] for r in done) / thought if done else 1.0


def _reference_speed(batch: int) -> float:
    return _SPEEDS[min(_SPEEDS, key=lambda b: abs(b - batch))]
