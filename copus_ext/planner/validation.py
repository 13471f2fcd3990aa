"""Holds the planner against measured step times: reads a table, predicts, compares by group."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.context import CP_COMM_TYPES
from copus_ext.cost_model.correct import correct, most_telling
from copus_ext.cost_model.memory import (
    AS_PREDICTED,
    CONTEXT_BYTES,
    PeakCorrection,
    fit_probability,
    memory,
    peaks,
)
from copus_ext.cost_model.model_spec import PRESETS, ModelSpec
from copus_ext.cost_model.rows import Rows, concatenate
from copus_ext.cost_model.spec_file import SpecError, quantity
from copus_ext.cost_model.step import StepTime, step_time
from copus_ext.planner.configuration import RECOMPUTE, Configuration
from copus_ext.planner.profile import steps_of
from copus_ext.planner.search import MEMORY_MARGIN, Z_SURE
from copus_ext.planner.sharing import cp_comm_types_of
from copus_ext.planner.space import points_of, to_rows
from megatron.training.config.layout import Layout
from megatron.training.config.layout_rules import (
    ContextExchange,
    context_problems,
    expert_problems,
)

_SIZES = ("tp", "pp", "vpp", "ep", "cp", "micro_batch_size", "global_batch_size")
_LINKS = ("nic_bytes_per_s", "intra_bytes_per_s", "gpus_per_node", "nic_is_measured")
_OWN = (
    *("group", "cluster", "model", *_SIZES, "etp", "cp_comm_type", "recompute"),
    "sequence_parallel",
    *("scatter_gather", "use_distributed_optimizer", "overlap"),
    *("step_s", "out_of_memory", "peak_bytes", "local"),
    *_LINKS,
)
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A line of the table: what ran, and how it went."""

    group: str
    """Runs that are compared with each other."""
    model: ModelSpec
    """What was trained."""
    cluster: ClusterSpec
    """Where."""
    configuration: Configuration
    """How."""
    step_s: float | None
    """Seconds of a step; None if it was not timed."""
    out_of_memory: bool
    """Whether it ran out of memory."""
    peak_bytes: float | None
    """Memory that the GPU that needed most had in use at most; None if it was not measured."""
    scatter_gather: bool = False
    """As in `Rows`."""


def columns() -> tuple[str, ...]:
    """All columns that a table may have."""
    return (*_OWN, *(f.name for f in fields(ModelSpec) if f.name != "name"))


def read_table(path: Path) -> list[MeasuredRun]:
    """Reads a CSV file with a header. `docs/planner.md` describes the columns.

    Raises:
        OSError: it cannot be read.
        SpecError: an unknown column, or a value that makes no sense; line, column and fix.
    """
    try:
        return _read(path)
    except csv.Error as error:
        raise SpecError(f"it is no table: {error}") from error


def _read(path: Path) -> list[MeasuredRun]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file)
        unknown = sorted(set(table.fieldnames or ()) - {*columns()})
        if unknown:
            raise SpecError(f"unknown columns: {', '.join(map(str, unknown))}; remove them")
        found = []
        for record in table:
            try:
                found.append(_run(record, path.parent))
            except ValueError as error:
                raise SpecError(f"line {table.line_num}: {error}") from error
    if not found:
        raise SpecError("it holds no run; write one a line below the header")
    return found


