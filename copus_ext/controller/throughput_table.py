"""The throughput of every configuration that a run may choose: predicted, profiled, and measured as
it goes."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.link_timing import Link, ranks_of_a_node
from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.cost_model.constants import USUAL, PartFactors
from copus_ext.cost_model.context import CP_COMM_TYPES
from copus_ext.cost_model.gpus import kind_of
from copus_ext.cost_model.megatron_flags import spec_of_arguments
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.goodput.state import key_of
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import ForeignProfile, Timing, read_profile
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from megatron.trainer.common.control import GENERATION_VARIABLE
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.extras import step_period
from megatron.trainer.common.program import other_command
from megatron.trainer.config.draft import flag_of
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.config.relayout import (
    is_sequence_parallel,
    wants_sequence_parallel,
    with_layout,
)

if TYPE_CHECKING:
    from megatron.trainer.config import Config

_PER_BATCH = 64
"""Configurations of a batch that are ranked."""
_ASSUMED_SD = 0.05
"""Relative uncertainty of a throughput that is assumed to be the present one."""
_MEASURED_SD = 0.01
_BOTH_MEASURED_SD = math.sqrt(2.0) * _MEASURED_SD


def gpu_of(config: Config) -> tuple[str, float] | None:
    """Name and memory in MiB of this process's GPU; None on CPU ranks."""
    if config.runtime.device != "cuda":
        return None
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found.name, found.total_memory / 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryHistory:
    """What a run has learned of the memory that its configurations need."""

    fits: Callable[[Configuration], bool] = lambda c: True
    """Whether nothing that needs as much or less has run out of it."""
    peaks: Callable[[], Sequence[Timing]] = list
    """What the run has measured so far; the times in it do not count."""
    too_large: Sequence[Configuration] = ()
    """What ran out of it."""


