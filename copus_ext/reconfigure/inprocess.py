"""Takes a running job to another layout in the same processes: new groups and model, the optimizer
state from peer to peer, no disk.

A change has one outcome: the job trains on under the new layout, or under the old one, or it leaves
to be launched again from its last checkpoint. Every phase ends with a vote of all ranks, and until
the last one every rank keeps what it held, so that the old layout can be put together again.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from copus_ext.reconfigure import memory, verify
from copus_ext.reconfigure.ballot import Ballot, NoAnswer, Watchdog
from copus_ext.reconfigure.held import (
    Held,
    adam_steps,
    copy_all,
    extract,
    masters_to_weights,
    restore_counts,
)
from copus_ext.reconfigure.ownership import shape_of
from copus_ext.reconfigure.route import Route, Routes
from copus_ext.reconfigure.transfer import Transfer
from megatron.training.build import groups_of, install_layout, release_layout
from megatron.training.config import Config
from megatron.training.errors import Relaunch
from megatron.training.job import Job
from megatron.training.layout import Layout, batch_problems
from megatron.training.model import Model, build_model
from megatron.training.optimizer import build_optimizer
from megatron.training.parallel import destroy_groups
from megatron.training.rectangles import digest
from megatron.training.relayout import with_layout
from megatron.training.settings import StepSettings
from megatron.training.shards import Shards, own_shards

logger = logging.getLogger(__name__)

PHASES = (
    "prepare",
    "drain",
    "extract",
    "tear down",
    "groups",
    "model",
    "optimizer",
    "transfer",
    "weights",
    "verify",
    "commit",
    "resume",
)
"""In their order; a failure before `tear down` leaves the job untouched."""
MIN_TIMEOUT_S, _PREDICTED_TIMES = 60.0, 10.0
_PATIENCE_S = 10.0


@dataclass(kw_only=True)
class Outcome:
    """What came of a change of layout; the same on every rank but for times and bytes."""

    kind: Literal["moved", "cancelled", "rolled_back"] = "cancelled"
    """On under the new layout; never begun; back under the old one."""
    reason: str = ""
    """Why it did not come about."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase, its vote included."""
    pause_s: float = 0.0
    """Seconds of the whole."""
    wire_bytes: int = 0
    """Bytes of state that ranks sent to each other."""
    minimum_bytes: int = 0
    """Bytes that they had to."""
    busiest_bytes: int = 0
    """Bytes of the rank that sent or received most."""
    num_messages: int = 0
    """Messages of this rank."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


class PhaseFailed(RuntimeError):
    """A rank said no; raised on all of them."""

    def __init__(self, phase: str, problems: list[str]) -> None:
        super().__init__(f"{phase}: {problems[0]}")
        self.phase = phase


@dataclass(kw_only=True)
class _Built:
    """A layout as far as it has been put up."""

    config: Config
    groups: Any = None
    model: Model | None = None
    optimizer: Any = None
    shards: Shards | None = None

    def drop(self) -> None:
        """Lets go of everything, so that the groups can be destroyed."""
        if self.model is not None:
            self.model.detach_hooks()
        self.groups = self.model = self.optimizer = self.shards = None


class Mover:
    """Changes the layout of one job; every rank makes one and calls the same methods.

    Args:
        run_dir: of the run, on every rank; stacks of a change that hangs go there.
        note: writes the journal, on rank 0; called with a kind and fields.
        sample: sum a sixteenth of the tensors instead of all.
        fault: called with the name of each phase as it begins; a test's way to break it.
        patience_s: see `Watchdog`.
        min_timeout_s: least seconds that a change may take before it counts as hung.
    """

    def __init__(
        self,
        *,
        run_dir: Path | None = None,
        note: Callable[..., None] = lambda kind, **fields: None,
        sample: bool = False,
        fault: Callable[[str], None] = lambda phase: None,
        patience_s: float = _PATIENCE_S,
        min_timeout_s: float = MIN_TIMEOUT_S,
    ) -> None:
        self._run_dir, self._note, self._sample = run_dir, note, sample
        self.fault, self._patience_s, self._min_timeout_s = fault, patience_s, min_timeout_s
        self._store = dist.PrefixStore(_launch_name(), _store_of_launch())
        # Not one of megatron-core's, so that taking those down leaves it.
        self._group = dist.new_group()
        self._routes: Routes | None = None
        self._count = 0

    def close(self) -> None:
        """Lets go of the group. All ranks."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def route(self, config: Config, layout: Layout) -> Route:
        """The way to a layout. Pure arithmetic; kept for the change.

        Raises:
            ValueError: there is none.
        """
        if self._routes is None:
            per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None
            self._routes = Routes(shape_of(config), ranks_per_node=per_node)
        return self._routes.between(config.layout, layout)

    def move(
        self, job: Job, layout: Layout, settings: StepSettings, *, predicted_s: float = 0.0
    ) -> Outcome:
        """Changes the layout. All ranks take part, at a step boundary.

        Args:
            job: at a boundary: gradients applied, no evaluation and no save under way.
            layout: to change to.
            settings: how steps are taken there.
            predicted_s: seconds that it is thought to take.

        Returns:
            What came of it; the job trains on in any case.

        Raises:
            Relaunch: on every rank that still can: the job must be started again.
        """
        self._count += 1
        timeout_s = max(_PREDICTED_TIMES * predicted_s, self._min_timeout_s)
        ballot = Ballot(
            self._store,
            str(self._count),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            timeout_s=timeout_s,
        )
        dog = Watchdog(
            ballot,
            deadline_s=2 * timeout_s,
            patience_s=self._patience_s,
            on_expire=self._leave_at_once,
        )
        with dog:
            change = _Change(self, job, layout, settings, ballot, dog)
            try:
                return change.run()
            except NoAnswer as error:
                self._dump_stacks()
                raise Relaunch(f"changing the layout to {layout} failed: {error}") from error
            finally:
                change.forget()

    def _leave_at_once(self, reason: str) -> None:
        """Ends a process that waits in a collective which nothing can cancel."""
        self._dump_stacks()
        rank = dist.get_rank()
        print(
            f"copus: rank {rank} leaves a change of layout: {reason}", file=sys.stderr, flush=True
        )
        if rank == 0:
            self._note("switch.abandoned", reason=reason)
        os._exit(Relaunch.exit_code)

    def _dump_stacks(self) -> None:
        if self._run_dir is None:
            return
        path = self._run_dir / "stacks" / f"switch-{self._count}-rank{dist.get_rank()}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                faulthandler.dump_traceback(file)
        except OSError as error:
            logger.warning("the stacks cannot be written: %s", error)


