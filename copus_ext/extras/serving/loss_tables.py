"""The least loss increase of every range of layers, by how many of its layers have which bits.

All layers cost the same seconds and bytes, so that a stage's costs depend on these numbers alone.
Which layer has which bits matters for the loss only, and is settled here once.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class LossTables:
    """Tables that grow with the number of layers of a range.

    Args:
        loss_increase: [layers, bits].
        ends_only: leave out ranges that touch neither end, which two devices do not have.
    """

    def __init__(self, loss_increase: Any, *, ends_only: bool = False) -> None:
        self.loss_increase = np.asarray(loss_increase, dtype=float)
        self.num_layers, self.num_bits = self.loss_increase.shape
        self.ends_only = ends_only
        self._radix = (self.num_layers + 1) ** np.arange(self.num_bits - 1, -1, -1)
        self._keys = [np.zeros(1, dtype=np.int64)]
        self.counts = [np.zeros((1, self.num_bits), dtype=np.int64)]
        """By length of a range: [choices, bits] numbers of layers."""
        self.least = [np.zeros((self.num_layers + 1, 1))]
        """By length: [starts, choices] the least loss increase."""

    def starts(self, length: int) -> Any:
        """First layers of the ranges of a length, in the order of `least`."""
        last = self.num_layers - length
        if self.ends_only and length:
            return np.unique([0, last])
        return np.arange(last + 1)

    def grow(self, length: int) -> None:
        """Makes the tables up to a length of ranges."""
        while len(self.least) <= length:
            m = len(self.least)
            keys = np.unique((self._keys[-1][:, None] + self._radix).reshape(-1))
            counts = keys[:, None] // self._radix % (self.num_layers + 1)
            table = np.full((len(self.starts(m)), len(keys)), np.inf)
            for bit in range(self.num_bits):
                has = counts[:, bit] > 0
                before = np.searchsorted(self._keys[-1], keys[has] - self._radix[bit])
                rows, added = self._shorter(m)
                found = self.least[-1][rows][:, before] + self.loss_increase[added, bit][:, None]
                table[:, has] = np.minimum(table[:, has], found)
            self._keys.append(keys)
            self.counts.append(counts)
            self.least.append(table)

    def _shorter(self, length: int) -> tuple[Any, Any]:
        """For each range of a length: the row of a range one layer shorter, and the layer that it
        lacks."""
        starts = self.starts(length)
        if not self.ends_only or length == 1:
            return np.arange(len(starts)), starts + length - 1
        # The first layers without their last one, the last layers without their first one.
        rows = np.where(starts == 0, 0, len(self.starts(length - 1)) - 1)
        return rows, np.where(starts == 0, length - 1, starts)

    def bits_of(self, start: int, length: int, choice: int) -> tuple[int, ...]:
        """Which bits (by index) each layer of a range has, where the loss increase is least."""
        chosen: dict[int, int] = {}
        key = self._keys[length][choice]
        for m in range(length, 0, -1):
            rows, added = self._shorter(m)
            row = int(np.searchsorted(self.starts(m), start))
            best = (np.inf, 0, 0)
            for bit in range(self.num_bits):
                if key // self._radix[bit] % (self.num_layers + 1):
                    before = int(np.searchsorted(self._keys[m - 1], key - self._radix[bit]))
                    value = self.least[m - 1][rows[row], before]
                    value += self.loss_increase[added[row], bit]
                    best = min(best, (float(value), bit, before))
            chosen[int(added[row])] = best[1]
            start = int(self.starts(m - 1)[rows[row]])
            key = self._keys[m - 1][best[2]]
        return tuple(chosen[layer] for layer in sorted(chosen))