class ThroughputTable:
    """Rows of the configurations that fit, for the batches asked for.

    Args:
        config: of the run.
        flags: of the controller.
        gpu: name and memory in MiB of the GPU of this process, or None on CPU ranks.
        fixed_micro_batch: whether the micro-batch of the flags must stay.
        link: between nodes, as timed.
        flag_layout: layout of the flags; a layout of its sizes has its stages, every other one
            even stages. None: that of `config`.
        factors: of the parts of a step, under present conditions.
        memory: of configurations of this run.

    Raises:
        UsageError: a cluster or a profile that cannot be used.
    """

    def __init__(
        self,
        config: Config,
        flags: CopusConfig,
        *,
        gpu: tuple[str, float] | None,
        fixed_micro_batch: bool = False,
        link: Link | None = None,
        flag_layout: Layout | None = None,
        factors: PartFactors = USUAL,
        memory: MemoryHistory | None = None,
    ) -> None:
        self.config, self.flags = config, flags
        self._memory = memory or MemoryHistory()
        self._under = functools.partial(
            ThroughputTable,
            config,
            flags,
            gpu=gpu,
            fixed_micro_batch=fixed_micro_batch,
            link=link,
            flag_layout=flag_layout,
            memory=memory,
        )
        self._factors = factors
        self._known = {_uncut(x): x for x in (flag_layout, config.layout) if x is not None}
        self.note = ""
        """Why nothing can be predicted; empty if it can."""
        self.profiled: list[Timing] = []
        self.planner: Planner | None = None
        self._legal: dict[Layout, bool] = {}
        try:
            model = model_of(config)
            cluster = _cluster(flags, gpu, config.layout.world_size, link)
            # What a profile timed with overlap stands for a run without, and the other way round.
            overlap = config.parallel.overlap_grad_reduce
            self.profiled = [
                replace(t, configuration=replace(t.configuration, overlap=overlap))
                for t in _profile(flags, model, cluster)
            ]
            self.planner = Planner(
                model,
                cluster,
                constants=cluster.load_constants().under(factors),
                limits=_limits(config, flags, fixed_micro_batch),
                too_large=self._memory.too_large,
            )
            # A profile was measured under usual conditions.
            self.profiled = [
                replace(t, step_s=t.step_s * self._ratio(t.configuration, USUAL, factors))
                for t in self.profiled
            ]
            self.planner.retime(self.profiled, peaks=self._memory.peaks())
        except SpecError as error:
            why = str(error).replace("--cluster", "--copus-cluster")
            if flags.copus_cluster is not None:
                raise UsageError(f"--copus-cluster {flags.copus_cluster}: {why}") from error
            self.note = f"throughputs are not predicted: {why}"
            if flags.copus_layouts == "all":
                self.note += "; the layout stays"

    @property
    def cluster(self) -> ClusterSpec | None:
        """The machine; None where nothing describes it."""
        return self.planner and self.planner.cluster

    def under(self, factors: PartFactors) -> ThroughputTable:
        """The table of the same run under other conditions.

        Raises:
            UsageError: as at its start; files may have changed.
        """
        return self._under(factors=factors)

    def raw_step_s(self, c: Configuration, factors: PartFactors) -> float:
        """Predicted seconds of a step of any configuration under some conditions, uncorrected."""
        assert self.planner is not None
        return self.planner.raw_step_s(_even(c), factors)

    def configuration_of(self, key: str) -> Configuration:
        """The configuration of a key of `config_key`."""
        layout, micro, batch = key.rsplit(" ", 2)
        return self._configuration(int(micro), int(batch), Layout.from_text(layout))

    def _configuration(
        self, micro_batch_size: int, batch: int, layout: Layout | None = None
    ) -> Configuration:
        """The run's own layout, or another, with other sizes."""
        return configuration_of_run(self.config, micro_batch_size, batch, layout)

    def _ratio(self, c: Configuration, before: PartFactors, after: PartFactors) -> float:
        if before == after:
            return 1.0
        return self.raw_step_s(c, after) / self.raw_step_s(c, before)

    def rows(
        self,
        batches: Sequence[int],
        *,
        micro_batch_size: int,
        global_batch_size: int,
        measured: Callable[..., tuple[float, float, int] | None],
        end_share: Callable[[Configuration], float | None] | None = None,
        visited: Sequence[Layout] = (),
        earlier_s: Mapping[str, float] | None = None,
    ) -> tuple[list[ConfigThroughput], int]:
        """Every configuration of some batches that fits.

        Args:
            batches: to choose from, the present one among them; samples.
            micro_batch_size: of now.
            global_batch_size: of now.
            measured: usual seconds of a step, their median deviation and number, if this run has
                timed the configuration. It takes the period of steps that repeat, too.
            end_share: share of such a step after its last backward pass, if it was measured.
            visited: further layouts under which it has.
            earlier_s: seconds of a step that are expected of configurations, by key, because they
                were timed under other conditions.

        Returns:
            The rows, and the index of the present configuration.
        """
        if (period := step_period(self.config.flat())) > 1:
            measured = functools.partial(measured, period=period)
            end_share = None  # a median step lacks what one of the period has more
        now = self._configuration(micro_batch_size, global_batch_size)
        rows = self._predicted(batches, now, measured, end_share, visited, earlier_s or {})
        is_known = any(_uncut(row.layout) == _uncut(self.config.layout) for row in rows)
        # The planner ranks even stages only; it has none where the layers do not divide. Before the
        # present speed is known, an invented one cannot stand beside those predicted.
        if not rows or (now.layout.layer_partition and not is_known and measured(now)):
            rows = [*rows, *self._assumed(batches, now, measured)]
        at = next((i for i, row in enumerate(rows) if _is(row, now)), None)
        if at is None:
            # It runs, whatever is predicted for it.
            same = [row for row in rows if row.global_batch_size == global_batch_size]
            known = measured(now)
            speed = global_batch_size / known[0] if known else None
            speed = speed or (same[0].samples_per_s if same else 1.0)
            sd = _MEASURED_SD if known else _ASSUMED_SD
            rows.append(_row(now, speed, sd, "measured" if known else "assumed"))
            at = len(rows) - 1
        return rows, at

    def _predicted(
        self,
        batches: Sequence[int],
        now: Configuration,
        measured: Callable[[Configuration], tuple[float, float, int] | None],
        end_share: Callable[[Configuration], float | None] | None,
        visited: Sequence[Layout],
        earlier_s: Mapping[str, float],
    ) -> list[ConfigThroughput]:
        if self.planner is None:
            return []
        live, earlier = [], []
        sizes = range(1, self.flags.copus_max_micro_batch_size + 1)
        size = self.config.layout.world_size
        # Where the layout stays, the times of others still tell how fast this machine is.
        own = {x for x in visited if x.world_size == size and x == self._with_cut(x)}
        for layout, batch, b in itertools.product(
            sorted({self.config.layout, *own}, key=str), batches, sizes
        ):
            if batch % (layout.dp * b):
                continue  # the cost model knows equal micro-batches only
            c = self._configuration(b, batch, layout)
            known = measured(c)
            if known is not None:
                usual, deviation, number = known
                live.append(
                    Timing(
                        configuration=c,
                        step_s=usual,
                        spread_s=deviation,
                        num_steps=number,
                        end_share=end_share and end_share(c),
                    )
                )
            elif (step_s := earlier_s.get(key_of(c))) is not None:
                earlier.append(Timing(configuration=c, step_s=step_s))
        seen = {(*t.configuration.line, t.configuration.num_microbatches): t for t in live}
        expected = {t.key for t in earlier}
        against, rows = _even(now), []
        timed_now = seen.get((*against.line, against.num_microbatches))
        profiled = [t for t in self.profiled if t.key not in expected]
        earlier += profiled if timed_now is None else self._as_fast_as(timed_now, profiled)
        self.planner.retime(live, earlier=earlier, peaks=self._memory.peaks())
        scale = 1.0 if timed_now is None else self._expected_s(against) / timed_now.step_s
        for plan in self.planner.rank(list(batches), top=_PER_BATCH, against=against):
            for r in plan.ranked:
                c, p = r.configuration, r.prediction
                layout = self._with_cut(c.layout)
                if not self._can_be(layout) or not self._has_room(c, layout):
                    continue
                timed, sd = seen.get((*c.line, c.num_microbatches)), r.against_rel_sd or 0.0
                speed, source = scale * p.samples_per_s, p.source
                if timed is not None:
                    noise = math.hypot(*(t.relative_sd for t in (timed, timed_now) if t))
                    if timed is timed_now or noise <= _MEASURED_SD:
                        speed = c.global_batch_size / timed.step_s
                    # Where steps scatter more, the fastest of many would be the luckiest: there all
                    # measurements together count, each by its own scatter.
                    source = "measured"
                    sd = 0.0 if timed is timed_now else max(sd, noise, _BOTH_MEASURED_SD)
                rows.append(_row(replace(c, layout=layout), speed, sd, source))
        return rows

    def _as_fast_as(self, timed: Timing, profiled: Sequence[Timing]) -> list[Timing]:
        """A profile as this machine would give it now, where it may be several times as fast or
        slow as in that hour: by what it makes of a configuration that was timed here."""
        assert self.planner is not None
        if not profiled:
            return []
        self.planner.retime([], earlier=profiled, peaks=self._memory.peaks())
        ratio = timed.step_s / self._expected_s(timed.configuration)
        return [replace(t, step_s=ratio * t.step_s) for t in profiled]

    def _expected_s(self, c: Configuration) -> float:
        """Seconds of a step as all measurements together make them."""
        assert self.planner is not None
        return self.planner.raw_step_s(c, self._factors) * self.planner.measured_factor(c)

    def _with_cut(self, layout: Layout) -> Layout:
        """The same sizes with the layer partition that the run knows for them, if any."""
        return self._known.get(_uncut(layout), _uncut(layout))

    def _can_be(self, layout: Layout) -> bool:
        """Whether the run's own flags allow a layout; the planner knows the model alone."""
        if layout == self.config.layout:
            return True
        if layout not in self._legal:
            self._legal[layout] = _is_legal(self.config, layout)
        return self._legal[layout]

    def _has_room(self, c: Configuration, layout: Layout) -> bool:
        """Whether it has not run out of memory, as the run would be configured for it."""
        sizes = c.micro_batch_size, c.global_batch_size
        return self._memory.fits(configuration_of_run(self.config, *sizes, layout))

    def _assumed(
        self,
        batches: Sequence[int],
        now: Configuration,
        measured: Callable[[Configuration], tuple[float, float, int] | None],
    ) -> list[ConfigThroughput]:
        """Without a planner: the throughput of now, for every batch that it can cut. Before it is
        known, as right after a resume, that of another batch, or one sample a second for all."""
        micro, uneven = now.micro_batch_size, self.config.batch.allow_uneven_micro_batches
        cut = [
            self._configuration(micro, batch)
            for batch in batches
            if not batch_problems(self.config.layout, micro, batch, uneven=uneven)
        ]
        known = {c.global_batch_size: found for c in (now, *cut) if (found := measured(c))}
        speeds = {batch: batch / usual for batch, (usual, *_) in known.items()}
        usual = speeds.get(now.global_batch_size) or next(iter(speeds.values()), 1.0)
        return [
            _row(c, speeds[c.global_batch_size], _MEASURED_SD, "measured")
            if c.global_batch_size in speeds
            else _row(c, usual, _ASSUMED_SD, "assumed")
            for c in cut
        ]


