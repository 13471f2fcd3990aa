"""Sums see every change of the state and nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from copus_ext.reshard import verify
from copus_ext.reshard.saved_state import _alone, adam_steps
from copus_ext.reshard.verify import Mismatch, checked_keys, compare, local_sums, sums_of
from megatron.trainer.common.device import use_device
from megatron.trainer.distributed.sharding import Record, records_of_block
from megatron.trainer.model.shards import KINDS, Shards

State = dict[str, dict[str, torch.Tensor]]
"""By tensor and kind."""


def random_state(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> State:
    """Any bits, those of NaN among them."""
    draw = torch.Generator().manual_seed(seed)
    return {
        key: {
            kind: torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=draw).view(
                torch.float32
            )
            for kind in KINDS
        }
        for key, shape in shapes.items()
    }


def shards_of(state: State, cuts: dict[str, list[int]], *, is_first: bool = True) -> Shards:
    """All of the state, every tensor cut at some of its elements; each part is a shard."""
    records: list[Record] = []
    tensors = []
    for key, kinds in state.items():
        shape = tuple(kinds["param"].shape)
        size = math.prod(shape)
        for start, stop in itertools.pairwise(sorted({0, size, *cuts.get(key, [])})):
            records += records_of_block(
                key=key,
                shape=shape,
                corner=(0,) * len(shape),
                block=shape,
                start=start,
                stop=stop,
                shard=len(tensors),
                offset=0,
                is_first=is_first,
            )
            tensors.append({k: kinds[k].reshape(-1)[start:stop].clone() for k in KINDS})
    return Shards(records=records, tensors=tensors)


def sums(state: State, cuts: dict[str, list[int]] | None = None) -> dict[str, int]:
    keys = sorted(state)
    return sums_of(local_sums(shards_of(state, cuts or {}), keys), keys)


@st.composite
def cut_states(draw: st.DrawFn) -> tuple[State, dict[str, list[int]]]:
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
    shapes = {f"k{i}": draw(sizes) for i in range(draw(st.integers(1, 3)))}
    cuts = {
        key: draw(st.lists(st.integers(0, math.prod(shape)), max_size=5))
        for key, shape in shapes.items()
    }
    return random_state(shapes, draw(st.integers(0, 99))), cuts


@settings(max_examples=40)
@given(cut_states())
def test_sums_do_not_depend_on_who_holds_what(case: tuple[State, dict[str, list[int]]]) -> None:
    state, cuts = case
    assert sums(state) == sums(state, cuts)


def test_the_sum_is_what_is_documented() -> None:
    state = random_state({"k": (2, 3)})
    rows, columns = (verify.axis_weights("k", axis, 0, n).tolist() for axis, n in ((0, 2), (1, 3)))
    bits = state["k"]["param"].view(torch.int32).tolist()

    def product(i: int, j: int) -> int:
        return rows[i] * bits[i][j] * columns[j]

    total = sum(product(i, j) for i in range(2) for j in range(3)) % 2**64
    assert sums(state)["param.k"] % 2**64 == total


def test_every_single_bit_counts() -> None:
    state = random_state({"k": (2, 2)})
    before = sums(state)
    for kind, place, bit in itertools.product(KINDS, range(4), range(32)):
        bits = state["k"][kind].view(-1).view(torch.int32)
        mask = -(2**31) if bit == 31 else 1 << bit
        bits[place] ^= mask
        after = sums(state)
        bits[place] ^= mask
        assert {name for name in before if before[name] != after[name]} == {f"{kind}.k"}
    assert sums(state) == before
    state = random_state({"k": (1, 24)})
    before, row = sums(state), state["k"]["param"][0]
    for a, b in itertools.combinations(range(24), 2):
        row[[a, b]] *= -1
        assert sums(state) != before, "two signs in a row"
        row[[a, b]] *= -1


def swapped(axis: int, one: int, other: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def act(tensor: torch.Tensor) -> torch.Tensor:
        order = list(range(tensor.shape[axis]))
        order[one], order[other] = order[other], order[one]
        return tensor.index_select(axis, torch.tensor(order))

    return act


MUTATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gate and up": lambda t: torch.cat([t[3:], t[:3]]),
    "shifted by one": lambda t: t.reshape(-1).roll(1).view(t.shape),
    "transposed": lambda t: t.reshape(-1).view(t.shape[::-1]).t().contiguous(),
    "sent twice": lambda t: torch.cat([t[:2], t[:2], t[4:]]),
    "dropped": lambda t: torch.cat([t[:1], torch.zeros_like(t[1:2]), t[2:]]),
    **{f"rows {a} {b}": swapped(0, a, b) for a, b in itertools.combinations(range(6), 2)},
    **{f"columns {a} {b}": swapped(1, a, b) for a, b in itertools.combinations(range(4), 2)},
}


def test_elements_kinds_and_tensors_out_of_place_are_seen() -> None:
    state = random_state({"decoder.fc1": (6, 4)})
    before = sums(state)
    for mutate, kind in itertools.product(MUTATIONS.values(), KINDS):
        wrong = {"decoder.fc1": {**state["decoder.fc1"]}}
        wrong["decoder.fc1"][kind] = mutate(state["decoder.fc1"][kind])
        with pytest.raises(Mismatch, match=rf"1 of 4 sums changed.*{kind}\.decoder\.fc1"):
            compare(before, sums(wrong))
    state = random_state({"a": (3, 4), "b": (3, 4)})
    tensors = state["a"]
    kinds = {**tensors, "exp_avg": tensors["exp_avg_sq"], "exp_avg_sq": tensors["exp_avg"]}
    for wrong in ({**state, "a": kinds}, {"a": state["b"], "b": state["a"]}, {"a": state["a"]}):
        with pytest.raises(Mismatch):
            compare(sums(state), sums(wrong))


@pytest.mark.parametrize("num_copies", [1, 3])
def test_copies_count_once_and_must_be_equal(num_copies: int) -> None:
    state, keys = random_state({"norm": (8,)}), ["norm"]
    first = local_sums(shards_of(state, {}), keys)
    copies = [shards_of(state, {"norm": [3]}, is_first=False) for _ in range(num_copies)]
    total = first + sum(local_sums(copy, keys) for copy in copies)
    assert sums_of(total, keys) == sums(state)
    copies[-1].tensors[1]["exp_avg"].view(torch.int32)[2] ^= 1
    with pytest.raises(Mismatch, match="copies of 1 tensors differ, the first: norm"):
        sums_of(first + sum(local_sums(copy, keys) for copy in copies), keys)
    lost = Shards(records=copies[0].records[:1], tensors=copies[0].tensors)
    with pytest.raises(Mismatch, match="copies"):
        sums_of(first + local_sums(lost, keys), keys)


def test_a_sample_is_a_sixteenth_and_never_nothing() -> None:
    keys = [f"k{i:03}" for i in range(160)]
    assert checked_keys(keys[::-1] * 2, sample=False) == keys
    assert checked_keys(keys, sample=True) == keys[::16]
    assert checked_keys(["only"], sample=True) == ["only"]


def with_weights(
    monkeypatch: pytest.MonkeyPatch, weights: Iterable[tuple[Record, torch.Tensor]]
) -> None:
    monkeypatch.setattr(verify, "weights_of", lambda model, groups: weights)


NOTHING: Any = None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_the_rounded_masters(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    master = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    whole = Record("w", (4, 6), (0, 0), (4, 6), 0, 0, True)
    held = shards_of({"w": dict.fromkeys(KINDS, master)}, {"w": [3, 17]})
    weight = master.to(dtype)
    with_weights(monkeypatch, [(whole, weight)])
    verify.check_weights(NOTHING, held, NOTHING)
    for place in range(24):
        wrong = weight.clone()
        flat = wrong.view(-1)
        flat[place] = torch.nextafter(flat[place], torch.tensor(9, dtype=dtype))
        with_weights(monkeypatch, [(whole, wrong)])
        with pytest.raises(Mismatch, match="w is not its rounded master"):
            verify.check_weights(NOTHING, held, NOTHING)


def test_weights_of_a_stacked_layer_find_their_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    master = torch.arange(24.0).view(2, 3, 4)
    held = shards_of({"w": dict.fromkeys(KINDS, master)}, {"w": [5]})
    places = [(Record("w", (2, 3, 4), (i, 0, 0), (i + 1, 3, 4), 0, 0, True)) for i in range(2)]
    with_weights(monkeypatch, list(zip(places, master)))
    verify.check_weights(NOTHING, held, NOTHING)
    with_weights(monkeypatch, list(zip(places, master.flip(0))))
    with pytest.raises(Mismatch):
        verify.check_weights(NOTHING, held, NOTHING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_number_tells_replicas_apart(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    whole = Record("w", (4, 6), (0, 0), (4, 6), 0, 0, True)
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    sizes = {n: SimpleNamespace(size=lambda n=n: n) for n in (1, 2)}
    two: Any = SimpleNamespace(dp_cp=sizes[2], expt_dp=sizes[2])
    found = set()
    for place in range(25):
        other = weight.clone()
        if place:
            other.view(-1).view(torch.uint8)[place - 1] ^= 1
        with_weights(monkeypatch, [(whole, other)])
        with use_device("cpu"):
            found.add(tuple(verify.weight_sum(NOTHING, two).tolist()))
    assert len(found) == 25
    expert = Record("decoder.layers.mlp.experts.experts.w", (4, 6), (0, 0), (4, 6), 0, 0, True)
    with_weights(monkeypatch, [(whole, weight), (expert, weight)])
    with use_device("cpu"):
        for dense, copies in itertools.product((1, 2), repeat=2):
            groups: Any = SimpleNamespace(dp_cp=sizes[dense], expt_dp=sizes[copies])
            is_compared = [bool(x) for x in verify.weight_sum(NOTHING, groups).tolist()]
            assert is_compared == [dense > 1, copies > 1]


def optimizer(*steps: int | None) -> Any:
    """Groups that count, groups without parameters on this rank, which need not, and Muon's."""
    groups = [{"params": []} if n is None else {"step": n, "params": [0]} for n in steps]
    groups = [{"betas": (0.9, 0.99), **group} for group in groups] + [{"params": [0]}]
    return SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))


