"""One change of layout, phase by phase, and the way back.

In every phase each rank works alone first, and in some phases all ranks then work together. All
ranks vote after each part, so that a rank that fails alone never leaves the others in a collective.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from copus_ext.reshard import verify
from copus_ext.reshard.consensus import Consensus, Deadline
from copus_ext.reshard.group_store import GroupStore
from copus_ext.reshard.host import LayoutHost
from copus_ext.reshard.peak import MovePeak
from copus_ext.reshard.phases import BACK, PHASES, TOGETHER, PhaseFailed, ReshardResult
from copus_ext.reshard.plan import ReshardPlan, make_plan
from copus_ext.reshard.saved_state import (
    SavedState,
    adam_steps,
    copy_all,
    extract,
    masters_to_weights,
    prefault,
    restore_counts,
    share_weights,
)
from copus_ext.reshard.transfer import Transfer
from megatron.trainer.common.errors import Relaunch
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.config.layout import Layout
from megatron.trainer.distributed.process_groups import await_closed, destroy_groups
from megatron.trainer.distributed.sharding import Record, digest
from megatron.trainer.model.shards import Shards


@dataclass(frozen=True, kw_only=True)
class ReshardContext:
    """What the changes of one job have in common."""

    group: Callable[[], Any]
    """The group of all ranks for the messages."""
    renew_group: Callable[[], None]
    """Replaces that group. Collective."""
    store: GroupStore
    """Process groups of other layouts."""
    note: Callable[..., None]
    """Writes the journal, on rank 0."""
    fault: Callable[[str], None]
    """Called as each part of a phase begins."""
    is_sample: bool
    """Verify a sixteenth of the tensors."""
    message_timeout_s: float
    """For one message."""


@dataclass(kw_only=True)
class _Built:
    """A layout as far as it has been built."""

    target: Any
    groups: Any = None
    model: Any = None
    optimizer: Any = None
    shards: Shards | None = None
    of_all_ranks: list[list[Record]] = field(default_factory=list)
    """Records by rank, where no arithmetic knows them."""

    def drop(self) -> None:
        """Releases everything, so that the groups can be destroyed."""
        model, self.model = self.model, None
        self.groups = self.optimizer = self.shards = None
        if model is not None:
            model.detach_hooks()


class Change:
    """One change of layout.

    Args:
        context: of all changes of the job.
        host: the job, at a step boundary.
        settings: of the steps after the change.
    """

    def __init__(
        self,
        context: ReshardContext,
        host: LayoutHost,
        layout: Layout,
        settings: StepSettings,
        consensus: Consensus,
        deadline: Deadline,
    ) -> None:
        self.context, self.host, self.layout, self.settings = context, host, layout, settings
        self.consensus, self.deadline = consensus, deadline
        self.result, self._peak = ReshardResult(), MovePeak()
        self._wanted = ""
        self._own: Shards | None = None
        self._source: list[list[Record]] = []
        self.saved: SavedState | None = None
        self.new: _Built | None = None

    def forget(self) -> None:
        """Releases all state; an exception under way may keep this object alive."""
        self.saved = self.new = self._own = None

    def run(self) -> ReshardResult:
        """All phases, and the way back if one fails."""
        started = time.perf_counter()
        failed = self._forward()
        if failed is not None:
            self.result.reason = failed[1]
            if PHASES.index(failed[0]) >= PHASES.index("tear down"):
                self._back()
                self.result.kind = "rolled_back"
        self.result.pause_s = time.perf_counter() - started
        self.result.peak_bytes = self._peak.bytes
        return self.result

    def _forward(self) -> tuple[str, str] | None:
        """Brings the job to the new layout.

        Returns:
            None, or the phase that failed and why.
        """
        try:
            plan, keys = self._phase("prepare", self._prepare, self._agree)
            self._phase("drain", lambda: self._note("relayout.begin"), lambda _: self._drain())
            keys = verify.checked_keys(keys, sample=self.context.is_sample)
            self.saved = self._phase(
                "extract", lambda: self._extract(keys), lambda x: self._share(x[0], x[1], keys)
            )
            self._phase("tear down", self._release, lambda _: self._leave())
            self.new = _Built(target=self._target)
            self._build(self.new)
            transfer = self._phase("copy", lambda: self._copy_own(plan))
            self._phase("transfer", _nothing, lambda _: transfer.exchange())
            self.result.num_messages = transfer.num_messages
            self._fill_and_verify(self.new)
            self._phase("commit", _nothing, lambda _: self._note("relayout.commit"))
        except PhaseFailed as error:
            return error.phase, str(error)
        self.result.kind = "moved"
        self.host.state.settings = self.settings
        try:
            self._phase("resume", lambda: self._install(self.new))
            return None
        except PhaseFailed as error:
            reason = str(error)
        raise Relaunch(f"changing the layout to {self.layout} failed: {reason}")

    def _phase(
        self,
        name: str,
        alone: Callable[[], Any],
        together: Callable[[Any], Any] | None = None,
        *,
        label: str = "",
    ) -> Any:
        """Does one phase; all ranks vote after each of its parts.

        Args:
            alone: the part that waits for no other rank.
            together: the part of all ranks; gets the result of `alone`.

        Returns:
            The result of the last part.

        Raises:
            PhaseFailed: on every rank, if it failed on any.
            NoAnswer: a rank has not voted.
        """
        topic, started = label + name, time.perf_counter()
        try:
            with self.host.span(f"layout: {topic}"):
                result = self._part(name, topic, alone)
                if together is not None:
                    own = result
                    result = self._part(name, topic + TOGETHER, lambda: together(own))
            return result
        finally:
            self.result.phases[topic] = time.perf_counter() - started
            self._peak.look()

    def _part(self, name: str, topic: str, act: Callable[[], Any]) -> Any:
        def part() -> Any:
            self.context.fault(topic)
            return act()

        result, problems = self.consensus.carry_out(
            topic, part, deadline=self.deadline, is_collective=topic.endswith(TOGETHER)
        )
        if problems:
            raise PhaseFailed(name, problems)
        return result

    def _note(self, kind: str) -> None:
        if dist.get_rank() == 0:
            iteration = self.host.state.iteration
            self.context.note(kind, iteration=iteration, to=str(self.layout))

    def _prepare(self) -> ReshardPlan | None:
        """All that this rank can check before: legality, the plan, memory."""
        host = self.host
        self._target = host.target(self.layout)
        problems = host.cut_problems(self.settings, self.layout)
        if problems:
            raise ValueError("; ".join(problems))
        plan = host.plan(self.layout)
        _, *present = host.present
        self._own = own = host.shards(*present)
        if plan is not None and digest(own.records) != digest(plan.source[dist.get_rank()]):
            raise ValueError("the shards of this model do not match the reshard plan")
        host.check_memory(plan, self._target)
        what = plan.digest() if plan is not None else ""
        self._wanted = f"{self.layout} {self.settings} {host.state.iteration} {what}"
        if dist.get_rank() == 0:
            self.consensus.share("change", self._wanted)
        return plan

    def _agree(self, plan: ReshardPlan | None) -> tuple[ReshardPlan | None, list[str]]:
        """All ranks want the same. Returns the plan, if it is known already, and the names of all
        tensors."""
        of_rank_0 = self.consensus.share("change")
        if of_rank_0 != self._wanted:
            raise ValueError(f"this rank wants {self._wanted!r} and rank 0 {of_rank_0!r}")
        if plan is not None:
            self._count_bytes(plan)
            return plan, plan.keys
        assert self._own is not None
        self._source = self._of_all_ranks(self._own.records)
        return None, sorted({record.key for own in self._source for record in own})

    def _plan_of_live(self) -> ReshardPlan:
        """The plan from what the ranks hold in truth, before and now."""
        assert self.new is not None
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None
        plan = make_plan(self._source, self.new.of_all_ranks, ranks_per_node=per_node)
        self._count_bytes(plan)
        return plan

    def _of_all_ranks(self, records: list[Record]) -> list[list[Record]]:
        group = self.context.group()
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, records, group=group)
        return found

    def _count_bytes(self, plan: ReshardPlan) -> None:
        result = self.result
        result.wire_bytes, result.minimum_bytes = plan.wire_bytes, plan.minimum_bytes
        result.busiest_bytes = plan.busiest_bytes

    def _drain(self) -> None:
        self.host.finish_saving()

    def _extract(self, keys: list[str]) -> tuple[SavedState, Any]:
        assert self._own is not None
        target, _, optimizer, _ = self.host.present
        saved, self._own = extract(target, optimizer, self._own), None
        return saved, verify.local_sums(saved.shards, keys)

    def _share(self, saved: SavedState, own: Any, keys: list[str]) -> SavedState:
        """Adds what all ranks know together: the sums, and the step count, which a rank without
        parameters lacks."""
        step = torch.tensor([saved.step], device=own.device)
        dist.all_reduce(step, op=dist.ReduceOp.MAX, group=self.context.group())
        sums = verify.all_sums(own, keys, group=self.context.group())
        return replace(saved, sums=sums, step=int(step.item()))

    def _release(self) -> None:
        """Releases the old layout, unless this rank has done so before."""
        if not self.host.is_released:
            self.host.release()

    def _leave(self) -> None:
        """Takes the groups of the old layout out of use."""
        assert self.saved is not None
        self.context.store.leave(self.saved.target.layout, self.layout)

    def _build(self, built: _Built, label: str = "") -> None:
        """Groups, model and optimizer of a layout, with no state yet."""
        saved, host, target = self.saved, self.host, built.target
        assert saved is not None

        def groups() -> Any:
            return self.context.store.obtain(target.layout, lambda: host.build_groups(target))

        built.groups = self._phase("groups", _nothing, lambda _: groups(), label=label)

        def model() -> None:
            built.model = host.build_model(target, built.groups)

        def optimizer() -> None:
            built.optimizer = host.build_optimizer(target, built.model, built.groups)
            restore_counts(built.optimizer, step=saved.step, scaler=saved.scaler)
            built.shards = host.shards(built.model, built.optimizer, built.groups)
            if self._source:
                built.of_all_ranks = self._of_all_ranks(built.shards.records)
            prefault(built.shards)

        self._phase("model", model, label=label)
        self._phase("optimizer", _nothing, lambda _: optimizer(), label=label)

    def _copy_own(self, plan: ReshardPlan | None) -> Transfer:
        """Copies what stays on this rank and prepares the messages."""
        saved, new = self.saved, self.new
        plan = plan or self._plan_of_live()
        assert saved is not None and new is not None and new.shards is not None
        if new.shards.records != plan.target[dist.get_rank()]:
            raise ValueError("shards do not match the reshard plan")
        transfer = Transfer(
            plan,
            source=saved.shards,
            target=new.shards,
            group=self.context.group(),
            timeout_s=self.context.message_timeout_s,
        )
        transfer.copy_own()
        return transfer

    def _fill_and_verify(self, built: _Built, label: str = "") -> None:
        """Sets weights from the masters, and checks that no element of the state has changed."""
        saved, model, shards = self.saved, built.model, built.shards
        assert saved is not None and shards is not None
        self._phase(
            "weights",
            lambda: masters_to_weights(built.optimizer),
            lambda _: share_weights(built.target, model, timeout_s=self.context.message_timeout_s),
            label=label,
        )
        keys = sorted({name.split(".", 1)[1] for name in saved.sums})

        def own() -> tuple[Any, Any]:
            verify.check_weights(model, shards, built.groups, keys)
            if (steps := adam_steps(built.optimizer)) not in (None, saved.step):
                raise verify.Mismatch(f"{steps} steps instead of {saved.step}")
            return verify.local_sums(shards, keys), verify.weight_sum(model, built.groups, keys)

        def compare(own: tuple[Any, Any]) -> None:
            sums = verify.all_sums(own[0], keys, group=self.context.group())
            verify.check_replicas(own[1], built.groups)
            verify.compare(saved.sums, sums)

        self._phase("verify", own, compare, label=label)

    def _install(self, built: _Built | None) -> None:
        """Lets the job go on with what was built, and releases what was saved."""
        assert built is not None and built.model is not None
        self.saved = None
        await_closed()
        self.host.install(built.target, built.groups, built.model, built.optimizer)

    def _back(self) -> None:
        """Rebuilds the old layout from what this rank has saved.

        Raises:
            Relaunch: that failed too.
        """
        saved, new = self.saved, self.new
        assert saved is not None
        old = _Built(target=saved.target)

        def release() -> None:
            self._release()
            if new is not None:
                new.drop()

        def destroy() -> None:
            destroy_groups()
            self.context.store.forget()
            # Messages of a transfer that broke off must not meet those of the next.
            self.context.renew_group()

        def fill() -> None:
            assert old.shards is not None
            copy_all(saved.shards, old.shards)

        try:
            self._phase("tear down", release, lambda _: destroy(), label=BACK)
            self._build(old, BACK)
            self._phase("copy", fill, label=BACK)
            self._fill_and_verify(old, BACK)
            self._phase("resume", lambda: self._install(old), label=BACK)
            return
        except PhaseFailed as error:
            reason = f"{self.result.reason}; going back failed too: {error}"
        raise Relaunch(f"changing the layout to {self.layout} failed: {reason}")


def _nothing() -> None:
    pass