def _is_legal(config: Config, layout: Layout) -> bool:
    """Whether a run can have a layout. A Megatron-LM checkout says so itself."""
    if (problems := getattr(config, "layout_problems", None)) is not None:
        return not problems(layout)
    try:
        with_layout(config, layout)
    except UsageError:
        return False
    return True


def _row(c: Configuration, samples_per_s: float, sd: float, source: str) -> ConfigThroughput:
    return ConfigThroughput(
        configuration=c, samples_per_s=samples_per_s, relative_sd=sd, source=source
    )


def _is(row: ConfigThroughput, c: Configuration) -> bool:
    sizes = row.micro_batch_size, row.global_batch_size
    return _uncut(row.layout) == _uncut(c.layout) and sizes == (
        c.micro_batch_size,
        c.global_batch_size,
    )


def _uncut(layout: Layout) -> Layout:
    """The sizes of a layout, whatever layers its chunks have."""
    return replace(layout, layer_partition=None)


def _even(c: Configuration) -> Configuration:
    """The cost model knows equal micro-batches only."""
    if c.is_even:
        return c
    unit = c.layout.dp * c.micro_batch_size
    return c.with_num_microbatches(max(c.global_batch_size // unit, 1))


def _recompute(config: Config) -> tuple[str, int]:
    r = config.recompute
    if r.recompute_granularity == "full":
        block = r.recompute_method == "block"
        layers = r.recompute_num_layers or 0
        chunk = max(config.layout.layers_of_chunks(config.model.num_layers))
        return ("block", layers) if block and layers < chunk else ("full", 0)
    return r.recompute_granularity or "none", 0


def configuration_of_run(
    config: Config, micro_batch_size: int, batch: int, layout: Layout | None = None
) -> Configuration:
    """The run's own layout, or another, with other sizes and whole messages."""
    layout = layout or config.layout
    mode, layers = _recompute(config)
    return Configuration(
        layout=layout,
        cp_comm_type=_exchange(config) if layout.cp > 1 else None,
        micro_batch_size=micro_batch_size,
        global_batch_size=batch,
        recompute=mode,  # pyright: ignore[reportArgumentType]
        recompute_num_layers=layers,
        logits_chunks=_logits_chunks(config),
        sequence_parallel=_is_sequence_parallel(config, layout),
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap=config.parallel.overlap_grad_reduce,
        use_tp_pp_dp_mapping=_uses_tp_pp_dp_mapping(config),
    )


def _is_sequence_parallel(config: Config, layout: Layout) -> bool:
    """A Megatron-LM checkout does what its flag says, wherever it has an effect."""
    if hasattr(config, "explicit"):
        return is_sequence_parallel(config, layout)
    return layout.tp > 1 and _wants_sequence_parallel(config)


def _wants_sequence_parallel(config: Config) -> bool:
    """The same, wherever there is tensor parallelism."""
    if hasattr(config, "explicit"):
        return wants_sequence_parallel(config)
    return getattr(config, "wants_sequence_parallel", config.parallel.sequence_parallel)


def _exchange(config: Config) -> str:
    """How ranks that share samples exchange keys and values; of two levels the outer one, a ring.
    An older Megatron-LM has one word for each layer."""
    word = (getattr(config.parallel, "cp_comm_type", None) or ("p2p",))[0]
    return word if word in CP_COMM_TYPES else "p2p"


def _logits_chunks(config: Config) -> int:
    """Parts of a rank's tokens for the logits; an older Megatron-LM has no such flag."""
    return getattr(getattr(config, "kernels", None), "logits_chunks", 1)


def _uses_tp_pp_dp_mapping(config: Config) -> bool:
    """Whether ranks are numbered tensor, pipeline, data; an older Megatron-LM has no such flag."""
    return getattr(config.parallel, "use_tp_pp_dp_mapping", False)


def _limits(config: Config, flags: CopusConfig, fixed_micro_batch: bool) -> Limits:
    layout, (mode, layers) = config.layout, _recompute(config)
    fixed = {"recompute_num_layers": layers}
    flat = config.flat()
    if flat.get("attention_dropout") or flat.get("hidden_dropout"):
        # What is dropped would be other entries under another size.
        fixed["cp"] = layout.cp
    if fixed_micro_batch:
        fixed["micro_batch"] = config.batch.micro_batch_size
    if flags.copus_layouts == "current":
        fixed |= {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp}
        fixed |= {"ep": layout.ep, "etp": layout.expert_tensor_parallel_size, "cp": layout.cp}
    return Limits(
        fixed=fixed,
        recompute=(mode,),
        use_distributed_optimizer=(config.parallel.use_distributed_optimizer,),
        logits_chunks=(_logits_chunks(config),),
        overlap=config.parallel.overlap_grad_reduce,
        use_tp_pp_dp_mapping=_uses_tp_pp_dp_mapping(config),
        sequence_parallel=_wants_sequence_parallel(config),
        cross_node_tp=True,
        cross_node_ep=True,
        narrow_experts=True,
        # Of parts of samples no gradient noise of experts is measured.
        whole_samples=flags.copus_layouts == "all",
        max_micro_batch=flags.copus_max_micro_batch_size,
        cp_comm_types=(_exchange(config),),
    )


def model_of(config: Config) -> ModelSpec:
    """What the planner knows of the model.

    Raises:
        SpecError: something that the cost model does not know.
    """
    return spec_of_arguments(SimpleNamespace(**config.flat()))


def _cluster(
    flags: CopusConfig,
    gpu: tuple[str, float] | None,
    world_size: int,
    link: Link | None,
) -> ClusterSpec:
    """What the run is on; its network no faster than was timed."""
    text = flags.copus_cluster
    if text is not None:
        spec = ClusterSpec.load(Path(text)) if text.endswith(".json") else preset(text)
        if spec.world_size != world_size and GENERATION_VARIABLE in os.environ:
            # Ranks come and go, and need not fill nodes.
            of_node = math.gcd(spec.gpus_per_node, world_size)
            return replace(spec, gpus_per_node=of_node, links=None, nodes=()).resize(world_size)
        if spec.world_size != world_size:
            raise SpecError(f"it has {spec.world_size} GPUs and the run {world_size}")
        return spec
    kind = "cpu" if gpu is None else kind_of(*gpu)
    node = replace(preset(f"{kind}:1"), gpus_per_node=ranks_of_a_node(world_size))
    if link is not None:
        network = min(node.nic_bytes_per_s, link.bytes_per_s)
        node = replace(node, nic_bytes_per_s=network, nic_is_measured=True)
    return node.resize(world_size)


def _profile(flags: CopusConfig, model: ModelSpec, cluster: ClusterSpec) -> list[Timing]:
    if flags.copus_profile is None:
        return []
    path = Path(flags.copus_profile)
    try:
        machine, timings = read_profile(path)
        theirs = ModelSpec.from_json(machine.get("model", {}))
    except (OSError, ForeignProfile, ValueError, TypeError) as error:
        raise UsageError(f"--copus-profile {path}: {error}") from error
    if theirs.seq_length != model.seq_length:
        # Of another length of samples: nothing to learn from, and no mistake where they grow.
        return []
    measured = machine.get("world_size"), machine.get("gpu")
    own = cluster.world_size, cluster.gpu.name
    if theirs.extras != model.extras:
        raise UsageError(
            f"--copus-profile {path} was measured with {_shown(theirs.extras)}, and the run has "
            f"{_shown(model.extras)}; measure with {other_command('profile_layouts.py')}"
        )
    if measured != own or theirs.num_parameters != model.num_parameters:
        raise UsageError(
            f"--copus-profile {path} is of another model or machine ({measured[0]} x "
            f"{measured[1]}, here {own[0]} x {own[1]}); measure with "
            f"{other_command('profile_layouts.py')}"
        )
    return timings


def _shown(extras: Mapping[str, Any]) -> str:
    return ", ".join(f"{flag_of(name)} {value}" for name, value in extras.items()) or "no extras"