def test_groups_must_count_the_same_steps() -> None:
    assert adam_steps(optimizer(3, None, 3)) == 3
    assert adam_steps(optimizer(None)) is None
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        adam_steps(optimizer(3, 4))


def test_only_buffers_that_hold_more_than_the_shards_are_copied() -> None:
    full, half, own = torch.arange(10.0), torch.arange(20.0), torch.arange(10.0)
    shards = [
        {"param": full[:4], "exp_avg": own[:5], "exp_avg_sq": half[:5]},
        {"param": full[4:9], "exp_avg": own[5:], "exp_avg_sq": half[10:15]},
    ]
    for old, kept in zip(shards, _alone(shards), strict=True):
        assert kept.keys() == old.keys()
        assert all(torch.equal(kept[kind], old[kind]) for kind in KINDS)
        for kind in ("param", "exp_avg"):
            assert kept[kind].data_ptr() == old[kind].data_ptr()
        assert kept["exp_avg_sq"].untyped_storage().nbytes() == 20


def test_the_sums_of_a_rank_without_shards_lie_where_those_of_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL adds up nothing in memory of the host."""
    nothing = Shards(records=[], tensors=[])
    with use_device("cpu"):
        found = local_sums(nothing, ["a", "b"])
    assert found.device.type == "cpu" and not found.any()
    gpu = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu)
    with FakeTensorMode():
        assert local_sums(nothing, ["a", "b"]).device == gpu
