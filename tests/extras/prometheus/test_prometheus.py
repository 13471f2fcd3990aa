"""The text file for Prometheus, and the dashboard and alert rules that live on it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.decide import decide
from copus_ext.goodput.messages import decision_scalars, outcome_scalars
from copus_ext.goodput.state import WINDOW_STEPS
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.extras.prometheus.sink import PrometheusSink, metric_name
from megatron.trainer.logging.metrics import read_metrics
from megatron.trainer.logging.sinks import sinks_of_extras
from megatron.trainer.logging.tracker import Tracker
from tests.helpers.jobs import TINY
from tests.helpers.launch import ROOT
from tests.helpers.recorded import (
    BATCH,
    LAYOUT,
    record_decisions,
    record_run,
    situation,
    step,
)

DASHBOARD, RULES = (ROOT / "docs" / "grafana" / name for name in ("copus.json", "alerts.yml"))
CASES = Path(__file__).with_name("alerts_test.yml")
parser = pytest.importorskip("prometheus_client.parser")


def config_of(flags: str) -> Config:
    return resolve(parse_args(flags.split()), 1)


def sink_of(path: Path, run: str = "run", interval: int = 1) -> Any:
    return PrometheusSink(path, run=run, interval=interval)


def values(path: Path) -> dict[str, dict[tuple[str, ...], float]]:
    """Metric to labels but the run's to value, as Prometheus reads the file."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in parser.text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            labels = tuple(v for k, v in sorted(sample.labels.items()) if k != "run")
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_the_numbers_are_those_of_the_record(tmp_path: Path) -> None:
    path = tmp_path / "copus.prom"
    record_run(tmp_path, 12, ended=False, sinks=(sink_of(path),))
    now, last = values(path), [r for r in read_metrics(tmp_path) if r["kind"] == "step"][-1]
    for field, value in last.items():
        if isinstance(value, (int, float)) and field not in ("v", "t", "m"):
            assert now[f"copus_{field}"] == {(): value}, field
    assert now["copus_step_t"] == {(): last["t"]}
    assert now["copus_losses"] == {("lm loss",): last["losses"]["lm loss"]}
    assert now["copus_noise_scale_phi_samples"] == {(): last["noise"]["phi_samples"]}
    assert now["copus_elapsed_per_iteration_ms_median"] == {(): 506.5}
    assert now["copus_layout"] == {(LAYOUT,): 1.0} and now["copus_running"] == {(): 1.0}
    assert now["copus_checkpoint_commit_iteration"] == {(): 10.0}
    assert now["copus_events_total"][("checkpoint.commit",)] == 1.0


def test_it_is_written_at_the_log_interval_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "copus.prom"
    flags = f"{TINY} --train-iters 9 --prometheus-textfile {path} --log-interval 4"
    (sink,) = sinks_of_extras(config_of(flags), tmp_path)
    seen = []
    with Tracker(tmp_path, launch="a.0.0", sinks=[sink]) as tracker:
        tracker.event("run.start", 0, 0, config={}, layout=LAYOUT)
        for i in range(1, 10):
            step(tracker, i)
            seen.append(values(path).get("copus_iteration", {}).get((), 0))
        tracker.event("run.end", 9, 9 * BATCH, why="done")
    assert seen == [0, 0, 0, 4, 4, 4, 4, 8, 8]
    now = values(path)
    assert now["copus_iteration"] == {(): 9} and now["copus_running"] == {(): 0}
    assert [p.name for p in tmp_path.iterdir() if "prom" in p.name] == ["copus.prom"]


def test_what_a_step_does_not_have_is_gone_and_decisions_stay(tmp_path: Path) -> None:
    path = tmp_path / "copus.prom"
    with Tracker(tmp_path, launch="a.0.0", sinks=[sink_of(path)]) as tracker:
        tracker.event("run.start", 0, 0, config={}, layout=LAYOUT)
        tracker.event(
            "step", 1, 16, grad_norm=1.0, extra={"noise-scale/x": 2.0, "copus/goodput": 3}
        )
        tracker.event("step", 2, 32, extra={"odd": "text", "nan": float("nan")})
        # The second: back after a change that did not come about.
        for layout in ("tp2.pp1.dp1", "tp2.pp1.dp1"):
            tracker.event("layout", 2, 32, layout=layout)
        tracker.event("run.end", 2, 32, why="done")
    now = values(path)
    assert "copus_grad_norm" not in now and "copus_noise_scale_x" not in now
    assert now["copus_goodput"] == {(): 3.0} and now["copus_layout"] == {("tp2.pp1.dp1",): 1.0}
    assert now["copus_events_total"][("layout",)] == 1.0
    assert "copus_odd" not in now and "copus_nan" in now


