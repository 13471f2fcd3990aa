"""copus replay with another noise scale multiplier compares what was chosen, not what led there."""

from __future__ import annotations

import re
from typing import Any

import pytest

from copus_ext.commands import replay
from copus_ext.controller.decision_log import read_journal
from tests.helpers.launch import ROOT

JOURNAL = ROOT / "docs/results/act_run.journal.jsonl"
CHOSEN = ("tp", "cp", "pp", "dp", "vpp", "ep", "etp", "global_batch_size", "micro_batch_size")


def decisions() -> list[dict[str, Any]]:
    return [record for record in read_journal(JOURNAL) if record["kind"] == "decision"]


@pytest.mark.parametrize("multiplier", [2.0, 7.9, 16.0])
def test_with_another_multiplier_equal_choices_are_the_same(multiplier: float) -> None:
    equal = 0
    for record in decisions():
        is_same, again = replay.replayed(record, {"noise_scale_multiplier": multiplier})
        kinds, rows = zip(*((d["kind"], d["to"]) for d in (record["decision"], again)))
        before, after = ([row.get(name) for name in CHOSEN] for row in rows)
        assert is_same == (len(set(kinds)) == 1 and before == after)
        equal += is_same
    assert 0 < equal < len(decisions()) or multiplier == 7.9


def test_a_replay_of_the_journals_own_rules_compares_every_number() -> None:
    record = decisions()[0]
    spoilt = {**record["decision"], "critical_batch_size": 1.0}
    assert replay.replayed(record, {})[0]
    assert not replay.replayed({**record, "decision": spoilt}, {})[0]


def test_choices_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(JOURNAL), "--noise-scale-multiplier", "7.9", "--all"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    counts = re.fullmatch(r"(\d+) choices the same, (\d+) different", last)
    assert counts and int(counts[1]) == sum("  same  " in line for line in lines)
    assert int(counts[2]) == sum("  DIFFERENT  " in line for line in lines)
