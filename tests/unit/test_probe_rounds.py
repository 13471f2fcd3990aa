"""The probe of links: its file, who takes part, the rounds."""

from __future__ import annotations

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from copus_ext.commands.probe_links import base_of, expected_of, parser, settings_of
from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.probe import session
from copus_ext.probe.findings import table
from copus_ext.probe.link_fit import Timed
from copus_ext.probe.record import LinkRecord, cluster_text
from copus_ext.probe.session import Place, Settings, Silence, nodes_of, place_of, tournament, within
from megatron.training.common.errors import UsageError
from tests.helpers.launch import ROOT

SIZES = (8, 4096, 1 << 16, 1 << 20, 1 << 22, 1 << 24)


def even(n: int, seed: int, spread: float) -> np.ndarray:
    """Links of 10 GB/s that scatter."""
    drawn = np.random.default_rng(seed).uniform(-spread, spread, (n, n))
    return 10e9 * np.exp(drawn)


def hosts(n: int) -> list[str]:
    return [f"node{i}" for i in range(n)]


def timed(beta: float, alpha: float = 1e-5) -> Timed:
    return Timed(num_bytes=SIZES, seconds=tuple(alpha + n / beta for n in SIZES))


HOW = {"backend": "gloo", "sizes": list(SIZES)}


def recorded(path: Path, hosts: list[str], pairs: list[tuple[int, int]]) -> LinkRecord:
    record = LinkRecord(path, hosts, HOW)
    record.begin(resume=False)
    for a, b in pairs:
        record.add({(a, b): timed(1e9 * (a + 1)), (b, a): timed(1e9 * (b + 1))}, {})
    return record


def test_finished_rounds_are_taken_up_again_by_the_names_of_the_nodes(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    recorded(path, ["a", "b", "c"], [(0, 1), (0, 2)])
    again = LinkRecord(path, ["c", "x", "a"], HOW)
    again.begin(resume=True)
    assert again.pairs == {(0, 2)}
    assert again.known[2, 0] == timed(1e9) and again.known[0, 2] == timed(3e9)
    again.add({}, {(0, 1): "no answer"})
    third = LinkRecord(path, ["c", "x", "a"], HOW)
    third.begin(resume=True)
    assert third.pairs == {(0, 2)} and not third.silent, "a silent pair is measured again"


def test_an_interrupted_probe_is_not_lost_by_a_new_start_and_a_whole_one_begins_anew(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rounds.json"
    record = recorded(path, ["a", "b"], [(0, 1)])
    before = path.read_bytes()
    with pytest.raises(UsageError, match="--resume or delete"):
        LinkRecord(path, ["a", "b"], HOW).begin(resume=False)
    with pytest.raises(UsageError, match="sizes"):
        LinkRecord(path, ["a", "b"], {**HOW, "sizes": [1, 2]}).begin(resume=True)
    assert path.read_bytes() == before
    record.done()
    for resume in (False, True):
        new = LinkRecord(path, ["a", "b"], HOW)
        new.begin(resume=resume)
        assert not new.known
        new.done()


def test_a_record_of_nonsense_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    good = {"from": "a", "to": "b", "num_bytes": [8, 9], "seconds": [1, 2]}
    links: list[Any] = [3, {}, {**good, "seconds": [1, "x"]}, {**good, "num_bytes": 7}]
    links += [{**good, "from": []}, good]
    whole = json.dumps({"hosts": ["a", "b"], **HOW, "links": links, "done": False})
    for text in (whole, "\0{{{", "[1]", '{"done": false, "links": 3}'):
        path.write_text(text)
        record = LinkRecord(path, ["a", "b"], HOW)
        record.begin(resume=True)
        assert not record.known, "half a pair is timed again"


def test_the_cluster_file_holds_the_links_and_the_planner_reads_it(tmp_path: Path) -> None:
    hosts = ["a", "b", "c"]
    record = recorded(tmp_path / "r.json", hosts, [(0, 1), (0, 2), (1, 2)])
    spec = record.cluster(preset("h100-80g:8"))
    path = tmp_path / "cluster.json"
    path.write_text(cluster_text(spec))
    read = ClusterSpec.load(path)
    assert read == spec and read.num_nodes == 3 and read.gpus_per_node == 8
    assert read.links is not None and read.links.hosts == ("a", "b", "c")
    assert read.links.bytes_per_s[0][1] == pytest.approx(1e9, rel=0.01)
    assert read.links.bytes_per_s[2][0] == pytest.approx(3e9, rel=0.01)
    assert read.links.latency_s[1][2] == pytest.approx(1e-5, rel=0.01)
    assert max(map(len, path.read_text().splitlines())) < 100 < len(path.read_text())


@pytest.mark.parametrize("n", [2, 5, 30])
def test_the_table_names_every_node(n: int) -> None:
    speeds, delays = even(n, 1, 0.2), np.full((n, n), 2e-5)
    lines = table(speeds, delays, hosts(n)).splitlines()
    assert len(lines) == n + 2 and all(host in line for host, line in zip(hosts(n), lines[1:]))
    assert "latency 20 us in the median" in lines[-1]
    speeds[0, :] = speeds[:, 0] = np.nan
    assert "?" in table(speeds, delays, hosts(n)) or n == 2
    nothing = np.full((n, n), np.nan)
    assert table(nothing, nothing, hosts(n)) == "no link was timed"


def test_the_first_process_of_every_node_probes() -> None:
    given = [(7, "a"), (7, "a"), (3, "b"), (5, "b"), (3, "b")]
    places = [{"node": node, "host": host} for node, host in given]
    assert nodes_of(places) == ([0, 2, 3], ["a", "b:1", "b:2"])


@pytest.mark.parametrize(
    ("env", "every_rank", "node"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, False, 1),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "3"}, False, 3),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "3"}, True, 5),
        ({"RANK": "5", "WORLD_SIZE": "8"}, False, 5),
    ],
)
def test_the_launcher_says_which_node_it_is(
    env: dict[str, str], every_rank: bool, node: int
) -> None:
    assert place_of(env, every_rank=every_rank).node == node