def _run(record: dict[str, Any], folder: Path) -> MeasuredRun:
    if None in record or None in record.values():
        raise SpecError("it has another number of columns than the header")
    given = {name: value.strip() for name, value in record.items() if value.strip()}
    for name in ("cluster", "tp", "micro_batch_size", "global_batch_size"):
        if name not in given:
            raise SpecError(f"{name} is missing")
    links = tuple((name, given[name]) for name in _LINKS if name in given)
    cluster = _cluster(given["cluster"], links, folder)
    size = {name: _whole(name, given.get(name, "1")) for name in _SIZES}
    tp, pp, cp = size["tp"], size["pp"], size["cp"]
    if cluster.world_size % (tp * cp * pp):
        sizes = f"tp x cp x pp is {tp * cp * pp}" if cp > 1 else f"tp x pp is {tp * pp}"
        raise SpecError(f"{sizes} and does not divide {cluster.world_size} GPUs")
    dp = cluster.world_size // (tp * cp * pp)
    if size["global_batch_size"] % (dp * size["micro_batch_size"]):
        raise SpecError(f"global_batch_size is no multiple of {dp} x micro_batch_size")
    way, _, layers = given.get("recompute", "none").partition(":")
    if way not in RECOMPUTE or (way == "block") != layers.isdecimal():
        raise SpecError(f"recompute {given['recompute']}: use none, selective, full or block:3")
    step_s = float(given["step_s"]) if "step_s" in given else None
    if step_s is not None and not 0 < step_s < math.inf:
        raise SpecError(f"step_s {step_s} must be positive")
    model = _model(
        tuple(sorted((n, v) for n, v in given.items() if n not in _OWN or n in ("model", "local")))
    )
    if model.num_layers % (pp * size["vpp"]):
        raise SpecError(f"{model.num_layers} layers are no multiple of pp x vpp")
    etp = _whole("etp", given["etp"]) if "etp" in given else None
    layout = Layout(tp=tp, cp=cp, pp=pp, vpp=size["vpp"], ep=size["ep"], etp=etp, dp=dp)
    sizes = model.expert_sizes(is_gloo=cluster.is_gloo, use_tp_pp_dp_mapping=False)
    parallel = _flag("sequence_parallel", given, tp > 1)
    if problems := expert_problems(layout, sizes, sequence_parallel=parallel):
        raise SpecError(problems[0])
    form = _form(given.get("cp_comm_type"), model, cluster) if cp > 1 else None
    if problems := context_problems(
        layout,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.groups,
        seq_length=model.seq_length,
        sequence_parallel=parallel,
        exchange=ContextExchange(cp_comm_type=form),
    ):
        raise SpecError(problems[0])
    return MeasuredRun(
        group=given.get("group", f"{model.name} on {given['cluster']}, batch {given[_SIZES[-1]]}"),
        model=model,
        cluster=cluster,
        configuration=Configuration(
            layout=layout,
            cp_comm_type=form,
            micro_batch_size=size["micro_batch_size"],
            global_batch_size=size["global_batch_size"],
            recompute=way,  # pyright: ignore[reportArgumentType]
            recompute_num_layers=int(layers or 0),
            sequence_parallel=parallel,
            use_distributed_optimizer=_flag("use_distributed_optimizer", given, True),
            overlap=_flag("overlap", given, True),
        ),
        step_s=step_s,
        out_of_memory=_flag("out_of_memory", given, False),
        peak_bytes=_peak(given["peak_bytes"]) if "peak_bytes" in given else None,
        scatter_gather=_flag("scatter_gather", given, False),
    )


def _form(text: str | None, model: ModelSpec, cluster: ClusterSpec) -> str:
    """How ranks exchange keys and values; by default as the trainer does."""
    if text is None:
        return cp_comm_types_of(model, cluster)[0]
    if text not in CP_COMM_TYPES:
        raise SpecError(f"cp_comm_type {text}: use one of {', '.join(CP_COMM_TYPES)}")
    return text


def _peak(text: str) -> float:
    if not (peak := quantity(text)) > 0:
        raise SpecError(f"peak_bytes {text} must be positive")
    return peak


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise SpecError(f"{name} {text} must be a whole number from 1")
    return int(text)


def _flag(name: str, given: dict[str, str], default: bool) -> bool:
    text = given.get(name, "1" if default else "0").lower()
    if text not in (*_YES, *_NO):
        raise SpecError(f"{name} {text}: write 1 or 0")
    return text in _YES


