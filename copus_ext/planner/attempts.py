"""What became of the attempts to measure configurations, as a profile records it."""

from __future__ import annotations

from collections import Counter

from copus_ext.planner.profile import ProfileStore

BEGUN, DONE, DROPPED, OUT_OF_MEMORY = "begun", "done", "dropped", "out_of_memory"
"""How attempts are recorded. One is dropped where its end says nothing of the configuration."""
FORGOTTEN = "forgotten"
"""All attempts before it."""


class Attempts:
    """What became of the attempts that a profile records.

    Args:
        store: the profile.
    """

    def __init__(self, store: ProfileStore) -> None:
        self._store = store
        self._unfinished: Counter[tuple[str, int]] = Counter()
        self._too_large: dict[str, int] = {}
        for record in store.attempts():
            name, size = record.get("configuration"), record.get("micro_batch_size")
            if record["attempt"] == FORGOTTEN:
                self._clear()
            elif isinstance(name, str) and isinstance(size, int):
                self._take(str(record["attempt"]), name, size)

    @property
    def too_large(self) -> list[tuple[str, int]]:
        """What ran out of memory: configurations as texts with a micro-batch of 1, each with the
        smallest micro-batch that did."""
        return list(self._too_large.items())

    def _clear(self) -> None:
        self._unfinished.clear()
        self._too_large.clear()

    def _take(self, attempt: str, name: str, size: int) -> None:
        if attempt == BEGUN:
            self._unfinished[name, size] += 1
            return
        del self._unfinished[name, size]
        least = self._too_large.get(name)
        if attempt == OUT_OF_MEMORY:
            self._too_large[name] = size if least is None else min(size, least)
        elif attempt == DONE and least is not None and least <= size:
            # Another program may have had the memory then.
            del self._too_large[name]