class _Change:
    """One change of layout."""

    def __init__(
        self,
        mover: Mover,
        job: Job,
        layout: Layout,
        settings: StepSettings,
        ballot: Ballot,
        dog: Watchdog,
    ) -> None:
        self.mover, self.job, self.layout, self.settings = mover, job, layout, settings
        self.ballot, self.dog = ballot, dog
        self.outcome = Outcome()
        self.held: Held | None = None
        self.new: _Built | None = None

    def forget(self) -> None:
        """Drops all state; exceptions under way hold this object."""
        self.held = self.new = None

    def run(self) -> Outcome:
        """All phases, and the way back if one fails."""
        started = time.perf_counter()
        failed = self._forward()
        if failed is not None:
            self.outcome.reason = failed[1]
            if PHASES.index(failed[0]) >= PHASES.index("tear down"):
                self._back()
                self.outcome.kind = "rolled_back"
        self.outcome.pause_s = time.perf_counter() - started
        return self.outcome

    def _forward(self) -> tuple[str, str] | None:
        """Takes the job to the new layout.

        Returns:
            None, or the phase that failed and why; nothing then holds on to what was built.
        """
        try:
            route = self._phase("prepare", self._prepare)
            self._note("switch.begin", to=str(self.layout))
            self._phase("drain", self._drain)
            self.held = self._phase("extract", lambda: self._extract(route))
            self._phase("tear down", self._tear_down)
            self.new = _Built(config=with_layout(self.held.config, self.layout))
            self._build(self.new)
            self._phase("transfer", lambda: self._transfer(route))
            self._phase("weights", lambda: self._weights(self.new))
            self._phase("verify", lambda: self._verify(self.new))
            self._phase("commit", self._commit)
        except PhaseFailed as error:
            return error.phase, str(error)
        self.outcome.kind = "moved"
        self.job.state.settings = self.settings
        self._phase_or_relaunch("resume", lambda: self._install(self.new))
        return None

    def _phase(self, name: str, act: Callable[[], Any], *, label: str = "") -> Any:
        """Does one phase and lets all ranks vote on it.

        Raises:
            PhaseFailed: on every rank, if it failed on any.
            NoAnswer: a rank has not come to the vote.
        """
        topic = label + name
        self.dog.entering(topic)
        started = time.perf_counter()
        result = problem = None
        try:
            self.mover.fault(topic)
            result = act()
        except Exception as error:  # out of memory, a group, a message: any of them is a no
            logger.debug("changing the layout failed", exc_info=True)
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        problems = self.ballot.vote(topic, problem)
        self.outcome.phases[topic] = time.perf_counter() - started
        if problems:
            result = None
            raise PhaseFailed(name, problems)
        return result

    def _phase_or_relaunch(self, name: str, act: Callable[[], Any], *, label: str = "") -> Any:
        """A phase from which there is no way back."""
        try:
            return self._phase(name, act, label=label)
        except PhaseFailed as error:
            reason = str(error)
        raise Relaunch(f"changing the layout to {self.layout} failed: {reason}")

    def _note(self, kind: str, **fields: Any) -> None:
        if dist.get_rank() == 0:
            self.mover._note(kind, iteration=self.job.state.iteration, **fields)

    def _prepare(self) -> Route:
        """Everything that can be known before: legality, the plan, memory, and that all ranks
        want the same."""
        job, rank = self.job, dist.get_rank()
        config = with_layout(job.config, self.layout)
        micro = self.settings.micro_batch_size or config.batch.micro_batch_size
        batch = self.settings.global_batch_size or job.global_batch_size
        problems = batch_problems(self.layout, micro, batch)
        if problems:
            raise ValueError("; ".join(problems))
        route = self.mover.route(job.config, self.layout)
        own = own_shards(job.model, job.optimizer, job.groups)
        if digest(own.records) != digest(route.source[rank]):
            raise ValueError("the state of this model is not cut as planned")
        wanted = f"{self.layout} {self.settings} {job.state.iteration} {route.digest()}"
        told = self.ballot.tell("change", wanted if rank == 0 else None)
        if told != wanted:
            raise ValueError(f"this rank wants {wanted!r} and rank 0 {told!r}")
        memory.check(job, route, config)
        plan = route.plan
        self.outcome.wire_bytes, self.outcome.minimum_bytes = plan.wire_bytes, plan.minimum_bytes
        self.outcome.busiest_bytes = plan.busiest_bytes
        return route

    def _drain(self) -> None:
        if self.job.checkpointer is not None:
            self.job.checkpointer.finish()

    def _extract(self, route: Route) -> Held:
        keys = verify.checked_keys(route.keys, sample=self.mover._sample)
        return extract(self.job, keys, group=self.mover._group)

    def _tear_down(self) -> None:
        release_layout(self.job)
        destroy_groups()

    def _build(self, built: _Built, label: str = "") -> None:
        """Groups, model and optimizer of a layout, with no state yet."""
        held, device = self.held, self.job.device
        assert held is not None
        built.groups = self._phase("groups", lambda: groups_of(built.config), label=label)
        built.model = self._phase(
            "model",
            lambda: build_model(built.config, built.groups, device, draw=False),
            label=label,
        )

        def optimizer() -> None:
            assert built.model is not None
            built.optimizer = build_optimizer(built.config, built.model, built.groups)
            restore_counts(built.optimizer, held)
            built.shards = own_shards(built.model, built.optimizer, built.groups)

        self._phase("optimizer", optimizer, label=label)

    def _transfer(self, route: Route) -> None:
        held, new, rank = self.held, self.new, dist.get_rank()
        assert held is not None and new is not None and new.shards is not None
        if new.shards.records != route.target[rank]:
            raise ValueError("the new layout is not cut as planned")
        transfer = Transfer(
            route.plan,
            source=held.shards,
            target=new.shards,
            source_records=route.source,
            target_records=route.target,
            group=self.mover._group,
            timeout_s=self.mover._min_timeout_s,
        )
        transfer.run()
        self.outcome.num_messages = transfer.num_messages

    def _weights(self, built: _Built | None) -> None:
        assert built is not None and built.model is not None
        masters_to_weights(built.config, built.model, built.optimizer)

    def _verify(self, built: _Built | None) -> None:
        """The state is what it was, element for element, and the weights follow from it."""
        held = self.held
        assert held is not None and built is not None
        assert built.model is not None and built.shards is not None
        keys = sorted({name.split(".", 1)[1] for name in held.sums})
        after = verify.checksums(built.shards, keys, group=self.mover._group)
        verify.compare(held.sums, after)
        verify.check_weights(built.model, built.shards, built.groups)
        if adam_steps(built.optimizer) != held.step:
            raise verify.Mismatch(f"{adam_steps(built.optimizer)} steps instead of {held.step}")

    def _commit(self) -> None:
        self._note("switch.commit", to=str(self.layout))

    def _install(self, built: _Built | None) -> None:
        """The job goes on with what was built; what was held is free."""
        assert built is not None and built.model is not None
        self.held = None
        install_layout(self.job, built.config, built.groups, built.model, built.optimizer)

    def _back(self) -> None:
        """Puts the old layout together again from what this rank has kept.

        Raises:
            Relaunch: that failed too.
        """
        label, held, new = "back: ", self.held, self.new
        assert held is not None
        old = _Built(config=held.config)

        def drop() -> None:
            if new is not None:
                new.drop()
            destroy_groups()

        def fill() -> None:
            assert old.shards is not None
            copy_all(held.shards, old.shards)

        try:
            self._phase("tear down", drop, label=label)
            self._build(old, label)
            self._phase("transfer", fill, label=label)
            self._phase("weights", lambda: self._weights(old), label=label)
            self._phase("verify", lambda: self._verify(old), label=label)
            self._phase("resume", lambda: self._install(old), label=label)
            return
        except PhaseFailed as error:
            reason = f"{self.outcome.reason}; going back failed too: {error}"
        raise Relaunch(f"changing the layout to {self.layout} failed: {reason}")


def _store_of_launch() -> Any:
    return dist.distributed_c10d._get_default_store()


def _launch_name() -> str:
    """A prefix that no earlier mover of this process or launch has used."""
    number = int(_store_of_launch().add(f"copus-movers/{dist.get_rank()}", 1))
    return f"copus-mover-{number}"
