"""Ranks the whole space of configurations by predicted throughput, for many global batches at once.

Order of work: rules, bytes, pruning (`prune_dominated`), a lower bound of the time, then the exact
simulation of those that could still be among the best. The ranking is that of simulating all that
no other dominates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.constants import Constants, PartFactors
from copus_ext.cost_model.memory import FRAGMENTATION, head_bytes, memory, peaks
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.peak_correction import (
    AS_PREDICTED,
    KINDS,
    PeakCorrection,
    max_bytes,
)
from copus_ext.cost_model.rows import ConfigBatch
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.cost_model.step import PARTS, StepTime, min_step_s, step_time
from copus_ext.planner import known_peaks
from copus_ext.planner.arithmetic import flops_per_sample, peak_flops
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.equals import EQUAL, in_order, may_fit, rarities, worth_trying
from copus_ext.planner.explain import check_block, rejected
from copus_ext.planner.plan import Plan, Prediction, Ranked, Rejected
from copus_ext.planner.profile import Measured, Timing
from copus_ext.planner.pruning import least_bytes, prune_dominated
from copus_ext.planner.space import (
    LEGAL,
    REJECTION_CODES,
    Candidates,
    Limits,
    enumerate_points,
    fastest_of,
    joined,
    points_of,
    to_config_batch,
)

MEMORY, DOMINATED = REJECTION_CODES.index("memory"), REJECTION_CODES.index("dominated")
MEMORY_MARGIN = 0.04
"""Share of a GPU's memory that is left alone."""
_SPACES_KEPT = 4
Z_SURE, Z_DOMINATES = 1.2816, 2.3263
"""Standard deviations below the limit that a candidate needs, and one that prunes others: 90 and
99 % where peaks were measured, 80 and 94 % where none was (`PeakCorrection.fit_probability`)."""


@dataclass(kw_only=True)
class _Space:
    """What a search over some batches starts from."""

    points: Candidates
    """All points, with their codes."""
    fits: Any
    """[n] which of them are candidates."""
    peaks: Any
    """[n] bytes of the legal ones, at least."""
    likely: Any
    """[n] probability of those rejected for memory to fit after all; 0 of the others."""
    times: StepTime | None = None
    """Raw predictions of all candidates, once they were needed."""

    @functools.cached_property
    def candidates(self) -> Candidates:
        return self.points.take(np.flatnonzero(self.fits))


