"""The plan of least objective, exactly: bits of every layer and stages, for given micro-batches.

The search bounds and branches. A node has intervals for the longest stage of both phases. Its bound
charges the lower ends and lets no stage exceed the upper ones. Then a path through (devices, layers
done) of least cost is a bound, with a price on the loss increase. Where the price leaves a gap, the
paths that may still win are listed, without those that others beat in seconds and in loss.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.extras.serving.loss_tables import LossTables
from copus_ext.extras.serving.problem import TOLERANCE, Costs, ServingProblem, Stage, costs_of
from copus_ext.extras.serving.relaxation import Prices, relax

_PRICE_STEPS = 8
"""Prices of the loss increase that a node tries."""
_FURTHER = (1.03, 1.1, 1.3, 2.0, np.inf)
"""How far above the least bound a search looks, one after the other."""
_LOWER = 0.998
"""Columns are left out anew when the best plan is by this factor better than at the last time."""
_WIDE = 0.5
"""Share of a node's gap that its charges must explain for its intervals to be cut."""


@dataclass(frozen=True, kw_only=True)
class Found:
    stages: tuple[Stage, ...]
    costs: Costs


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Ways to fill a range of layers on devices of one kind, ordered by range: [n] arrays of the
    first layer, the layers, the row of `LossTables.counts`, seconds of the stage in prefill and for
    one further token, and the least loss increase."""

    start: Any
    length: Any
    choice: Any
    prefill: Any
    decode: Any
    loss: Any
    ranges: Any
    """Where the columns of each range begin."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, kw_only=True)
class _Node:
    """Intervals of the longest stages, in prefill and in decoding."""

    low: tuple[float, float]
    """Charged for them."""
    high: tuple[float, float]
    """No stage is longer."""


@dataclass(frozen=True, kw_only=True)
class _Path:
    picked: tuple[tuple[int, int, int], ...]
    """Device, its kind, and the column, of each stage."""
    value: float
    """What a bound charges for it."""
    loss: float


