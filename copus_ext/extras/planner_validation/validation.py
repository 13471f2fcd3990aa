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
from copus_ext.cost_model.correct import correct, most_informative
from copus_ext.cost_model.memory import memory, peaks
from copus_ext.cost_model.model_spec import ATTENTION, ModelSpec
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.peak_correction import (
    AS_PREDICTED,
    PeakCorrection,
    max_bytes,
)
from copus_ext.cost_model.rows import ConfigBatch, concatenate
from copus_ext.cost_model.spec_file import SpecError, quantity
from copus_ext.cost_model.step import StepTime, step_time
from copus_ext.planner.configuration import RECOMPUTE, Configuration
from copus_ext.planner.equals import MAY_FIT, in_order, rarities
from copus_ext.planner.profile import steps_of
from copus_ext.planner.search import MEMORY_MARGIN, Z_SURE
from copus_ext.planner.sharing import cp_comm_types_of
from copus_ext.planner.space import points_of, to_config_batch
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import (
    ContextExchange,
    context_problems,
    expert_problems,
)

_SIZES = ("tp", "pp", "vpp", "ep", "cp", "micro_batch_size", "global_batch_size")
_LINKS = ("nic_bytes_per_s", "intra_bytes_per_s", "gpus_per_node", "nic_is_measured")
_OWN = (
    *("group", "cluster", "model", *_SIZES, "etp", "cp_comm_type", "recompute"),
    "sequence_parallel",
    *("scatter_gather", "tp_overlap", "use_distributed_optimizer", "overlap"),
    *("step_s", "out_of_memory", "peak_bytes", "known", "local", "attention"),
    *_LINKS,
)
_SHORT = ("local", "attention")
"""Columns that stand for fields of `ModelSpec`."""
_NO_COLUMNS = ("name", "implementation_given")
_SAYS_IMPLEMENTATION = ("implementation", "local", "norm", "logits_sharded", "logits_bytes")
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A line of the table: what ran, and how it went."""

    group: str
    """Runs that are compared with each other."""
    model: ModelSpec
    """What was trained."""
    cluster: ClusterSpec
    configuration: Configuration
    step_s: float | None
    """Seconds of a step; None if it was not timed."""
    out_of_memory: bool
    """Whether it ran out of memory."""
    peak_bytes: float | None
    """Memory that the GPU that needed most had in use at most; None if it was not measured."""
    scatter_gather: bool | None = None
    """As in `ConfigBatch`; None: by the model's implementation."""
    tp_overlap: bool = True
    """As in `ConfigBatch`."""
    known: bool = False
    """Whether its outcome may correct the others in any case."""


def columns() -> tuple[str, ...]:
    return (*_OWN, *(f.name for f in fields(ModelSpec) if f.name not in _NO_COLUMNS))


def read_table(path: Path) -> list[MeasuredRun]:
    """Reads a CSV file with a header. `docs/validate-planner.md` describes the columns.

    Raises:
        OSError: it cannot be read.
        SpecError: an unknown column, or a value that makes no sense; line, column and fix.
    """
    try:
        return _read(path)
    except csv.Error as error:
        raise SpecError(f"it is not a table: {error}") from error


def _read(path: Path) -> list[MeasuredRun]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file)
        unknown = sorted(set(table.fieldnames or ()) - {*columns()})
        if unknown:
            raise SpecError(f"unknown columns: {', '.join(map(str, unknown))}; remove them")
        found: list[MeasuredRun] = []
        names: dict[str, str] = {}
        for record in table:
            try:
                found.append(_run(record, path.parent, names))
            except ValueError as error:
                raise SpecError(f"line {table.line_num}: {error}") from error
    if not found:
        raise SpecError("it holds no run; write one a line below the header")
    return found


