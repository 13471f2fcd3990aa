"""What a user knows of runs: times and out-of-memory of profiles, and those given by hand."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.arithmetic import flops_per_sample, least_step_s, peak_flops
from copus_ext.planner.attempts import Attempts
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.explain import check_block, reason
from copus_ext.planner.profile import ProfileStore, Timing, read_profile
from copus_ext.planner.request import InputProblem, UsageProblem, configuration_of, with_unit
from copus_ext.planner.space import LEGAL, REJECTION_CODES, Limits, judge, points_of

OfOthers = list[tuple[ModelSpec, list[Timing]]]


def profiles_of(
    paths: Sequence[Path], model: ModelSpec, cluster: ClusterSpec
) -> tuple[list[Timing], list[Configuration], OfOthers]:
    """What profiles of such a cluster hold: the times of this model, what of it ran out of memory,
    and the times of other models.

    Raises:
        InputProblem: a file that is no profile, or one of another cluster.
    """
    own: list[Timing] = []
    lacked: list[Configuration] = []
    others: OfOthers = []
    for path in paths:
        try:
            machine, timings = read_profile(path)
            theirs = ModelSpec.from_json(machine.get("model", {}))
            theirs.check_predictable()
        except (OSError, ValueError, TypeError, SpecError) as error:
            raise InputProblem(f"--profile {path}: {error}") from error
        measured = machine.get("world_size"), machine.get("gpu")
        if measured != (cluster.world_size, cluster.gpu.name):
            raise InputProblem(
                f"--profile {path} was measured on {measured[0]} x {measured[1]} and the cluster "
                f"is {cluster.world_size} x {cluster.gpu.name}; measure there"
            )
        if dataclasses.replace(theirs, name=model.name) == model:
            own += timings
            lacked += _too_large(ProfileStore(path, machine), cluster.world_size)
        else:
            others.append((theirs, timings))
    ran = {timing.configuration.line for timing in own}
    return own, [c for c in lacked if c.line not in ran], others


def _too_large(store: ProfileStore, world_size: int) -> list[Configuration]:
    """What ran out of memory, with as many micro-batches as are measured at most
    (`profile_layouts.counts`): the bytes of fewer are no more.

    Raises:
        InputProblem: an attempt at what is no configuration.
    """
    found = []
    for text, size in Attempts(store).too_large:
        try:
            c = configuration_of(text, global_batch_size=1, world_size=world_size)
        except UsageProblem as error:
            raise InputProblem(f"--profile {store.path}: {error}") from error
        c = dataclasses.replace(c, micro_batch_size=size)
        found.append(c.with_num_microbatches(2 * max(c.layout.pp, 2)))
    return found


def measured_of(
    texts: Sequence[str],
    batch: int,
    model: ModelSpec,
    cluster: ClusterSpec,
    limits: Limits,
    now: Callable[[], Configuration] | None = None,
) -> tuple[list[Timing], list[Configuration]]:
    """Runs that were measured by hand, of one global batch: `CONFIG: 18.2 s` (or ms, TFLOP/s of a
    GPU, or % of its peak), `CONFIG: 18.2 s, 62 GiB` or `CONFIG: oom`. What ran, and what ran out of
    memory. What CONFIG does not say is as in the search.

    Args:
        texts: one for each run.
        batch: samples of a step.
        model: what ran.
        cluster: where.
        limits: of the search.
        now: names the configuration of a text without CONFIG; None where nothing does.

    Raises:
        UsageProblem: another text, or what cannot have run.
    """
    gpu_bytes = math.inf if cluster.is_gloo else cluster.gpu.memory_bytes
    ran: list[Timing] = []
    lacked: list[Configuration] = []
    for text in texts:
        name, _, told = text.rpartition(":")
        if name.strip():
            c = configuration_of(
                name.strip(),
                global_batch_size=batch,
                world_size=cluster.world_size,
                overlap=limits.overlap,
                use_tp_pp_dp_mapping=limits.use_tp_pp_dp_mapping,
                sequence_parallel=limits.sequence_parallel,
            )
        elif now is not None:
            c = now()
        else:
            how = f"write 'CONFIG: {told.strip()}' with CONFIG as an answer prints it, for example"
            raise UsageProblem(f"--measured {text} names no configuration; {how} tp2.pp4")
        if limits.round_down:
            c = _rounded_down(c)
        if problem := _why_illegal(model, cluster, c):
            raise UsageProblem(f"--measured {text}: {problem}")
        if told.strip().lower() == "oom":
            lacked.append(c)
            continue
        seconds, _, peak = (part.strip() for part in told.partition(","))
        try:
            most = peak_flops(model, cluster)
            whole_s = flops_per_sample(model) * batch / cluster.world_size / most
            step_s = _seconds(seconds, whole_s, 0.0 if cluster.is_gloo else most)
            peak_bytes = with_unit("--measured", peak) if peak else None
        except (ValueError, ZeroDivisionError, SpecError, UsageProblem):
            step_s, peak_bytes = 0.0, None
        if not 0 < step_s < math.inf or peak_bytes == 0:
            how = "write CONFIG: 18.2 s, or 18200 ms, 310 TFLOP/s (of a GPU), 45 % (MFU), "
            how += "or CONFIG: 18.2 s, 62 GiB, or CONFIG: oom"
            raise UsageProblem(f"--measured {text}: {how}")
        if peak_bytes is not None and peak_bytes > gpu_bytes:
            raise UsageProblem(f"--measured {text}: a GPU has {gpu_bytes / 2**30:.1f} GiB")
        least_s = float(least_step_s(model, cluster, points_of([c]))[0])
        if least_s > step_s:
            how = " with layers computed again" if c.recompute in ("full", "block") else ""
            raise UsageProblem(
                f"--measured {text}: {100 * least_s / step_s:.0f} % of the arithmetic that the "
                f"GPUs can do at most; no step of batch {c.global_batch_size}{how} is shorter than "
                f"{_rounded_up(least_s)} there"
            )
        ran.append(Timing(configuration=c, step_s=step_s, peak_bytes=peak_bytes))
    for c in {timing.configuration for timing in ran} & {*lacked}:
        raise UsageProblem(f"--measured {c}: it ran, and it ran out of memory; drop one")
    return ran, lacked


def with_text(
    texts: Sequence[str], ran: Sequence[Timing], lacked: Sequence[Configuration]
) -> list[tuple[str, Configuration]]:
    """The texts of `measured_of`, each with the configuration that it was taken for."""
    times, others = iter(ran), iter(lacked)
    is_oom = [text.rpartition(":")[2].strip().lower() == "oom" for text in texts]
    return [
        (t, next(others) if oom else next(times).configuration) for t, oom in zip(texts, is_oom)
    ]


def taken_for(reported: Sequence[tuple[str, Configuration]]) -> str:
    """What runs were taken for that name a configuration without its recomputation or its zero;
    empty where all say both."""
    found = []
    for text, c in reported:
        name = text.rpartition(":")[0]
        words = [x for x in str(c).split(",") if x.startswith(("recompute=", "zero="))]
        lacks = [x for x in words if f"{x.partition('=')[0]}=" not in name]
        found += [f"{name.strip()} as {','.join(lacks)}"] if name.strip() and lacks else []
    what = "; ".join(dict.fromkeys(found))
    return f"--measured takes {what}; write them in CONFIG if the run had others" if what else ""


_SHARE = re.compile(r"(?:mfu )?([\d.]+) ?%(?: mfu)?")
_RATE = re.compile(r"([\d.]+) ?tflops?(?:/s)?(?:/gpu)?")


def _seconds(text: str, whole_s: float, peak: float) -> float:
    """A time with its unit, s or ms; a number alone is seconds. Or what Megatron-LM logs in its
    place: TFLOP/s of a GPU, or a share of its peak.

    Args:
        text: as given.
        whole_s: of a step at the peak; 0 where there is none.
        peak: of a GPU, FLOP/s.

    Raises:
        ValueError: another text.
    """
    if share := _SHARE.fullmatch(text.lower()):
        return 100 * whole_s / float(share[1])
    if rate := _RATE.fullmatch(text.lower()):
        return whole_s * peak / (1e12 * float(rate[1]))
    text, is_ms = text.removesuffix("s"), text.endswith("ms")
    return float(text.removesuffix("m")) / 1000 if is_ms else float(text)


def _rounded_up(seconds: float) -> str:
    """With three digits, and not less."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return f"{math.ceil(seconds / unit) * unit:.3g} s"


def _rounded_down(c: Configuration) -> Configuration:
    """With the batch that the trainer takes under --decrease-batch-size-if-needed."""
    unit = c.layout.batch_unit * c.micro_batch_size
    batch = c.global_batch_size // unit * unit
    return dataclasses.replace(c, global_batch_size=batch) if batch else c


def _why_illegal(model: ModelSpec, cluster: ClusterSpec, c: Configuration) -> str:
    """Why megatron-core does not run a configuration; empty where it does. Tensor parallelism over
    nodes is slow, and no more than that."""
    at = c.layout
    if model.num_experts is None and (at.ep > 1 or at.etp is not None):
        return f"{model.name} has no experts; drop ep and etp"
    judged = judge(model, cluster, points_of([c]), Limits(cross_node_tp=True))
    if (code := int(judged.code[0])) != LEGAL:
        return "; ".join(reason(REJECTION_CODES[code], model, c))
    if c.recompute == "block":
        try:
            check_block(model, c)
        except SpecError as error:
            return str(error)
    return ""
