"""The plan for a workload: the best of all micro-batches, beside the best with equal bits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from copus_ext.extras.serving.costs import ServingCosts, micro_batches
from copus_ext.extras.serving.problem import TOLERANCE, ServingProblem
from copus_ext.extras.serving.search import Found, find_best
from megatron.trainer.common.errors import UsageError

SCHEMA = "copus-serving-plan/1"
APPLIED = (4, 8, 16)
"""Bits that `--apply` writes: they divide a word, and all releases of compressed-tensors pack them
alike."""
NOT_MEASURED = "seconds and bytes are predicted by the cost model; no serving latency was measured"


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """Stages, prompts of a micro-batch of `prefill` and `decode`, and what they should cost."""

    prefill: int
    decode: int
    problem: ServingProblem
    found: Found

    @property
    def bits(self) -> list[int]:
        return [b for stage in self.found.stages for b in stage.bits]

    @property
    def prefill_s(self) -> float:
        """Seconds until all prompts have their first token."""
        return self.problem.objective.prefill_s(self.found.costs.prefill_s)

    @property
    def seconds(self) -> float:
        costs, objective = self.found.costs, self.problem.objective
        return costs.objective - objective.theta * costs.loss_increase

    def to_json(self, costs: ServingCosts) -> dict[str, Any]:
        found = self.found.costs
        stages = [
            {
                "device": costs.devices[stage.device].name,
                "position": stage.device,
                "first_layer": stage.start,
                "num_layers": len(stage.bits),
                "bits": list(stage.bits),
                "prefill_s": found.prefill_s[i],
                "decode_s": found.decode_s[i],
                "bytes": found.num_bytes[i],
                "capacity_bytes": float(self.problem.capacity_bytes[stage.device]),
            }
            for i, stage in enumerate(self.found.stages)
        ]
        return {
            "prefill_micro_batch": self.prefill,
            "decode_micro_batch": self.decode,
            "predicted_prefill_s": self.prefill_s,
            "predicted_decode_s": self.seconds - self.prefill_s,
            "predicted_s": self.seconds,
            "objective": found.objective,
            "loss_increase": found.loss_increase,
            "stages": stages,
        }


def plan_serving(
    costs: ServingCosts,
    loss_increase: Any,
    *,
    max_loss_increase: float | None,
    theta: float = 0.0,
) -> tuple[ServingPlan | None, dict[int, ServingPlan]]:
    """The best plan, and the best for each number of bits that all layers could share.

    Args:
        costs: prices, for the bits that may be chosen.
        loss_increase: [layers, bits] of those.
        max_loss_increase: limit of the sum; None: there is none.
        theta: seconds that a loss increase of 1 is worth.

    Returns:
        None, and leaves out bits, where nothing fits.
    """
    sizes = list(itertools.product(micro_batches(costs.work.prompts), repeat=2))
    limits: dict[str, Any] = {"theta": theta, "max_loss_increase": max_loss_increase}
    problems = [
        costs.problem(loss_increase, prefill=prefill, decode=decode, **limits)
        for prefill, decode in sizes
    ]

    def best(of: list[ServingProblem]) -> ServingPlan | None:
        answer = find_best(of)
        if answer is None:
            return None
        at, found = answer
        prefill, decode = sizes[at]
        return ServingPlan(prefill=prefill, decode=decode, problem=of[at], found=found)

    uniform = {bits: best([p.with_bits(bits) for p in problems]) for bits in costs.bits}
    return best(problems), {bits: plan for bits, plan in uniform.items() if plan is not None}


def check_bits(bits: Sequence[int]) -> None:
    """Refuses bits whose packed form differs between releases of compressed-tensors.

    Raises:
        UsageError: naming the flag.
    """
    if bad := [b for b in bits if b not in APPLIED]:
        raise UsageError(
            f"--apply writes 4, 8 and 16 bits, not {bad[0]}: releases of compressed-tensors pack "
            f"{bad[0]} bits in different ways; give --bits 4,8,16"
        )


def record_of(
    best: ServingPlan,
    uniform: dict[int, ServingPlan],
    costs: ServingCosts,
    *,
    limit: float | None,
    rounding: float,
) -> dict[str, Any]:
    """The answer in plain JSON types."""
    rivals = {
        str(bits): {
            "predicted_s": plan.seconds,
            "objective": plan.found.costs.objective,
            "loss_increase": plan.found.costs.loss_increase + rounding,
            "num_stages": len(plan.found.stages),
        }
        for bits, plan in uniform.items()
    }
    least = _least(uniform)
    plan = best.to_json(costs)
    plan["loss_increase"] += rounding
    return {
        "schema": SCHEMA,
        "note": NOT_MEASURED,
        "model": costs.model.name,
        "prompts": costs.work.prompts,
        "prompt": costs.work.prompt,
        "generate": costs.work.generate,
        "bits": list(costs.bits),
        "group_size": costs.group_size,
        "max_loss_increase": limit,
        **plan,
        "uniform": rivals,
        "best_uniform_bits": least,
        "times_faster_than_uniform": None
        if least is None
        else uniform[least].seconds / best.seconds,
    }


def _least(uniform: dict[int, ServingPlan]) -> int | None:
    """Bits of the best of some plans; of equally good ones those with the least loss."""
    if not uniform:
        return None
    limit = min(plan.found.costs.objective for plan in uniform.values()) * (1 + TOLERANCE)
    good = [bits for bits, plan in uniform.items() if plan.found.costs.objective <= limit]
    return min(good, key=lambda bits: uniform[bits].found.costs.loss_increase)


def table(record: dict[str, Any]) -> list[str]:
    lines = [f"{'layers':>9}  {'bits':<26}  {'prefill s':>9}  {'token s':>9}  {'GB':>15}  device"]
    for stage in record["stages"]:
        last = stage["first_layer"] + stage["num_layers"] - 1
        counts = Counter(stage["bits"])
        bits = ", ".join(f"{counts[b]} x {b}" for b in sorted(counts))
        held = f"{stage['bytes'] / 1e9:.3g} of {stage['capacity_bytes'] / 1e9:.3g}"
        lines.append(
            f"{stage['first_layer']:>4}-{last:<4}  {bits:<26}  {stage['prefill_s']:>9.4f}  "
            f"{stage['decode_s']:>9.5f}  {held:>15}  {stage['device']}"
        )
    limit = record["max_loss_increase"]
    within = "" if limit is None else f", limit {limit:g}"
    lines += [
        f"bits by layer: {' '.join(str(b) for s in record['stages'] for b in s['bits'])}",
        f"prompts of a micro-batch: {record['prefill_micro_batch']} in prefill, "
        f"{record['decode_micro_batch']} in decoding",
        f"predicted: {record['predicted_s']:.3f} s for the batch, "
        f"{record['predicted_prefill_s']:.3f} s of it prefill",
        f"loss increase: {record['loss_increase']:.5f} nats per token (sum of layers measured one "
        f"at a time{within})",
    ]
    if (bits := record["best_uniform_bits"]) is None:
        lines.append("no number of bits for all layers fits")
    else:
        rival = record["uniform"][str(bits)]
        lines.append(
            f"best with equal bits: {bits} bits, {rival['predicted_s']:.3f} s, loss increase "
            f"{rival['loss_increase']:.5f}; this plan is predicted "
            f"{record['times_faster_than_uniform']:.2f} x as fast"
        )
    return [*lines, f"note: {record['note']}"]


def applied_line(applied: dict[str, Any]) -> str:
    return (
        f"wrote {applied['folder']}: loss {applied['loss_before']:.5f} before, "
        f"{applied['loss_after']:.5f} after, increase {applied['loss_increase']:.5f} "
        f"(standard error {applied['standard_error']:.5f}), measured on the written weights"
    )