def _run(record: dict[str, Any], folder: Path, names: dict[str, str]) -> MeasuredRun:
    """The run of a line; `names` are those of clusters, by what they hold."""
    if None in record or None in record.values():
        raise SpecError("it has another number of columns than the header")
    given = {name: value.strip() for name, value in record.items() if value.strip()}
    for name in ("cluster", "tp", "micro_batch_size", "global_batch_size"):
        if name not in given:
            raise SpecError(f"{name} is missing")
    links = tuple((name, given[name]) for name in _LINKS if name in given)
    cluster = _cluster(given["cluster"], links, folder)
    where = given["cluster"] + "".join(f" {name}={value}" for name, value in links)
    # One machine has several names, and links may be written in several units.
    where = names.setdefault(str(cluster.to_json()), where)
    size = {name: _whole(name, given.get(name, "1")) for name in _SIZES}
    tp, pp, cp = size["tp"], size["pp"], size["cp"]
    if cluster.world_size % (tp * cp * pp):
        sizes = f"tp x cp x pp is {tp * cp * pp}" if cp > 1 else f"tp x pp is {tp * pp}"
        raise SpecError(f"{sizes} and does not divide {cluster.world_size} GPUs")
    dp = cluster.world_size // (tp * cp * pp)
    if size["global_batch_size"] % (dp * size["micro_batch_size"]):
        raise SpecError(f"global_batch_size is not a multiple of {dp} x micro_batch_size")
    way, _, layers = given.get("recompute", "none").partition(":")
    if way not in RECOMPUTE or (way == "block") != layers.isdecimal():
        raise SpecError(f"recompute {given['recompute']}: use none, selective, full or block:3")
    step_s = float(given["step_s"]) if "step_s" in given else None
    if step_s is not None and not 0 < step_s < math.inf:
        raise SpecError(f"step_s {step_s} must be positive")
    model = _model(
        tuple(sorted((n, v) for n, v in given.items() if n not in _OWN or n in ("model", *_SHORT)))
    )
    group = given.get("group", _usual_group(model, given, where))
    chunks = pp * size["vpp"]
    if model.num_layers % chunks:
        # A pipeline is as slow as its longest stage.
        model = dataclasses.replace(model, num_layers=-(-model.num_layers // chunks) * chunks)
    etp = _whole("etp", given["etp"]) if "etp" in given else None
    layout = Layout(tp=tp, cp=cp, pp=pp, vpp=size["vpp"], ep=size["ep"], etp=etp, dp=dp)
    shape = model.shape()
    only_allgather = cluster.is_gloo and model.moe_token_dispatcher_type == "alltoall"
    parallel = _flag("sequence_parallel", given, tp > 1)
    if problems := expert_problems(
        layout, shape, sequence_parallel=parallel, only_allgather_over_both=only_allgather
    ):
        raise SpecError(problems[0])
    form = _form(given.get("cp_comm_type"), model, cluster) if cp > 1 else None
    if problems := context_problems(
        layout,
        shape,
        seq_length=model.seq_length,
        sequence_parallel=parallel,
        exchange=ContextExchange(cp_comm_type=form),
    ):
        raise SpecError(problems[0])
    return MeasuredRun(
        group=group,
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
        scatter_gather=_flag("scatter_gather", given, False) if "scatter_gather" in given else None,
        tp_overlap=_flag("tp_overlap", given, True),
        known=_flag("known", given, False),
    )


def _usual_group(model: ModelSpec, given: dict[str, str], where: str) -> str:
    """Runs of one model and batch on one machine are compared."""
    shape = f"{model.name} {model.num_layers} x {model.hidden_size}, {model.seq_length} tokens"
    return f"{shape}, on {where}, batch {given['global_batch_size']}"


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
    if (kind := values.pop("attention", None)) is not None:
        if kind not in ATTENTION:
            raise SpecError(f"attention {kind!r} is none of {', '.join(ATTENTION)}")
        if both := sorted({*ATTENTION[kind]} & {*values}):
            raise SpecError(f"attention and {both[0]} say the same; drop one of the two columns")
    kinds = {f.name: str(f.type) for f in fields(ModelSpec)}
    for field, text in values.items():
        if kinds[field].startswith("int"):
            values[field] = _whole(field, text) if text != "0" else 0
        elif kinds[field].startswith("bool"):
            values[field] = _flag(field, {field: text}, False)
    values |= ATTENTION.get(kind or "", {})
    values["implementation_given"] = bool({*_SAYS_IMPLEMENTATION} & {name for name, _ in given})
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
    peak_bytes: Any
    """[n] of the GPU that needs most."""
    peak_relative_sd: Any
    """[n] relative uncertainty of those."""
    rare: Any
    """[n] of `equals.rarities`."""
    known: Any
    """[n] whether its outcome was used."""


def predict(
    runs: Sequence[MeasuredRun], *, num_known: int = 0, constants: Constants | None = None
) -> Predictions:
    """Predicts every run, from constants and, within each group, from some measured ones.

    Args:
        num_known: timed runs of each group whose outcomes correct the others, besides those that
            the table itself calls known.
        constants: of the cost model; None takes those that go with each cluster.
    """
    times, kinds = StepTime.unknown(len(runs)), _kinds(runs)
    for at in _alike(runs).values():
        c = constants or runs[at[0]].cluster.load_constants()
        times.put(at, step_time(_rows([runs[i] for i in at]), c))
    step_s, sd, rare = times.step_s.copy(), *(np.empty(len(runs)) for _ in range(2))
    known = np.array([run.known for run in runs])
    for at in groups(runs).values():
        points = points_of([runs[i].configuration for i in at])
        steps, rare[at] = steps_of(points, times.take(at)), rarities(runs[at[0]].model, points)
        # Equal layouts of unlike kernels are no equal configurations.
        steps = dataclasses.replace(steps, keys=np.column_stack([steps.keys, kinds[at]]))
        timed = [j for j, i in enumerate(at) if runs[i].step_s is not None]
        chosen, others = ([j for j in timed if runs[at[j]].known is way] for way in (True, False))
        told = most_informative(steps.take(others), num_known, known=steps.take(chosen))
        chosen += [others[j] for j in told]
        some = [at[j] for j in chosen]
        known[some] = True
        ratios = np.log([float(runs[i].step_s or 1.0) for i in some] / step_s[some])
        found = correct(steps, steps.take(chosen), ratios)
        step_s[at] *= found.factor
        sd[at] = found.relative_sd
    rare = np.where(known, 0.0, rare)
    about = {"rare": rare, "known": known, **_memory(runs, known)}
    return Predictions(step_s=step_s, relative_sd=sd, **about)


def _kinds(runs: Sequence[MeasuredRun]) -> Any:
    """[n, 3] numbers of the model, its kernels included, on its machine, and of how messages are
    sent."""
    number = np.empty(len(runs), dtype=np.int64)
    for i, at in enumerate(_alike(runs).values()):
        number[at] = i
    sent = [[bool(run.scatter_gather), run.tp_overlap] for run in runs]
    return np.column_stack([number, sent])


def _peak_correction(runs: Sequence[MeasuredRun]) -> PeakCorrection:
    """What known runs of one model and cluster say of the memory: measured peaks, and that a run
    had enough or lacked some."""
    if not runs:
        return AS_PREDICTED
    size = runs[0].cluster.gpu.memory_bytes
    return PeakCorrection.of(
        memory(_rows(runs)),
        [math.nan if run.peak_bytes is None else run.peak_bytes for run in runs],
        at_most=[math.inf if run.out_of_memory else size for run in runs],
        at_least=[size if run.out_of_memory else -math.inf for run in runs],
    )


def _memory(runs: Sequence[MeasuredRun], known: Any) -> dict[str, Any]:
    """Fields of `Predictions` on memory. Runs that are known correct the others of their model and
    cluster, and nothing is asked of them: who ran, fits."""
    num = len(runs)
    fits, likely, needs, sds = np.zeros(num, dtype=bool), *(np.empty(num) for _ in range(3))
    for at in _alike(runs).values():
        correction = _peak_correction([runs[i] for i in at if known[i]])
        limit = runs[at[0]].cluster.gpu.memory_bytes * (1 - MEMORY_MARGIN)
        rows = _rows([runs[i] for i in at])
        peak, doubt = peaks(rows, correction=correction)
        needs[at], sds[at] = peak, doubt
        # A candidate has room for experts of uneven load.
        most, sd = peak, doubt
        if rows.experts is not None:
            uneven = rows.unevenly_loaded()
            most, sd = peaks(uneven, correction=correction)
        fits[at] = max_bytes(most, sd, Z_SURE) <= limit
        likely[at] = correction.fit_probability(peak, limit, doubt)
    ran = np.array([not run.out_of_memory for run in runs])
    return {
        "fits": np.where(known, ran, fits),
        "fit_probability": np.where(known, ran.astype(float), likely),
        "peak_bytes": needs,
        "peak_relative_sd": sds,
    }


def rows_of(runs: Sequence[MeasuredRun]) -> ConfigBatch:
    """Runs as the cost model sees them, in their order."""
    alike = list(_alike(runs).values())
    rows = concatenate([_rows([runs[i] for i in at]) for at in alike])
    return rows.take(np.argsort(np.concatenate(alike)))


def _rows(runs: Sequence[MeasuredRun]) -> ConfigBatch:
    """Runs of one model and cluster as the cost model sees them."""
    rows = to_config_batch(
        runs[0].model, runs[0].cluster, points_of([run.configuration for run in runs])
    )
    usual = bool(rows.scatter_gather)
    scatter = [usual if run.scatter_gather is None else run.scatter_gather for run in runs]
    overlap = np.array([run.tp_overlap for run in runs])
    return rows.change(scatter_gather=np.array(scatter), tp_overlap=overlap).full()


def _alike(runs: Sequence[MeasuredRun]) -> dict[Any, list[int]]:
    """Indices of the runs by model and cluster."""
    found: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        key = run.model, run.model.implementation_given, str(run.cluster.to_json())
        found.setdefault(key, []).append(i)
    return found


def groups(runs: Sequence[MeasuredRun]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        found.setdefault(run.group, []).append(i)
    return found


def judge(runs: Sequence[MeasuredRun], found: Predictions) -> dict[str, Any]:
    """How well the predictions agree with the table: of every group, and in all.

    Runs whose outcomes were used count only for the choice of the best one.
    """
    by_group = {name: _judge_group(runs, found, at) for name, at in groups(runs).items()}
    asked = [i for i, run in enumerate(runs) if run.step_s is not None and not found.known[i]]
    ran = np.array([run.step_s is not None for run in runs]) & ~found.known
    failed = np.array([run.out_of_memory for run in runs]) & ~found.known
    in_all: dict[str, Any] = {"runs": len(runs), "groups": len(by_group)}
    if asked:
        logs = np.log([float(runs[i].step_s or 1.0) for i in asked] / found.step_s[asked])
        in_all |= _errors(logs)
        in_all["within_one_sd"] = float(np.mean(np.abs(logs) <= found.relative_sd[asked]))
    in_all |= _peak_errors(runs, found)
    for name, reduce in (("mean", np.mean), ("worst", np.min)):
        values = [g["kendall_tau"] for g in by_group.values() if g["kendall_tau"] is not None]
        in_all[f"{name}_kendall_tau"] = float(reduce(values)) if values else None
    regrets = [g["regret"] for g in by_group.values() if g["regret"] is not None]
    in_all["mean_regret"] = float(np.mean(regrets)) if regrets else None
    in_all["worst_regret"] = float(np.max(regrets)) if regrets else None
    for name in ("best_fits", "best_shown"):
        best = [g[name] for g in by_group.values() if g[name] is not None]
        in_all[name] = float(np.mean(best)) if best else None
    in_all["false_alarms"] = float(np.mean(~found.fits[ran])) if ran.any() else None
    in_all["out_of_memory_recall"] = float(np.mean(~found.fits[failed])) if failed.any() else None
    sure = failed & (found.fit_probability >= 0.99)
    in_all["failed_but_sure_to_fit"] = float(np.mean(sure[failed])) if failed.any() else None
    return {"in_all": in_all, "groups": by_group}


def _peak_errors(runs: Sequence[MeasuredRun], found: Predictions) -> dict[str, float]:
    """Errors of predicted peaks; empty where none was measured."""
    at = [i for i, x in enumerate(runs) if x.peak_bytes is not None and not found.known[i]]
    if not at:
        return {}
    logs = np.log([float(runs[i].peak_bytes or 1.0) for i in at] / found.peak_bytes[at])
    named = {f"peak_{name}": value for name, value in _errors(logs).items()}
    return named | {
        "peak_within_one_sd": float(np.mean(np.abs(logs) <= found.peak_relative_sd[at]))
    }


def _judge_group(
    runs: Sequence[MeasuredRun], found: Predictions, at: Sequence[int]
) -> dict[str, Any]:
    timed = np.array([i for i in at if runs[i].step_s is not None], dtype=int)
    group: dict[str, Any] = {"runs": len(at), "kendall_tau": None, "regret": None}
    group |= {"best_fits": None, "best_shown": None, "mean": None, "median": None, "bias": None}
    if not len(timed):
        return group
    seconds = np.array([float(runs[i].step_s or 1.0) for i in timed])
    predicted, asked = found.step_s[timed], ~found.known[timed]
    if asked.any():
        group |= _errors(np.log(seconds / predicted)[asked])
    if asked.sum() > 2:
        group["kendall_tau"] = kendall_tau(predicted[asked], seconds[asked])
    best = timed[np.argmin(seconds)]
    group["best_fits"] = bool(found.fits[best])
    group["best_shown"] = bool(found.fits[best] or found.fit_probability[best] >= MAY_FIT)
    fits = np.flatnonzero(found.fits[timed])
    if len(timed) > 1 and len(fits):
        choice = fits[in_order(predicted[fits], found.rare[timed][fits])[0]]
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
