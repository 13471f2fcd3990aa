"""Process groups of layouts that are not in use, kept after a change or built before one. On many
ranks it takes long to build and to destroy them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from megatron.trainer.config.layout import Layout
from megatron.trainer.distributed.process_groups import (
    IdleGroups,
    destroy_groups,
    release_model,
    set_groups_aside,
    use_groups,
)


class GroupStore:
    """Groups of a bounded number of other layouts; the same calls on every rank.

    Args:
        most: layouts to keep; each holds some twenty groups, their sockets and threads, and with
            NCCL the memory of those that were used.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: OrderedDict[Layout, IdleGroups] = OrderedDict()

    @property
    def layouts(self) -> list[Layout]:
        """Whose groups are there, the one that was idle longest first."""
        return list(self._idle)

    def obtain(self, layout: Layout, build: Callable[[], Any]) -> Any:
        """The groups of a layout, kept or built now, in use. Collective; none are in use before."""
        idle = self._idle.pop(layout, None)
        return build() if idle is None else use_groups(idle)

    def leave(self, layout: Layout, to: Layout) -> None:
        """Takes the groups in use out of use, once the model is gone: keeps or destroys them.
        Collective.

        Args:
            layout: whose groups they are.
            to: whose groups are obtained next.
        """
        if self._most == 0:
            destroy_groups(linger=True)
            return
        release_model()
        # Out of reach of the bound until it is obtained.
        following = self._idle.pop(to, None)
        self._keep(layout, set_groups_aside())
        if following is not None:
            self._idle[to] = following

    def build_ahead(self, now: Layout, others: Mapping[Layout, Callable[[], Any]]) -> int:
        """Builds the groups of likely next layouts while the present one is in use. Collective.

        Args:
            others: what builds them, most likely first.

        Returns:
            How many layouts were built.
        """
        wanted = [layout for layout in others if layout != now][: self._most]
        for layout in reversed(wanted):
            if layout in self._idle:
                self._idle.move_to_end(layout)
        missing = [layout for layout in reversed(wanted) if layout not in self._idle]
        for layout in missing:
            in_use = set_groups_aside()
            try:
                others[layout]()
                self._keep(layout, set_groups_aside())
            finally:
                use_groups(in_use)
        return len(missing)

    def _keep(self, layout: Layout, idle: IdleGroups) -> None:
        self._idle[layout] = idle
        while len(self._idle) > self._most:
            _, old = self._idle.popitem(last=False)
            use_groups(old)
            destroy_groups(wait=False)

    def forget(self) -> None:
        """Destroys what is kept, after those in use were; after a failure ranks may differ in what
        they keep. Not collective."""
        for old in self._idle.values():
            use_groups(old)
            destroy_groups(wait=False)
        self._idle.clear()

    def close(self) -> None:
        """Destroys what is kept; those in use stay. Not collective."""
        if self._idle:
            in_use = set_groups_aside()
            self.forget()
            use_groups(in_use)