@lru_cache(maxsize=256)
def _cluster(text: str, more: tuple[tuple[str, str], ...], folder: Path) -> ClusterSpec:
    spec = ClusterSpec.load(folder / text) if text.endswith(".json") else preset(text)
    values = dict(more)
    if "gpus_per_node" in values:
        per_node, size = _whole("gpus_per_node", values.pop("gpus_per_node")), spec.world_size
        if size % per_node:
            raise SpecError(f"gpus_per_node {per_node} does not divide {size} GPUs")
        spec = dataclasses.replace(spec, num_nodes=size // per_node, gpus_per_node=per_node)
    measured = _flag("nic_is_measured", values, spec.nic_is_measured)
    values.pop("nic_is_measured", None)
    given: dict[str, Any] = {name: quantity(value) for name, value in values.items()}
    return dataclasses.replace(spec, nic_is_measured=measured, **given)


@lru_cache(maxsize=256)
def _model(given: tuple[tuple[str, str], ...]) -> ModelSpec:
    values: dict[str, Any] = dict(given)
    name = values.pop("model", None)
    if "local" in values:
        if "implementation" in values:
            raise SpecError("local is implementation now; drop one of the two columns")
        values["implementation"] = "local" if _flag("local", values, False) else "te"
        del values["local"]
    kinds = {f.name: str(f.type) for f in fields(ModelSpec)}
    for field, text in values.items():
        if kinds[field].startswith("int"):
            values[field] = _whole(field, text) if text != "0" else 0
        elif kinds[field] == "bool":
            values[field] = _flag(field, {field: text}, False)
    if name is None or name not in PRESETS:
        return ModelSpec.from_json({**({"name": name} if name else {}), **values})
    return dataclasses.replace(PRESETS[name], **values)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What the planner says of every run of a table."""

    step_s: Any
    """[n] seconds."""
    relative_sd: Any
    """[n] standard deviation of its logarithm."""
    fits: Any
    """[n] whether it would be a candidate."""
    fit_probability: Any
    """[n] that it fits."""
    known: Any
    """[n] whether its measured time was used."""


def predict(
    runs: Sequence[MeasuredRun], *, num_known: int = 0, constants: Constants | None = None
) -> Predictions:
    """Predicts every run, from constants and, within each group, from some measured ones.

    Args:
        runs: of a table.
        num_known: timed runs of each group whose times correct the others.
        constants: of the cost model; None takes those that go with each cluster.
    """
    times = StepTime.unknown(len(runs))
    for at in _alike(runs).values():
        c = constants or runs[at[0]].cluster.load_constants()
        times.put(at, step_time(_rows([runs[i] for i in at]), c))
    step_s, known, sd = times.step_s.copy(), np.zeros(len(runs), dtype=bool), np.empty(len(runs))
    for at in groups(runs).values():
        steps = steps_of(points_of([runs[i].configuration for i in at]), times.take(at))
        timed = [j for j, i in enumerate(at) if runs[i].step_s is not None]
        chosen = [timed[j] for j in most_telling(steps.take(timed), num_known)]
        some = [at[j] for j in chosen]
        known[some] = True
        ratios = np.log([float(runs[i].step_s or 1.0) for i in some] / step_s[some])
        found = correct(steps, steps.take(chosen), ratios)
        step_s[at] *= found.factor
        sd[at] = found.relative_sd
    fits, likely = _memory(runs, known)
    return Predictions(
        step_s=step_s, relative_sd=sd, fits=fits, fit_probability=likely, known=known
    )


def _memory(runs: Sequence[MeasuredRun], known: Any) -> tuple[Any, Any]:
    """[n] whether each run would be a candidate, and the probability that it fits. Measured peaks
    of the runs that are known correct the others of their model and cluster."""
    fits, likely = np.zeros(len(runs), dtype=bool), np.empty(len(runs))
    for at in _alike(runs).values():
        seen = [runs[i] for i in at if known[i] and runs[i].peak_bytes is not None]
        correction = AS_PREDICTED
        if seen:
            measured = [run.peak_bytes for run in seen]
            correction = PeakCorrection.of(memory(_rows(seen)), measured)
        limit = runs[at[0]].cluster.gpu.memory_bytes * (1 - MEMORY_MARGIN)
        rows = _rows([runs[i] for i in at])
        peak, doubt = peaks(rows, context_bytes=CONTEXT_BYTES, correction=correction)
        # A candidate has room for experts of uneven load.
        most, sd = peak, doubt
        if rows.experts is not None:
            uneven = rows.unevenly_loaded()
            most, sd = peaks(uneven, context_bytes=CONTEXT_BYTES, correction=correction)
        fits[at] = most * np.exp(Z_SURE * sd) <= limit
        likely[at] = fit_probability(peak, limit, doubt)
    return fits, likely


def rows_of(runs: Sequence[MeasuredRun]) -> Rows:
    """Runs as the cost model sees them, in their order."""
    alike = list(_alike(runs).values())
    rows = concatenate([_rows([runs[i] for i in at]) for at in alike])
    return rows.take(np.argsort(np.concatenate(alike)))


def _rows(runs: Sequence[MeasuredRun]) -> Rows:
    """Runs of one model and cluster as the cost model sees them."""
    rows = to_rows(runs[0].model, runs[0].cluster, points_of([run.configuration for run in runs]))
    parallel = np.array([run.configuration.sequence_parallel for run in runs])
    scatter = np.array([run.scatter_gather for run in runs])
    return rows.change(sequence_parallel=parallel, scatter_gather=scatter).full()


def _alike(runs: Sequence[MeasuredRun]) -> dict[Any, list[int]]:
    """Indices of the runs by model and cluster."""
    found: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        found.setdefault((run.model, str(run.cluster.to_json())), []).append(i)
    return found


def groups(runs: Sequence[MeasuredRun]) -> dict[str, list[int]]:
    """Indices of the runs by group."""
    found: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        found.setdefault(run.group, []).append(i)
    return found


def judge(runs: Sequence[MeasuredRun], found: Predictions) -> dict[str, Any]:
    """How well the predictions agree with the table: of every group, and in all.

    Runs whose times were used count only for the choice of the best one.
    """
    by_group = {name: _judge_group(runs, found, at) for name, at in groups(runs).items()}
    asked = [i for i, run in enumerate(runs) if run.step_s is not None and not found.known[i]]
    ran = np.array([run.step_s is not None for run in runs])
    failed = np.array([run.out_of_memory for run in runs])
    in_all: dict[str, Any] = {"runs": len(runs), "groups": len(by_group)}
    if asked:
        logs = np.log([float(runs[i].step_s or 1.0) for i in asked] / found.step_s[asked])
        in_all |= _errors(logs)
        in_all["within_one_sd"] = float(np.mean(np.abs(logs) <= found.relative_sd[asked]))
    for name, reduce in (("mean", np.mean), ("worst", np.min)):
        values = [g["kendall_tau"] for g in by_group.values() if g["kendall_tau"] is not None]
        in_all[f"{name}_kendall_tau"] = float(reduce(values)) if values else None
    regrets = [g["regret"] for g in by_group.values() if g["regret"] is not None]
    in_all["mean_regret"] = float(np.mean(regrets)) if regrets else None
    in_all["worst_regret"] = float(np.max(regrets)) if regrets else None
    best = [g["best_fits"] for g in by_group.values() if g["best_fits"] is not None]
    in_all["best_fits"] = float(np.mean(best)) if best else None
    in_all["false_alarms"] = float(np.mean(~found.fits[ran])) if ran.any() else None
    in_all["out_of_memory_recall"] = float(np.mean(~found.fits[failed])) if failed.any() else None
    sure = failed & (found.fit_probability >= 0.99)
    in_all["failed_but_sure_to_fit"] = float(np.mean(sure[failed])) if failed.any() else None
    return {"in_all": in_all, "groups": by_group}


def _judge_group(
    runs: Sequence[MeasuredRun], found: Predictions, at: Sequence[int]
) -> dict[str, Any]:
    timed = np.array([i for i in at if runs[i].step_s is not None], dtype=int)
    group: dict[str, Any] = {"runs": len(at), "kendall_tau": None, "regret": None}
    group |= {"best_fits": None, "mean": None, "median": None, "bias": None}
    if not len(timed):
        return group
    seconds = np.array([float(runs[i].step_s or 1.0) for i in timed])
    predicted, asked = found.step_s[timed], ~found.known[timed]
    if asked.any():
        group |= _errors(np.log(seconds / predicted)[asked])
    if asked.sum() > 2:
        group["kendall_tau"] = kendall_tau(predicted[asked], seconds[asked])
    group["best_fits"] = bool(found.fits[timed[np.argmin(seconds)]])
    fits = found.fits[timed]
    if len(timed) > 1 and fits.any():
        choice = np.argmin(np.where(fits, predicted, np.inf))
        group["regret"] = float(seconds[choice] / seconds.min() - 1)
    return group


def _errors(logs: Any) -> dict[str, float]:
    """Relative errors of predictions, from ln(measured / predicted)."""
    relative = np.exp(-np.asarray(logs)) - 1
    size = np.abs(relative)
    named = {"mean": size.mean(), "median": np.median(size), "bias": relative.mean()}
    return {name: float(value) for name, value in named.items()}


def kendall_tau(a: Any, b: Any) -> float | None:
    """Pairs in the same order less those in the other, over both; None where none differ."""
    i, j = np.triu_indices(len(a), 1)
    agree = np.sign(a[i] - a[j]) * np.sign(b[i] - b[j])
    differ = int(np.count_nonzero(agree))
    return float(agree.sum() / differ) if differ else None