class Planner:
    """Searches the space of one model on one cluster.

    Args:
        model: what is trained.
        cluster: on what.
        constants: of the cost model; None takes the ones that go with the cluster.
        limits: what to leave out.
        memory_margin: share of a GPU's memory left alone.
        timings: what was measured; beats predictions, and corrects those of its kin.
        too_large: configurations that ran out of the memory of a GPU.
        of_others: times of other models on this machine, which correct those of this one.

    Raises:
        SpecError: a model that the cost model does not know.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        *,
        constants: Constants | None = None,
        limits: Limits | None = None,
        memory_margin: float = MEMORY_MARGIN,
        timings: Sequence[Timing] = (),
        too_large: Sequence[Configuration] = (),
        of_others: Sequence[tuple[ModelSpec, Sequence[Timing]]] = (),
    ) -> None:
        model.check_predictable()
        self.model, self.cluster = model, cluster
        self.constants = constants or cluster.load_constants()
        self.limits = limits or Limits()
        self.memory_margin = memory_margin
        # Any of the nodes may get any stage.
        memory = min((node.gpu.memory_bytes for node in cluster.nodes), default=None)
        self.limit_bytes = (memory or cluster.gpu.memory_bytes) * (1 - memory_margin)
        self._space: dict[Any, _Space] = {}
        self.peaks, self.too_large = AS_PREDICTED, tuple(too_large)
        self.retime(timings, of_others=of_others)

    def safe_bytes(self, configuration: Configuration) -> float:
        """Largest predicted peak with which a configuration is a candidate, by the doubt of its own
        peak. A run that dies of a wrong "fits" costs more than one that is slower by a few
        percent. One that is known to fit is a candidate anyway."""
        points = points_of([configuration])
        rows = to_config_batch(self.model, self.cluster, points).unevenly_loaded()
        (peak,), (sd,) = self.peaks_of(rows)
        safe = self.limit_bytes / max_bytes(1.0, float(sd), Z_SURE)
        return max(safe, float(peak)) if known_peaks.known_to_fit(self, points)[0] else safe

    def retime(
        self,
        timings: Sequence[Timing],
        earlier: Sequence[Timing] = (),
        peaks: Sequence[Timing] = (),
        of_others: Sequence[tuple[ModelSpec, Sequence[Timing]]] = (),
    ) -> None:
        """Takes other measured times, those of an earlier time and of other models apart, and peaks
        of memory without their times. What the space is made of stays, unless the memory says
        otherwise."""
        known = timings, earlier, of_others
        self._measured = Measured(self.model, self.cluster, self.constants, *known)
        self.set_peaks(known_peaks.correction_of(self, [*timings, *earlier, *peaks]))

    def set_peaks(self, peaks: PeakCorrection) -> None:
        """Takes another correction of the memory, such as one that was measured elsewhere."""
        if peaks != self.peaks:
            self.peaks = peaks
            self._space.clear()

    def did_run(self, points: Candidates) -> Any:
        """[n] whether each was timed, so that it has the memory it needs."""
        return self._measured.ran(points)

    def measured_factor(self, configuration: Configuration) -> float:
        """What measured times make of the predicted seconds of a configuration."""
        return self.correction_of(configuration)[1] if self.is_corrected else 1.0

    def correction_of(
        self, configuration: Configuration
    ) -> tuple[float, float, float, dict[str, tuple[float, float]]]:
        """Predicted seconds of a step, what times make of them, the parts' share in that, and the
        seconds of each part before and after its own factors."""
        points = points_of([configuration])
        times = step_time(to_config_batch(self.model, self.cluster, points), self.constants)
        return float(times.step_s[0]), *self._measured.factors(points, times)

    @property
    def timings(self) -> Sequence[Timing]:
        return self._measured.timings

    @property
    def is_corrected(self) -> bool:
        """Whether measured times, its own or those of other models, correct the predictions."""
        return self._measured.knows

    def rank(
        self,
        batch_sizes: Sequence[int],
        *,
        top: int = 10,
        list_rejected: bool = False,
        against: Configuration | None = None,
        tries: int = 0,
        reasons: bool = True,
    ) -> list[Plan]:
        """The best configurations of every global batch, by samples per second; of those that are
        equally fast the simplest first (`equals.in_order`).

        Args:
            batch_sizes: samples of a step.
            top: how many to return of each.
            list_rejected: name every rejected configuration, not one of each kind.
            against: a configuration that each is compared with (`against_rel_sd`).
            tries: how many to return of those that may not fit (`Plan.tries`).
            reasons: whether to say what speaks against the others.
        """
        space = self._judged(batch_sizes, whole=reasons)
        points, fits = space.points, space.fits
        seconds, times = self._exact_where_needed(space, top)
        orders, fastest = [], list[Any]()
        for batch in batch_sizes:
            able = fits & (points.asked_batch_size == batch) & np.isfinite(seconds)
            at = np.flatnonzero(able)
            orders.append(self._ordered(points, seconds, at)[:top])
            fastest.append(fastest_of(points, seconds, at))
        chosen = np.concatenate(orders)
        reasons_of = functools.partial(rejected, self, space, every=list_rejected)
        answers = iter(self._answers(points.take(chosen), times.take(chosen), against))
        return [
            Plan(
                global_batch_size=batch,
                ranked=[next(answers) for _ in order],
                num_ranked=int((fits & (points.asked_batch_size == batch)).sum()),
                rejected=reasons_of(points.asked_batch_size == batch) if reasons else [],
                tries=self._tries(space, batch, seconds[order].min(initial=np.inf), tries),
                fastest=best,
            )
            for batch, order, best in zip(batch_sizes, orders, fastest)
        ]

    def _ordered(self, points: Candidates, seconds: Any, at: Any) -> Any:
        """Some indices in the order of `equals.in_order`. What was timed is as good as simple."""
        some = points.take(at)
        rare = np.where(self._measured.ran(some), 0.0, rarities(self.model, some))
        return at[in_order(seconds[at], rare)]

    def _tries(self, space: _Space, batch: int, safe_s: float, number: int) -> list[Ranked]:
        """See `Plan.tries`. One is better the more its gain times its probability; where nothing is
        safe, the more likely it fits.

        Args:
            space: of all batches.
            batch: the one that is meant.
            safe_s: seconds of a sample of the fastest that is safe, infinite where none is.
            number: how many at most.
        """
        mine = space.points.asked_batch_size == batch
        mine &= may_fit(space.likely, space.peaks, self.limit_bytes)
        at = np.flatnonzero(mine)
        if not (number and len(at)):
            return []
        some = space.points.take(at)
        rows = to_config_batch(self.model, self.cluster, some).full()
        limit = safe_s / (1.0 + EQUAL)
        if not self.is_corrected:
            near = min_step_s(rows, self.constants) / some.global_batch_size < limit
            at, some, rows = at[near], some.take(near), rows.take(near)
        if not len(at):
            return []
        times = step_time(rows, self.constants)
        seconds = self._measured.corrected(some, times)[0] / some.global_batch_size
        rare, likely = rarities(self.model, some), space.likely[at]
        chosen = worth_trying(seconds, likely, rare, safe_s=safe_s, number=number)
        return self._answers(some.take(chosen), times.take(chosen))

    def fastest(self, batch: int) -> Ranked | None:
        """The one of least predicted time, however rare; None where nothing fits."""
        space = self._judged([batch], whole=False)
        seconds, times = self._exact_where_needed(space, 1, band=0.0)
        if not np.isfinite(seconds).any():
            return None
        at = [int(np.argmin(seconds))]
        return self._answers(space.points.take(at), times.take(at))[0]

    def every(self, batch: int) -> tuple[Candidates, Any]:
        """All candidates of a global batch, n of them, and the predicted seconds of a step of each:
        [n]."""
        space = self._judged([batch])
        seconds, _ = self._exact_where_needed(space, max(len(space.points), 1))
        some = space.candidates
        return some, seconds[space.fits] * some.global_batch_size

    def part_factors(self) -> dict[str, float]:
        """What measured times make of the predicted seconds of every part of a step, by the name of
        `correct.PartSpread`; empty without any."""
        return self._measured.part_factors()

    def worth_timing(self, plan: Plan, number: int = 2) -> list[Configuration]:
        """The ranked configurations whose times would say most of the others (see
        `correct.most_informative`), of those that were not timed. None is recomputed by blocks, of
        which there are too many to time."""
        some = [r.configuration for r in plan.ranked if r.prediction.source != "profiled"]
        usual = self.limits.logits_chunks[0]
        some = [c for c in some if c.recompute != "block" and c.logits_chunks == usual]
        if len(some) < 2:
            return some if len(plan.ranked) > 1 else []
        points = points_of(some)
        times = step_time(to_config_batch(self.model, self.cluster, points), self.constants)
        return [some[i] for i in self._measured.most_informative(points, times, number)]

    def doubts(self, some: Sequence[Configuration]) -> tuple[float, list[float]]:
        """Relative uncertainty that the seconds of some configurations share, and that of each over
        the first."""
        points = points_of(some)
        times = step_time(to_config_batch(self.model, self.cluster, points), self.constants)
        common, over = self._measured.apart(points, times)
        return common, over.tolist()

    def _judged(self, batch_sizes: Sequence[int], whole: bool = True) -> _Space:
        """All points of some batches, or at least those that may fit; made once."""
        key = self._key(batch_sizes)
        key = key if whole or key in self._space else ("able", key)
        if key not in self._space:
            while len(self._space) >= _SPACES_KEPT:
                del self._space[next(iter(self._space))]
            self._space[key] = self._enumerate(batch_sizes, whole)
        return self._space[key]

    def _key(self, batch_sizes: Sequence[int]) -> Any:
        return tuple(batch_sizes), frozenset(x.configuration.line for x in self._measured.timings)

    def take_space(self, other: Planner, batch_sizes: Sequence[int]) -> None:
        """Takes the points of another planner that differs in its constants, and in flags that an
        extra suggests, alone. Neither changes which points are legal, what memory they need, or
        which are dominated. No times may be known, since they were measured without the flags."""
        model = replace(self.model, extras=other.model.extras)
        alike = (model, self.cluster, self.limit_bytes, self.peaks, self.limits)
        assert alike == (other.model, other.cluster, other.limit_bytes, other.peaks, other.limits)
        assert not (self.is_corrected or other.is_corrected)
        self._space[self._key(batch_sizes)] = replace(other._judged(batch_sizes), times=None)

    def _enumerate(self, batch_sizes: Sequence[int], whole: bool) -> _Space:
        found = self._fitted(batch_sizes, self.limits, whole)
        if self.model.num_experts is None or self.limits.cross_node_ep:
            return found
        asked = found.points.asked_batch_size
        lacking = sorted(set(batch_sizes) - set(asked[found.fits].tolist()))
        if not lacking:
            return found
        # Experts of a layer span nodes only where nothing else fits.
        wide = self._fitted(lacking, replace(self.limits, cross_node_ep=True), whole)
        keep = np.flatnonzero(~np.isin(asked, lacking))
        return _Space(
            points=joined([found.points.take(keep), wide.points]),
            fits=np.concatenate([found.fits[keep], wide.fits]),
            peaks=np.concatenate([found.peaks[keep], wide.peaks]),
            likely=np.concatenate([found.likely[keep], wide.likely]),
        )

    def _listed(self, batch: int, limits: Limits, whole: bool) -> Candidates:
        """The points of a batch, or those of them that are legal and may fit."""
        points = enumerate_points(self.model, self.cluster, batch, limits, self._measured.points)
        points = known_peaks.with_runs(self, points, batch, limits)
        if whole:
            return points
        points = points.take(np.flatnonzero(points.code == LEGAL))
        if self._measured.timings or not len(points):
            return points
        return points.take(
            np.flatnonzero(least_bytes(self.model, self.cluster, points) <= self.limit_bytes)
        )

    def _fitted(self, batch_sizes: Sequence[int], limits: Limits, whole: bool) -> _Space:
        points = joined([self._listed(b, limits, whole) for b in batch_sizes])
        legal = np.flatnonzero(points.code == LEGAL)
        peaks, sd, least = np.full(len(points), np.nan), np.zeros(len(points)), np.zeros(0)
        if len(legal):
            least = least_bytes(self.model, self.cluster, points.take(legal))
            peaks[legal] = least
            alive = legal[least <= self.limit_bytes]
            if len(alive):
                rows = to_config_batch(self.model, self.cluster, points.take(alive))
                peaks[alive], sd[alive] = self.peaks_of(rows.unevenly_loaded())
        lacks = max_bytes(np.nan_to_num(peaks, nan=0.0), sd, Z_SURE) > self.limit_bytes
        lacks[legal] |= known_peaks.ran_out(self, points.take(legal))
        if self._measured.timings:
            at = np.flatnonzero(lacks)
            lacks[at] = ~known_peaks.known_to_fit(self, points.take(at))
        # What does not depend on logits leaves no room for any part of them elsewhere.
        hopeless = np.zeros(len(points), dtype=bool)
        if not self._measured.timings:
            hopeless[legal] = least > self.limit_bytes
        for chunks in limits.logits_chunks[1:]:
            at = np.flatnonzero(lacks & ~hopeless)
            at = at[self._may_fit(points.take(at), peaks[at], chunks)]
            if not len(at):
                continue
            rows = to_config_batch(self.model, self.cluster, points.take(at)).change(
                logits_chunks=chunks
            )
            needs, doubt = self.peaks_of(rows.unevenly_loaded())
            able = max_bytes(needs, doubt, Z_SURE) <= self.limit_bytes
            some = replace(points.take(at), logits_chunks=np.full(len(at), chunks))
            able = (able & ~known_peaks.ran_out(self, some)) | known_peaks.known_to_fit(self, some)
            now = at[able]
            points.logits_chunks[now], lacks[now] = chunks, False
            peaks[now], sd[now] = needs[able], doubt[able]
        points.code[lacks] = MEMORY
        fits = np.flatnonzero(points.code == LEGAL)
        some = points.take(fits)
        surely = max_bytes(peaks[fits], sd[fits], Z_DOMINATES) <= self.limit_bytes
        surely |= known_peaks.known_to_fit(self, some)
        # Logits in parts are computed twice: such a point is not always faster than its kin.
        surely &= some.logits_chunks == limits.logits_chunks[0]
        beaten = prune_dominated(some, surely, self._measured.points)
        points.code[fits[beaten]] = DOMINATED
        likely = np.zeros(len(points))
        at = np.flatnonzero(lacks & (sd > 0))
        likely[at] = self.peaks.fit_probability(peaks[at], self.limit_bytes, sd[at])
        likely[at[known_peaks.ran_out(self, points.take(at))]] = 0.0
        return _Space(points=points, fits=points.code == LEGAL, peaks=peaks, likely=likely)

    def _may_fit(self, points: Candidates, peaks: Any, chunks: int) -> Any:
        """[n] whether points that need so much could fit with logits in some parts: their peak
        falls by no more than the logits do. Parts are of equal length."""
        if not len(points):
            return np.zeros(0, dtype=bool)
        rows = to_config_batch(self.model, self.cluster, points)
        saved = head_bytes(rows) - head_bytes(rows.change(logits_chunks=chunks))
        saved = saved * FRAGMENTATION * self.peaks.moving
        # Samples are cut, not the micro-batch.
        tokens = rows.seq_length / rows.cp / np.where(rows.sequence_parallel, rows.tp, 1)
        return (peaks - saved <= self.limit_bytes) & (tokens % chunks == 0)

    def peak_bytes_of(self, rows: ConfigBatch) -> Any:
        """[n] bytes of the stage that needs most, corrected by measured peaks."""
        return peaks(rows, correction=self.peaks)[0]

    def peaks_of(self, rows: ConfigBatch) -> tuple[Any, Any]:
        """See `known_peaks.peaks_of`."""
        return known_peaks.peaks_of(self, rows)

    def _exact_where_needed(
        self, space: _Space, top: int, band: float = EQUAL
    ) -> tuple[Any, StepTime]:
        """[n] seconds per sample of every candidate that could be among the best of its batch or
        within a band of them, infinity for the others; and what was predicted of steps before any
        correction."""
        points = space.points
        seconds, times = np.full(len(points), np.inf), StepTime.unknown(len(points))
        at = np.flatnonzero(space.fits)
        if not len(at):
            return seconds, times
        some = space.candidates
        if self.is_corrected:
            # A measured time may lie below any bound of a prediction: leave nothing out.
            if space.times is None:
                space.times = StepTime.unknown(len(points))
                rows = to_config_batch(self.model, self.cluster, some)
                space.times.put(at, step_time(rows, self.constants))
            corrected = self._measured.corrected(some, space.times.take(at))[0]
            seconds[at] = corrected / some.global_batch_size
            return seconds, space.times
        rows = to_config_batch(self.model, self.cluster, some).full()
        bound = min_step_s(rows, self.constants) / some.global_batch_size
        exact = np.full(len(at), np.inf)
        done = np.zeros(len(at), dtype=bool)
        first = np.concatenate(
            [
                mine[np.argsort(bound[mine], kind="stable")[: 2 * top]]
                for batch in np.unique(some.asked_batch_size)
                for mine in [np.flatnonzero(some.asked_batch_size == batch)]
            ]
        )
        for which in (first, None):
            if which is None:
                last = (1.0 + band) * self._kth(some, exact, top)
                which = np.flatnonzero(~done & (bound <= last))
            if len(which):
                found = step_time(rows.take(which), self.constants)
                times.put(at[which], found)
                exact[which] = found.step_s / some.global_batch_size[which]
                done[which] = True
        seconds[at] = exact
        return seconds, times

    @staticmethod
    def _kth(points: Candidates, exact: Any, top: int) -> Any:
        """[n] the time of the `top`-th best known candidate of the same batch."""
        limit = np.full(len(exact), np.inf)
        for batch in np.unique(points.asked_batch_size):
            mine = np.flatnonzero(points.asked_batch_size == batch)
            known = np.sort(exact[mine])
            limit[mine] = known[min(top, len(known)) - 1] if len(known) >= top else np.inf
        return limit

    def _answers(
        self, points: Candidates, times: StepTime, against: Configuration | None = None
    ) -> list[Ranked]:
        """Full predictions of a few points, whose times are known."""
        if not len(points):
            return []
        rows = to_config_batch(self.model, self.cluster, points).full()
        bytes_ = memory(rows, correction=self.peaks)
        seconds, sd, source = self._measured.corrected(points, times)
        against_sd = None if against is None else self._measured.against(points, times, against)
        needs, doubt = self.peaks_of(rows)
        likely = self.peaks.fit_probability(needs, self.limit_bytes, doubt)
        needs, known = known_peaks.known_of(self, points, bytes_.peak_bytes)
        likely = [known_peaks.FITS.get(name, float(p)) for name, p in zip(known, likely)]
        flops, of_parts = flops_per_sample(self.model), self._measured.parts(points, times)
        lacks = {"ep"} if self.model.num_experts is None else set()
        answers = []
        for i in range(len(points)):
            c = points.configuration(i)
            parts = [p for p in PARTS if p not in lacks and (p != "cp" or c.layout.cp > 1)]
            step_s = float(seconds[i])
            per_gpu = flops * c.global_batch_size / step_s / c.layout.world_size
            answers.append(
                Ranked(
                    configuration=c,
                    prediction=Prediction(
                        step_s=step_s,
                        samples_per_s=c.global_batch_size / step_s,
                        tokens_per_s=c.global_batch_size * self.model.seq_length / step_s,
                        tflops_per_gpu=per_gpu / 1e12,
                        mfu=per_gpu / peak_flops(self.model, self.cluster),
                        step_rel_sd=float(sd[i]),
                        source=source[i],
                        blind=c.noise_unmeasurable,
                        time_s={p: float(of_parts[p][i]) for p in parts},
                        peak_bytes=float(needs[i]),
                        peak_source=known[i],
                        worst_stage=int(bytes_.worst_stage[i]),
                        limit_bytes=self.limit_bytes,
                        fit_probability=likely[i],
                        stage_bytes=[
                            {k: float(bytes_.stages[k][r, i]) for k in KINDS}
                            for r in range(c.layout.pp)
                        ],
                    ),
                    against_rel_sd=None if against_sd is None else float(against_sd[i]),
                )
            )
        return answers

    def on(
        self, cluster: ClusterSpec, limits: Limits | None = None, model: ModelSpec | None = None
    ) -> Planner:
        """The same planner for another cluster, other limits, or other flags of extras. What was
        measured of the memory holds there too, and times hold on the same cluster."""
        other = Planner(
            model or self.model,
            cluster,
            constants=self.constants,
            limits=limits or self.limits,
            memory_margin=self.memory_margin,
            timings=self._measured.timings if cluster == self.cluster else (),
            too_large=self.too_large if cluster == self.cluster else (),
            of_others=self._measured.of_others if cluster == self.cluster else (),
        )
        other.set_peaks(self.peaks)
        return other

    def raw_step_s(self, configuration: Configuration, factors: PartFactors) -> float:
        """Predicted seconds of a step under some conditions, uncorrected by measurements."""
        rows = to_config_batch(self.model, self.cluster, points_of([configuration]))
        return float(step_time(rows, self.constants.under(factors)).step_s[0])

    def priced(self, configuration: Configuration) -> Ranked:
        """Prices a legal configuration, whether it fits or not."""
        one = points_of([configuration])
        times = step_time(to_config_batch(self.model, self.cluster, one), self.constants)
        return self._answers(one, times)[0]

    def explain(self, configuration: Configuration) -> Ranked | Rejected:
        """Prices one configuration, or says what speaks against it.

        Raises:
            SpecError: it is not a point of this space.
        """
        c = configuration
        if c.recompute == "block":
            plain = replace(c, recompute="none", recompute_num_layers=0)
            found = self.explain(plain)
            if isinstance(found, Rejected) and found.code != "memory":
                return found
            check_block(self.model, c)
        fixed = {name: getattr(c.layout, name) for name in ("tp", "cp", "pp", "vpp", "ep")}
        fixed["etp"] = c.layout.expert_tensor_parallel_size
        fixed["micro_batch"] = c.micro_batch_size
        fixed["recompute_num_layers"] = c.recompute_num_layers
        limits = replace(
            self.limits,
            fixed=fixed,
            largest={},
            recompute=(c.recompute,),
            cp_comm_types=(c.cp_comm_type,) if c.cp_comm_type else (),
            logits_chunks=(c.logits_chunks,),
            overlap=c.overlap,
            sequence_parallel=c.sequence_parallel or c.layout.tp == 1,
            use_tp_pp_dp_mapping=c.use_tp_pp_dp_mapping,
        )
        planner = self.on(self.cluster, limits)
        space = planner._judged([c.global_batch_size])
        points = space.points
        # Without a form the first is meant, which is the trainer's.
        wanted = points.use_distributed_optimizer == c.use_distributed_optimizer
        at = np.flatnonzero(wanted)
        if not len(at):
            raise SpecError(f"{c} is not a configuration of {self.cluster.world_size} GPUs")
        if space.fits[at[0]]:
            return planner.priced(points.configuration(int(at[0])))
        only = np.zeros(len(points), dtype=bool)
        only[at[0]] = True
        return rejected(planner, space, only)[0]