class Search:
    """Finds the best plan of one problem."""

    def __init__(
        self,
        problem: ServingProblem,
        *,
        tables: LossTables | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.p = problem
        few = problem.num_devices <= 2
        self.tables = tables or LossTables(problem.loss_increase, ends_only=few)
        self.prices = prices or relax(problem)
        self.kinds, self.kind_of = self._kinds()
        self.pieces = np.array(problem.objective.decode)
        self.best: Found | None = None
        self.cutoff = np.inf
        self.num_nodes = 0

    def _kinds(self) -> tuple[list[int], list[int]]:
        """One device of each kind, and the kind of every device."""
        p, seen, kind_of = self.p, {}, []
        for j in range(p.num_devices):
            phases = (p.prefill, p.decode)
            parts = [(*x.layer_s[j], x.first_s[j], x.last_s[j], x.p2p_time_s[j]) for x in phases]
            kind_of.append(seen.setdefault((*parts, p.capacity_bytes[j]), (len(seen), j))[0])
        return [j for _, j in seen.values()], kind_of

    def run(self, cutoff: float = np.inf) -> Found | None:
        """The best plan, if its objective is below `cutoff`; None if no plan is."""
        self.cutoff = cutoff
        if self.prices.bound >= self._target:
            return None
        longest = self._longest()
        self.columns = [self._dense(kind, longest[kind]) for kind in range(len(self.kinds))]
        if self._drop_dear() == 0:
            return self.best
        dropped_at = self.cutoff
        counter = itertools.count()
        root = _Node(low=(0.0, 0.0), high=(np.inf, np.inf))
        queue: list[tuple[float, int, _Node]] = [(self.prices.bound, next(counter), root)]
        while queue:
            bound, _, node = heapq.heappop(queue)
            if bound >= self._target:
                break
            self.num_nodes += 1
            if self.cutoff < _LOWER * dropped_at:
                dropped_at = self.cutoff
                self._drop_dear()
            for child, least in self._explore(node):
                if least < self._target:
                    heapq.heappush(queue, (max(bound, least), next(counter), child))
        return self.best

    @property
    def _target(self) -> float:
        """What is not below this is not better."""
        return self.cutoff - TOLERANCE * abs(self.cutoff) if np.isfinite(self.cutoff) else np.inf

    def _longest(self) -> list[int]:
        """Most layers that a stage of each kind may have in a plan that is better."""
        p, found = self.p, []
        least = [np.min(np.asarray(x.layer_s), axis=1) for x in (p.prefill, p.decode)]
        lengths = np.arange(p.num_layers + 1)
        for j in self.kinds:
            rest = p.num_layers - lengths
            prefill = lengths * least[0][j] + rest * least[0].min()
            prefill = prefill + p.objective.max_prefill * lengths * least[0][j]
            decode = lengths * least[1][j] + rest * least[1].min()
            seconds = prefill + np.max(
                [c * decode + d * lengths * least[1][j] for c, d in self.pieces], axis=0
            )
            fits = lengths * np.min(p.layer_bytes) <= p.capacity_bytes[j]
            found.append(int(lengths[fits & (seconds < self._target)].max(initial=0)))
        return found

    def _dense(self, kind: int, longest: int) -> _Columns:
        """All ways that fit into the memory of a kind of device."""
        p, j = self.p, self.kinds[kind]
        self.tables.grow(longest)
        parts: list[list[Any]] = []
        for length in range(1, longest + 1):
            counts, least = self.tables.counts[length], self.tables.least[length]
            starts = self.tables.starts(length)
            first, last = starts == 0, starts + length == p.num_layers
            held = (counts @ p.layer_bytes)[None, :] + (
                p.first_bytes * first + p.last_bytes * last
            )[:, None]
            row, choice = np.nonzero((held <= p.capacity_bytes[j]) & np.isfinite(least))
            seconds = [
                (counts @ np.asarray(x.layer_s)[j])[choice]
                + (x.first_s[j] * first + np.where(last, x.last_s[j], x.p2p_time_s[j]))[row]
                for x in (p.prefill, p.decode)
            ]
            loss = least[row, choice]
            keep = np.flatnonzero(self._can_win(length, seconds[0], seconds[1], loss))
            full = np.full(len(keep), length)
            parts.append(
                [starts[row[keep]], full, choice[keep], *(x[keep] for x in seconds), loss[keep]]
            )
        names = ("start", "length", "choice", "prefill", "decode", "loss")
        joined = [np.concatenate(x) for x in zip(*parts)] or [np.zeros(0, dtype=int)] * 6
        return _columns(dict(zip(names, joined)))

    def _can_win(self, length: int, prefill: Any, decode: Any, loss: Any) -> Any:
        """Whether stages of a length may be in a better plan: all other layers take the least
        seconds that a layer can."""
        p = self.p
        rest = [(p.num_layers - length) * np.min(x.layer_s) for x in (p.prefill, p.decode)]
        seconds = prefill * (1 + p.objective.max_prefill) + rest[0] + p.objective.theta * loss
        seconds = seconds + np.max(
            [c * (decode + rest[1]) + d * decode for c, d in self.pieces], axis=0
        )
        within = p.max_loss_increase is None or loss <= p.max_loss_increase * (1 + TOLERANCE)
        return (seconds < self._target) & within

    def _drop_dear(self) -> int:
        """Leaves out columns that no better plan has; returns how many are left."""
        if not np.isfinite(self.cutoff):
            self._price_path(_Node(low=(0.0, 0.0), high=(np.inf, np.inf)))
        costs, constant = self._costs(self.prices.pieces, self.prices.loss, uses_prices=True)
        tables = [self._table(x, v) for x, v in zip(self.columns, costs)]
        forward, backward = self._forward(tables)[0], self._backward(tables)
        for kind, x in enumerate(self.columns):
            around = np.full((self.p.num_layers + 1,) * 2, np.inf)
            for j in (j for j, own in enumerate(self.kind_of) if own == kind):
                around = np.minimum(around, forward[j][:, None] + backward[j + 1][None, :])
            through = costs[kind] + around[x.start, x.start + x.length] + constant
            keep = through < self._target
            names = ("start", "length", "choice", "prefill", "decode", "loss")
            self.columns[kind] = _columns({n: getattr(x, n)[keep] for n in names})
        self.values = [
            np.unique(np.concatenate([getattr(x, name) for x in self.columns]))
            for name in ("prefill", "decode")
        ]
        return sum(map(len, self.columns))

    def _costs(
        self,
        shares: Any,
        price: float,
        *,
        uses_prices: bool = False,
        node: _Node | None = None,
    ) -> tuple[list[Any], float]:
        """What every column of each kind costs in a bound, and what the bound has besides.

        Args:
            shares: of the pieces of decoding, 1 in all.
            uses_prices: let each stage pay for the longest ones, in place of charges.
        """
        p = self.p
        sums, longest = (float(x) for x in np.asarray(shares) @ self.pieces)
        limit, low = p.max_loss_increase, node.low if node else (0.0, 0.0)
        charged = [p.objective.max_prefill, longest]
        found = []
        if uses_prices:
            charged = [
                charged[0] - float(np.sum(self.prices.prefill)),
                charged[1] - float(np.sum(self.prices.decode)),
            ]
        for kind, x in enumerate(self.columns):
            weights = [1.0, sums]
            if uses_prices:
                alike = [j for j, own in enumerate(self.kind_of) if own == kind]
                weights[0] += float(np.mean(self.prices.prefill[alike]))
                weights[1] += float(np.mean(self.prices.decode[alike]))
            own = weights[0] * x.prefill + weights[1] * x.decode
            own = own + (p.objective.theta + price) * x.loss
            if node is not None:
                beyond = (x.prefill > node.high[0]) | (x.decode > node.high[1])
                own = np.where(beyond, np.inf, own)
            found.append(own)
        constant = max(charged[0], 0.0) * low[0] + max(charged[1], 0.0) * low[1]
        return found, constant - (price * limit if limit is not None else 0.0)

    def _table(self, x: _Columns, values: Any) -> Any:
        """[layers + 1, layers + 1] least value of a range, from its start to its end."""
        table = np.full((self.p.num_layers + 1,) * 2, np.inf)
        if len(x):
            start, end = x.start[x.ranges], (x.start + x.length)[x.ranges]
            table[start, end] = np.minimum.reduceat(values, x.ranges)
        return table

    def _forward(self, tables: list[Any]) -> tuple[Any, Any]:
        """[devices + 1, layers + 1] least value of a beginning, and where its last stage starts
        (-1: the device has none)."""
        size = self.p.num_layers + 1
        value = np.full((self.p.num_devices + 1, size), np.inf)
        came = np.full((self.p.num_devices + 1, size), -1)
        value[0, 0] = 0.0
        for j, kind in enumerate(self.kind_of):
            through = value[j][:, None] + tables[kind]
            start = through.argmin(axis=0)
            least = through[start, np.arange(size)]
            value[j + 1] = np.minimum(value[j], least)
            came[j + 1] = np.where(least < value[j], start, -1)
        return value, came

    def _backward(self, tables: list[Any]) -> Any:
        """[devices + 1, layers + 1] least value of what is still to come."""
        value = np.full((self.p.num_devices + 1, self.p.num_layers + 1), np.inf)
        value[-1, -1] = 0.0
        for j in range(self.p.num_devices - 1, -1, -1):
            through = tables[self.kind_of[j]] + value[j + 1][None, :]
            value[j] = np.minimum(value[j + 1], through.min(axis=1))
        return value

    def _shortest(self, costs: list[Any], constant: float) -> _Path | None:
        """The plan of least bound; None if none reaches the last layer."""
        tables = [self._table(x, v) for x, v in zip(self.columns, costs)]
        value, came = self._forward(tables)
        end = self.p.num_layers
        if not np.isfinite(value[-1, end]):
            return None
        picked, loss = [], 0.0
        for j in range(self.p.num_devices, 0, -1):
            start = came[j, end]
            if start < 0:
                continue
            kind = self.kind_of[j - 1]
            x = self.columns[kind]
            inside = np.flatnonzero((x.start == start) & (x.start + x.length == end))
            at = int(inside[np.argmin(costs[kind][inside])])
            picked.append((j - 1, kind, at))
            loss += float(x.loss[at])
            end = int(start)
        total = float(value[-1, self.p.num_layers]) + constant
        return _Path(picked=tuple(reversed(picked)), value=total, loss=loss)

    def _maxima(self, path: _Path) -> tuple[float, float]:
        prefill = max(float(self.columns[k].prefill[at]) for _, k, at in path.picked)
        return prefill, max(float(self.columns[k].decode[at]) for _, k, at in path.picked)

    def _offer(self, path: _Path) -> None:
        """Takes a plan if it is better than the best so far."""
        own = [(self.columns[kind], at) for _, kind, at in path.picked]
        seconds = [x.prefill[at] for x, at in own], [x.decode[at] for x, at in own]
        if self.p.objective.value(*seconds, path.loss) > self.cutoff:
            return
        stages = tuple(
            Stage(
                device=device,
                start=int(self.columns[kind].start[at]),
                bits=self._bits(kind, at),
            )
            for device, kind, at in path.picked
        )
        costs = costs_of(self.p, stages)
        if costs.fits and costs.objective < self.cutoff:
            self.best, self.cutoff = Found(stages=stages, costs=costs), costs.objective

    def _bits(self, kind: int, at: int) -> tuple[int, ...]:
        x = self.columns[kind]
        where = int(x.start[at]), int(x.length[at]), int(x.choice[at])
        return tuple(self.p.bits[b] for b in self.tables.bits_of(*where))

    def _price_path(self, node: _Node) -> tuple[float, _Path | None, float]:
        """The best bound of a node, the path there, and the price of loss there; offers every plan
        on the way."""
        limit = self.p.max_loss_increase
        low, high, price = 0.0, np.inf, self.prices.loss if limit is not None else 0.0
        best: tuple[float, _Path | None, float] = (-np.inf, None, price)
        for step in range(_PRICE_STEPS if limit is not None else 1):
            path = None
            for uses_prices in (False, True):
                costs = self._costs(self.prices.pieces, price, uses_prices=uses_prices, node=node)
                found = self._shortest(*costs)
                if found is None:
                    return np.inf, None, price
                if limit is None or found.loss <= limit * (1 + TOLERANCE):
                    self._offer(found)
                if path is None or found.value > path.value:
                    path = found
            assert path is not None
            if path.value > best[0]:
                best = path.value, path, price
            if limit is None or best[0] >= self._target or path.loss == limit:
                break
            low, high = (price, high) if path.loss > limit else (low, price)
            if high == 0.0:
                break
            unit = best[0] / max(limit, 1e-9)
            grown = 2 * price if price > 0 else 1e-3 * abs(unit)
            price = (low + high) / 2 if np.isfinite(high) else grown * (1 + step)
        return best

    def _explore(self, node: _Node) -> list[tuple[_Node, float]]:
        """Bounds a node; returns its children and their bounds."""
        # The longest stage takes as long as some column: between two of them there is nothing.
        at = [np.searchsorted(v, low) for v, low in zip(self.values, node.low)]
        if any(i == len(v) for i, v in zip(at, self.values)):
            return []
        low = float(self.values[0][at[0]]), float(self.values[1][at[1]])
        node = _Node(low=low, high=node.high)
        bound, path, price = self._price_path(node)
        if path is None or bound >= self._target:
            return []
        weights = self.p.objective.max_prefill, float(self.pieces[:, 1].max())
        longest = self._maxima(path)
        excess = [w * (x - y) for w, x, y in zip(weights, longest, node.low)]
        if max(excess) < _WIDE * (self._target - bound):
            path = self._listed(node, price)
            if path is None or path.value >= self._target:
                return []
            bound, longest = max(bound, path.value), self._maxima(path)
            excess = [w * (x - y) for w, x, y in zip(weights, longest, node.low)]
        side = int(excess[1] >= excess[0])
        if excess[side] <= TOLERANCE * abs(bound) / 4:
            return []
        values = self.values[side]
        middle = (int(at[side]) + int(np.searchsorted(values, longest[side]))) // 2

        def cut(ends: tuple[float, float], at: int) -> tuple[float, float]:
            value = float(values[at])
            return (value, ends[1]) if side == 0 else (ends[0], value)

        below = _Node(low=node.low, high=cut(node.high, middle))
        above = _Node(low=cut(node.low, middle + 1), high=node.high)
        return [(below, bound), (above, bound)]

    def _listed(self, node: _Node, price: float) -> _Path | None:
        """The plan whose charges are least under the limit of loss, exactly; None if no plan of the
        node can be better than the best. Offers all that are left at the end."""
        p, pieces = self.p, self.pieces
        num = len(pieces)
        shares = [*np.eye(num), np.asarray(self.prices.pieces)]
        bounds = [self._costs(s, price, node=node) for s in shares]
        behind = [
            self._backward([self._table(x, v) for x, v in zip(self.columns, costs)])
            for costs, _ in bounds
        ]
        losses = self._backward(
            [
                self._table(x, np.where(np.isfinite(v), x.loss, np.inf))
                for x, v in zip(self.columns, bounds[0][0])
            ]
        )
        limit = np.inf if p.max_loss_increase is None else p.max_loss_increase
        slack = limit * (1 + TOLERANCE) if np.isfinite(limit) else limit
        plain = [self._costs(s, 0.0, node=node) for s in np.eye(num)]
        constants = np.array([c for _, c in plain])
        priced = np.array([c for _, c in bounds])

        def promising(values: Any, j: int, ends: Any) -> Any:
            sums = np.concatenate(
                [values[:, :num], (values[:, :num] @ self.prices.pieces)[:, None]], axis=1
            )
            ahead = np.array([b[j, ends] for b in behind]).T
            least = (sums + price * values[:, num:] + ahead + priced).max(axis=1)
            return (least < self._target) & (values[:, num] + losses[j, ends] <= slack)

        # A label: one value per piece without the price, then the loss. `ends` are the layers done.
        values, ends = np.zeros((1, num + 1)), np.zeros(1, dtype=int)
        steps: list[tuple[Any, Any]] = []
        for j, kind in enumerate(self.kind_of):
            x = self.columns[kind]
            own = np.stack([*(v[kind] for v, _ in plain), x.loss], axis=1)
            able = np.isfinite(own[:, 0])
            nothing = np.full(len(values), -1)
            found = [(values, ends, np.arange(len(values)), nothing)]
            for start in np.unique(ends):
                rows = np.flatnonzero(ends == start)
                first, last = np.searchsorted(x.start, [start, start + 1])
                taken = first + np.flatnonzero(able[first:last])
                made = (values[rows][:, None, :] + own[None, taken]).reshape(-1, num + 1)
                row, column = np.repeat(rows, len(taken)), np.tile(taken, len(rows))
                end = x.start[column] + x.length[column]
                keep = promising(made, j + 1, end)
                found.append((made[keep], end[keep], row[keep], column[keep]))
            values, ends, row, column = (np.concatenate(part) for part in zip(*found))
            kept = _undominated(values, ends)
            values, ends = values[kept], ends[kept]
            steps.append((row[kept], column[kept]))
        done = np.flatnonzero(ends == p.num_layers)
        totals = (values[done, :num] + constants).max(axis=1)
        best: _Path | None = None
        for at in done[np.argsort(totals)]:
            value = float((values[at, :num] + constants).max())
            path = self._trace(steps, int(at), value, float(values[at, num]))
            best = best or path
            self._offer(path)
        return best

    def _trace(self, steps: list[tuple[Any, Any]], at: int, value: float, loss: float) -> _Path:
        """The path of a label, from what every device added to it."""
        picked = []
        for j in range(self.p.num_devices - 1, -1, -1):
            rows, columns = steps[j]
            if columns[at] >= 0:
                picked.append((j, self.kind_of[j], int(columns[at])))
            at = int(rows[at])
        return _Path(picked=tuple(reversed(picked)), value=value, loss=loss)


def _columns(parts: dict[str, Any]) -> _Columns:
    order = np.lexsort((parts["length"], parts["start"]))
    parts = {name: values[order] for name, values in parts.items()}
    start, length = parts["start"], parts["length"]
    new = np.ones(len(start), dtype=bool)
    new[1:] = (start[1:] != start[:-1]) | (length[1:] != length[:-1])
    return _Columns(**parts, ranges=np.flatnonzero(new))


def _undominated(values: Any, ends: Any) -> Any:
    """Which labels no other one with as many layers beats or equals in every number."""
    order = np.lexsort((*values.T[::-1], ends))
    kept: list[int] = []
    front, end = np.empty((0, values.shape[1])), -1
    for at in order:
        if ends[at] != end:
            front, end = np.empty((0, values.shape[1])), ends[at]
        if not (front <= values[at]).all(axis=1).any():
            kept.append(int(at))
            front = np.concatenate([front, values[at][None]])
    return np.array(kept, dtype=int)


def find_best(problems: list[ServingProblem]) -> tuple[int, Found] | None:
    """The best plan of several problems that differ in their micro-batches alone.

    Looks below a little more than the least bound first: few columns are left then, and what is
    found is the best. Where nothing is found there, looks further.

    Returns:
        Number of the problem and its plan, or None if none has a plan.
    """
    prices = [relax(p) for p in problems]
    order = sorted(range(len(problems)), key=lambda i: prices[i].bound)
    least = prices[order[0]].bound
    few = problems[0].num_devices <= 2
    tables = LossTables(problems[0].loss_increase, ends_only=few)
    best: tuple[int, Found] | None = None
    for share in _FURTHER:
        cutoff = least * share if least > 0 else np.inf
        for i in order:
            if prices[i].bound >= cutoff or prices[i].bound == np.inf:
                break
            found = Search(problems[i], tables=tables, prices=prices[i]).run(cutoff)
            if found is not None:
                best, cutoff = (i, found), found.costs.objective
        if best is not None or not np.isfinite(cutoff):
            break
    return best