@pytest.mark.parametrize("env", [{}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_without_a_launcher_it_says_how_to_start(env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="torchrun or srun"):
        place_of(env, every_rank=False)


def a_store() -> Any:
    """A store of torch in memory."""
    return dist.HashStore()


SETTINGS = Settings(backend="gloo", sizes=SIZES, repeats=3, pair_s=0.1, timeout_s=0.1)


def at(rank: int, world_size: int = 4) -> Place:
    return Place(rank=rank, world_size=world_size, node=rank, host=f"node{rank}", local_rank=0)


def test_who_does_not_come_is_named() -> None:
    store = a_store()
    for rank in (0, 2):
        session.introduce(store, at(rank))
    with pytest.raises(Silence, match="ranks 1, 3 have not come"):
        session.gather(store, 4, 0.1)


def test_a_first_node_that_has_gone_ends_the_others() -> None:
    store = a_store()
    with pytest.raises(Silence, match="has gone"):
        session.take_part(store, at(1), 0.1)
    session.dismiss(store, 1, 0.1)
    session.take_part(store, at(1), 0.1)
    assert store.check(["bye/1"])


def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Any, n: int = 4
) -> tuple[LinkRecord, list[str], list[str]]:
    """Rounds of threads over a store in memory; what was recorded, said and lost."""
    monkeypatch.setattr(session, "_measure", measure)
    monkeypatch.setattr(session, "_MARGIN_S", 0.5)
    monkeypatch.setattr(session, "_POLL_S", 0.001)
    store, names, said = a_store(), hosts(n), []
    record = LinkRecord(tmp_path / "rounds.json", names, HOW)
    record.begin(resume=False)
    with ThreadPoolExecutor(n) as pool:
        others = [pool.submit(session.take_part, store, at(i, n), 5) for i in range(1, n)]
        session.announce(store, range(n), tournament(n), SETTINGS)
        lost = session.lead_rounds(store, tournament(n), SETTINGS, at(0, n), record, said.append)
        session.dismiss(store, n, 5)
        for other in others:
            other.result()
    return record, said, lost


def good(*_: Any) -> dict[str, Any]:
    return timed(1e9).to_json()


def test_all_rounds_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, said, lost = play(tmp_path, monkeypatch, good, n=5)
    assert record.pairs == set(itertools.combinations(range(5), 2)) and not lost
    assert [line.split(",")[0] for line in said] == [
        f"round {i} of 5: 2 pairs" for i in range(1, 6)
    ]
    assert said[-1].endswith("about 0 s left")


def test_a_silent_link_is_named_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: Any) -> dict[str, Any]:
        if args[-2] == (1, 2) and args[-1] == 2:
            raise RuntimeError("Timed out waiting 30000ms\nmore")
        return good()

    record, said, lost = play(tmp_path, monkeypatch, measure)
    assert not lost and record.silent == {(1, 2): "Timed out waiting 30000ms"}
    assert len(record.pairs) == 5
    assert "no answer between node1 and node2: Timed out waiting 30000ms" in said


def test_a_link_that_hangs_ends_the_probe_with_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = Event()

    def measure(*args: Any) -> dict[str, Any]:
        if args[-2] == (0, 2):
            hung.wait(20)
        return good()

    record, _, lost = play(tmp_path, monkeypatch, measure)
    hung.set()
    assert lost == ["node0", "node2"] and (0, 2) in record.silent
    number = next(i for i, some in enumerate(tournament(4)) if (0, 2) in some)
    assert len(record.pairs) == 2 * number + 1, "the other pair of the round is kept"


def test_what_a_thread_raises_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)  # type: ignore[arg-type]
    assert within(5, lambda: None) is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sizes", "8"], "--sizes 8: give 2 or more that grow"),
        (["--sizes", "8,4kiB"], "--sizes 8,4kiB: '4kiB' is no size"),
        (["--sizes", "64KiB,8"], "give 2 or more that grow"),
        (["--sizes", "8,8GiB"], "from 1 to 4GiB"),
        (["--repeats", "0"], "--repeats 0 must be above 0"),
        (["--timeout", "nan"], "--timeout nan must be above 0"),
        (["--pair-seconds", "-1"], "--pair-seconds -1.0 must be above 0"),
        (["--expect", "fast"], "--expect fast: write a bandwidth such as 25GB/s"),
        (["--expect", "0"], "--expect 0: write"),
        (["--cluster", "h999:8"], "--cluster h999:8: unknown kind"),
    ],
)
def test_a_wrong_flag_is_named_with_its_fix(flags: list[str], said: str) -> None:
    args = parser().parse_args(["--output", "c.json", "--backend", "gloo", *flags])
    with pytest.raises(UsageError, match=re.escape(said)):
        settings_of(args)
        expected_of(args.expect)
        base_of(args.cluster)


@pytest.mark.parametrize("page", ["docs/planner.md", "copus_ext/commands/probe_links.py"])
def test_the_command_of_the_pages_is_accepted(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("srun ") and "probe_links.py" in line]
    args = parser().parse_args(line.split("probe_links.py", 1)[1].split())
    assert base_of(args.cluster).world_size == 64