def graded(steps: int = WINDOW_STEPS) -> ConfigChange:
    """A growth that came out slower than predicted."""
    speeds: dict[str, Any] = {
        "samples_per_s": 9.0,
        "predicted_samples_per_s": 10.0,
        "speed_over_predicted": 0.9,
    }
    sizes = {"from_batch": 8, "to_batch": 16, "from_micro_batch": 1, "to_micro_batch": 1}
    return ConfigChange(decision=1, **sizes, **speeds, steps=steps)


def test_a_decision_or_an_outcome_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path, heard = tmp_path / "copus.prom", situation(5, 8)
    deaf = replace(heard, paused=True)
    first, then = (decision_scalars(s, decide(s), number=i) for i, s in enumerate((heard, deaf)))
    long, short = (outcome_scalars(graded(steps=n), num_changes=n) for n in (WINDOW_STEPS, 49))
    assert len(first) == 8 and first.keys() > then.keys() and len(long) == 4
    assert long.keys() - short.keys() == {"copus/speed-over-predicted"}
    names = {metric_name(tag) for tag in first | long}
    seen = []
    with Tracker(tmp_path, launch="a.0.0", sinks=[sink_of(path)]) as tracker:
        for i, extra in enumerate((first | long, {}, then, short), 1):
            step(tracker, i, extra=extra)
            seen.append({n: v[()] for n, v in values(path).items() if n in names})
    expected = (first | long, first | long, then | long, then | short)
    assert seen == [{metric_name(t): v for t, v in tags.items()} for tags in expected]


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    path, bad = tmp_path / "copus.prom", 'a"} 1\ncopus_evil 1\n{\\'
    with Tracker(tmp_path, launch="a.0.0", sinks=[sink_of(path, bad)]) as tracker:
        tracker.event("run.start", 0, 0, config={}, layout=bad)
        tracker.event("step", 1, 16, losses={bad: 1.0}, extra={bad: 2.0})
        tracker.event("alert", 1, 16, alert=bad)
        tracker.event("run.end", 1, 16, why=bad)
    now = values(path)
    assert "copus_evil" not in now and now["copus_losses"] == {(bad,): 1.0}
    assert now["copus_alerts_total"] == {(bad,): 1.0}


def test_a_path_that_cannot_be_written_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = f"{TINY} --train-iters 9 --prometheus-textfile {tmp_path / 'none' / 'x.prom'}"
    assert sinks_of_extras(config_of(flags), tmp_path) == []
    assert len(caplog.records) == 1 and "--prometheus-textfile" in caplog.text


def written(tmp_path: Path) -> set[str]:
    """Every metric that a run with the controller writes."""
    path = tmp_path / "copus.prom"
    scalars = record_decisions(tmp_path).take_scalars()
    assert scalars.keys() >= outcome_scalars(graded(), num_changes=1).keys()
    with Tracker(tmp_path, launch="b.0.0", sinks=[sink := sink_of(path)]) as tracker:
        record_run(tmp_path / "other", 10, sinks=(sink,), ended=False)
        tracker.event("layout", 10, 160, layout=LAYOUT)
        tracker.evaluation(iteration=10, consumed_samples=160, losses={"lm loss": 2.0})
        step(tracker, 11, extra=scalars)
    return set(values(path))


def test_dashboard_and_rules_use_what_is_written(tmp_path: Path) -> None:
    names = written(tmp_path)
    dashboard, rules = json.loads(DASHBOARD.read_text()), yaml.safe_load(RULES.read_text())
    used = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
    used += [a["expr"] for a in dashboard["annotations"]["list"]]
    used += [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    used += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    asked = {name for expr in used for name in re.findall(r"copus_\w+", expr)}
    assert len(asked) > 25 and asked <= names, asked - names
    cases = yaml.safe_load(CASES.read_text())
    tried = {case["expr"] for t in cases["tests"] for case in t.get("promql_expr_test", ())}
    marks = {a["expr"].replace(',run=~"$run"', "") for a in dashboard["annotations"]["list"]}
    assert marks == tried
    series = {s["series"].partition("{")[0] for t in cases["tests"] for s in t["input_series"]}
    assert series <= names


def test_the_names_are_those_of_the_other_sinks(tmp_path: Path) -> None:
    scalars = record_decisions(tmp_path).take_scalars()
    assert all(tag.startswith("copus/") for tag in scalars)
    names = {metric_name(tag) for tag in scalars}
    assert len(names) == len(scalars) and "copus_next_gain_needed" in names


@pytest.mark.parametrize("words", [("check", "rules", RULES), ("test", "rules", CASES)])
def test_promtool_takes_the_rules(words: tuple[Any, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    result = subprocess.run(
        [promtool, *map(str, words)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
    tested = {
        c["alertname"]
        for t in yaml.safe_load(CASES.read_text())["tests"]
        for c in t["alert_rule_test"]
    }
    rules = {r["alert"] for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]}
    assert tested == rules
