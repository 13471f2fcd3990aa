"""The planner is held against tables of measured runs, and says how well it does."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.constants import USUAL, PartFactors
from copus_ext.cost_model.models import PRESETS
from copus_ext.extras.planner_validation import command
from copus_ext.extras.planner_validation.validation import kendall_tau, predict, read_table
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_config_batch
from megatron.trainer.config.layout import Layout

BASE = {"cluster": "a100-80g:16", "model": "llama-2-7b", "global_batch_size": "64"}
BASE["seq_length"] = "2048"
LAYOUTS = ((1, 2, 1), (2, 1, 1), (2, 2, 2), (4, 1, 4), (4, 4, 1), (8, 2, 2))
"""tp, pp, micro-batch."""


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, names, restval="")
        table.writeheader()
        table.writerows(rows)
    return path


def rows_of(
    factor: float = 1.0, conditions: PartFactors = USUAL, **more: Any
) -> list[dict[str, Any]]:
    """Runs that took so many times what the planner says of them."""
    planner = Planner(PRESETS["llama-2-7b"].with_seq_length(2048), preset("a100-80g:16"))
    rows = []
    for tp, pp, micro in LAYOUTS:
        row = {**BASE, "tp": tp, "pp": pp, "micro_batch_size": micro, "recompute": "selective"}
        rows.append({**row, **more})
    return [{**row, "step_s": factor * _predicted(planner, row, conditions)} for row in rows]


def _predicted(planner: Planner, row: dict[str, Any], conditions: PartFactors) -> float:
    tp, pp = row["tp"], row["pp"]
    c = Configuration(
        layout=Layout(tp=tp, pp=pp, dp=16 // tp // pp),
        micro_batch_size=row["micro_batch_size"],
        global_batch_size=64,
        recompute="selective",
        sequence_parallel=tp > 1,
    )
    return planner.raw_step_s(c, conditions)


def judged(capsys: pytest.CaptureFixture[str], path: Path, *more: str) -> dict[str, Any]:
    assert command.main([str(path), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_its_own_predictions_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "runs.csv", rows_of())
    found = judged(capsys, path)["in_all"]
    assert found["runs"] == len(LAYOUTS) and found["groups"] == 1
    assert found["mean"] == pytest.approx(0, abs=1e-9) and found["within_one_sd"] == 1.0
    assert found["mean_kendall_tau"] == 1.0 and found["worst_regret"] == 0.0
    assert found["best_fits"] == 1.0 and found["false_alarms"] == 0.0
    assert found["out_of_memory_recall"] is None
    assert command.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "llama-2-7b 32 x 4096, 2048 tokens, on a100-80g:16, batch 64" in out and "unknown" in out


def test_known_times_take_a_common_error_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "runs.csv", rows_of(2.0))
    plain, known = (judged(capsys, path, "--known", n)["in_all"] for n in ("0", "2"))
    assert plain["mean"] == pytest.approx(0.5) and plain["bias"] == pytest.approx(-0.5)
    assert known["mean"] < 0.12
    runs = read_table(path)
    assert predict(runs, num_known=2).known.sum() == 2


def test_known_times_find_a_slow_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = PartFactors(across=4.0)
    path = write(tmp_path / "runs.csv", rows_of(1.0, slow))
    # One is of a layout whose kernels may start slowly, which is doubted as much.
    plain, known = (judged(capsys, path, "--known", n)["in_all"] for n in ("0", "3"))
    assert plain["mean"] > 0.1 and known["mean"] < 0.8 * plain["mean"]


def test_a_known_peak_corrects_the_memory_of_the_others(tmp_path: Path) -> None:
    rows = rows_of(cluster="a100-40g:16")
    runs = read_table(write(tmp_path / "runs.csv", rows))
    planner = Planner(PRESETS["llama-2-7b"].with_seq_length(2048), preset("a100-40g:16"))
    peaks = [_peak_bytes(planner, run.configuration) for run in runs]
    plain = predict(runs, num_known=2)
    # All need more than was thought, as the second largest says.
    rows = [{**row, "peak_bytes": f"{1.5 * peak:.0f}"} for row, peak in zip(rows, peaks)]
    second, largest = np.argsort(peaks)[-2:]
    rows[second]["known"] = 1
    known = predict(read_table(write(tmp_path / "more.csv", rows)), num_known=0)
    assert plain.fits.all() and not known.fits[largest]
    others = ~known.known
    assert (known.fit_probability <= plain.fit_probability)[others].all() and known.fits.any()


def _peak_bytes(planner: Planner, configuration: Configuration) -> float:
    rows = to_config_batch(planner.model, planner.cluster, points_of([configuration]))
    return float(planner.peak_bytes_of(rows)[0])


def test_memory_is_judged_by_runs_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big = {**BASE, "tp": 1, "micro_batch_size": 4, "recompute": "none", "out_of_memory": 1}
    big |= {"use_distributed_optimizer": 0, "overlap": "no"}
    small = {**big, "tp": 8, "micro_batch_size": 1, "recompute": "full"}
    ran = {**big, "out_of_memory": 0, "step_s": 9.0, "group": "alone"}
    path = write(tmp_path / "runs.csv", [*rows_of(), big, small, ran])
    result = judged(capsys, path)
    found = result["in_all"]
    assert found["out_of_memory_recall"] == 0.5 and found["failed_but_sure_to_fit"] == 0.5
    assert found["false_alarms"] == pytest.approx(1 / (len(LAYOUTS) + 1))
    assert result["groups"]["alone"]["best_fits"] is False


def test_the_columns_change_what_is_predicted(tmp_path: Path) -> None:
    row = {**BASE, "tp": 2, "pp": 1, "micro_batch_size": 1, "step_s": 1.0}
    changes: list[dict[str, Any]] = [
        {},
        {"overlap": 0},
        {"nic_bytes_per_s": "1GB/s"},
        {"sequence_parallel": 0},
        {"gradient_bytes": 2},
        {"seq_length": 4096},
        {"recompute": "full"},
        {"gpus_per_node": 2},
        {"tp": 2, "pp": 2, "sequence_parallel": 0},
        {"tp": 2, "pp": 2, "sequence_parallel": 0, "scatter_gather": 1},
    ]
    experts = {"num_experts": 8, "moe_router_topk": 2, "bias": 0}
    changes += [
        experts,
        {**experts, "ep": 4},
        {**experts, "ep": 4, "moe_token_dispatcher_type": "allgather"},
        {**experts, "moe_ffn_hidden_size": 512},
        {**experts, "moe_layer_freq": 2},
        {**experts, "tp": 2, "etp": 1},
    ]
    runs = read_table(write(tmp_path / "runs.csv", [{**row, **change} for change in changes]))
    seconds = predict(runs).step_s
    assert len(set(np.round(seconds, 9).tolist())) == len(changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"colour": "red"}, "unknown columns: colour"),
        ({"tp": ""}, "line 2: tp is missing"),
        ({"tp": "3"}, "does not divide 16 GPUs"),
        ({"tp": "x"}, "tp x must be a whole number"),
        ({"step_s": "-1"}, "step_s -1.0 must be positive"),
        ({"step_s": "soon"}, "soon"),
        ({"recompute": "some"}, "recompute some: use none"),
        ({"overlap": "maybe"}, "overlap maybe: write 1 or 0"),
        ({"cluster": "abacus:8"}, "unknown; known: v100-16g"),
        ({"micro_batch_size": "5"}, "global_batch_size is not a multiple"),
        ({"hidden_size": "0"}, "hidden_size 0"),
        ({"attention": "fast"}, "attention 'fast' is none of flash, unfused, torch"),
        ({"attention": "flash", "fused_attention": "1"}, "attention and fused_attention say"),
        ({"norm": "none"}, "norm 'none' is none of fused, torch"),
        ({"softmax_in_fp32": "1"}, "softmax_in_fp32 is of attention that is not fused"),
        ({"model": "nobody"}, "line 2: model: "),
        ({"kv_lora_rank": "64"}, "--multi-latent-attention"),
        ({"ep": "2"}, "has sizes of experts and the model has none"),
        ({"num_experts": "6", "ep": "4"}, "--num-experts 6 is not divisible by 4"),
        ({"num_experts": "8", "moe_layer_freq": "[1]"}, "moe_layer_freq [1]: give a 0 or 1"),
    ],
)
def test_a_bad_table_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], says: str
) -> None:
    row = {**BASE, "tp": 1, "micro_batch_size": 1, "step_s": 1.0, **change}
    assert command.main([str(write(tmp_path / "runs.csv", [row]))]) == 5
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_nothing_to_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.csv").write_text("cluster,tp\n")
    (tmp_path / "no text.csv").write_bytes(b"cluster,tp\n\xff\xfe,\x00\n")
    (tmp_path / "wide.csv").write_text("cluster,tp\n" + "x" * 200_000 + ",1\n")
    for path in (tmp_path / f"{name}.csv" for name in ("empty", "none", "no text", "wide")):
        assert command.main([str(path)]) == 5
        assert capsys.readouterr().err.count("\n") == 1
    assert command.main([str(tmp_path / "empty.csv"), "--known", "-1"]) == 2


def test_kendall_tau_is_that_of_scipy() -> None:
    from scipy.stats import kendalltau

    rng = np.random.default_rng(0)
    a, b = rng.random(30), rng.random(30)
    want: Any = kendalltau(a, b)
    assert kendall_tau(a, b) == pytest.approx(float(want[0]))
    assert kendall_tau(np.ones(3), np.ones(3)) is None


def test_models_and_links_that_differ_are_not_compared(tmp_path: Path) -> None:
    row = {**BASE, "tp": 2, "micro_batch_size": 1, "step_s": 1.0}
    others = [{"num_layers": 16}, {"seq_length": 4096}, {"nic_bytes_per_s": "25GB/s"}]
    others += [{"hidden_size": 2048, "num_attention_heads": 16}]
    rows = [row, {**row, "tp": 4, "attention": "unfused"}, *({**row, **other} for other in others)]
    runs = read_table(write(tmp_path / "runs.csv", rows))
    names = [run.group for run in runs]
    assert names[0] == names[1], "kernels of one model are compared"
    assert len({*names}) == 1 + len(others)


def test_one_cluster_under_several_names_is_one_group(tmp_path: Path) -> None:
    rows = rows_of()
    for row, name in zip(rows, ("A100-80GB:16", "A100-SXM4-80GB:16", "a100-80g:16")):
        row["cluster"] = name
    rows[3]["nic_bytes_per_s"], rows[4]["nic_bytes_per_s"] = "25GB/s", "25e9"
    runs = read_table(write(tmp_path / "runs.csv", rows))
    assert len({run.group for run in runs[:3]}) == 1
    assert runs[3].group == runs[4].group != runs[0].group


def test_a_run_of_uneven_stages_is_priced_by_its_longest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {**BASE, "tp": 1, "pp": 16, "num_layers": 60, "micro_batch_size": 1, "step_s": 1.0}
    path = write(tmp_path / "runs.csv", [one, {**one, "num_layers": 64}, {**one, "num_layers": 48}])
    assert command.main([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["in_all"]["runs"] == 3 and len(found["groups"]) == 3
    uneven, even, shorter = predict(read_table(path)).step_s
    assert uneven == even > shorter


def test_kernels_are_told_apart_by_a_correction(tmp_path: Path) -> None:
    """A slow run says more of its own configuration than of others in the same layout."""
    one = {**BASE, "tp": 4, "pp": 1, "micro_batch_size": 1, "recompute": "full", "group": "all"}
    changes = [{"known": 1, "step_s": 90.0}, {}, {"attention": "torch"}, {"norm": "torch"}]
    changes += [{"sequence_parallel": 0}, {"scatter_gather": 1}, {"logits_sharded": 0}]
    runs = read_table(write(tmp_path / "runs.csv", [{**one, **change} for change in changes]))
    plain = predict([dataclasses.replace(run, known=False) for run in runs])
    found = predict(runs)
    gain = found.step_s / plain.step_s
    assert found.known.tolist() == [True] + [False] * (len(changes) - 1)
    assert gain[1] == pytest.approx(gain[0])
    assert (found.relative_sd[2:] > found.relative_sd[1] + 0.01).all()


def _layouts_of_13b(**changes: Any) -> list[dict[str, Any]]:
    base = {**BASE, "model": "llama-13b", "tp": 2, "pp": 2, "recompute": "none", **changes}
    return [{**base, "micro_batch_size": micro} for micro in (1, 2, 4)]


def test_who_ran_is_not_refused_and_says_so_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest is thought to need more than there is, and ran."""
    rows = [{**row, "step_s": 9.0} for row in _layouts_of_13b(seq_length=4096)]
    plain = predict(read_table(write(tmp_path / "runs.csv", rows)))
    known = [*rows[:2], {**rows[2], "known": 1}]
    path = write(tmp_path / "known.csv", known)
    found = predict(read_table(path))
    assert plain.fits.tolist() == [True, True, False]
    assert found.fits.tolist() == [True, True, True] and found.fit_probability[2] == 1.0
    assert (found.peak_bytes < plain.peak_bytes).all()
    assert judged(capsys, path)["in_all"]["false_alarms"] == 0.0


def test_who_failed_says_so_of_others(tmp_path: Path) -> None:
    small = {"cluster": "a100-40g:16", "tp": 4, "seq_length": 4096}
    rows = [{**row, "out_of_memory": 1} for row in _layouts_of_13b(**small)]
    plain = predict(read_table(write(tmp_path / "runs.csv", rows)))
    known = [{**rows[0], "known": 1}, *rows[1:]]
    found = predict(read_table(write(tmp_path / "known.csv", known)))
    assert plain.fits.tolist() == [True, True, False]
    assert not found.fits.any() and found.fit_probability[0] == 0.0
    assert (found.peak_bytes > plain.peak_bytes).all()


def test_errors_of_peaks_are_told_where_some_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of()
    peaks = predict(read_table(write(tmp_path / "runs.csv", rows))).peak_bytes
    assert command.main([str(tmp_path / "runs.csv")]) == 0
    assert "peak of memory" not in capsys.readouterr().out
    told = [{**row, "peak_bytes": f"{1.25 * peak:.0f}"} for row, peak in zip(rows, peaks)]
    path = write(tmp_path / "peaks.csv", told)
    found = judged(capsys, path)["in_all"]
    assert found["peak_mean"] == pytest.approx(0.2) and found["peak_bias"] == pytest.approx(-0.2)
    assert command.main([str(path)]) == 0
    assert "mean error of a peak of memory                   20.0 %" in capsys.readouterr().out


def test_columns_of_the_implementation_change_the_memory(tmp_path: Path) -> None:
    row = {**BASE, "tp": 2, "pp": 1, "micro_batch_size": 1, "recompute": "none", "step_s": 1.0}
    changes = [{}, {"norm": "torch"}, {"attention": "unfused"}, {"attention": "torch"}]
    changes += [{"logits_sharded": 0}, {"logits_bytes": 14}, {"implementation": "legacy"}]
    changes += [{"norm": "torch", "logits_sharded": 0, "logits_bytes": 14}]
    runs = read_table(write(tmp_path / "runs.csv", [{**row, **change} for change in changes]))
    found = predict(runs)
    needs = found.peak_bytes
    assert needs[6] == needs[7], "legacy stands for these three"
    assert len(set(needs[:7].tolist())) == 7 and (needs[1:] > needs[0]).all()
    # Who says how layers are implemented is believed more.
    sure = found.peak_relative_sd
    assert sure[1] < sure[0] < sure[3]


def test_a_table_of_runs_has_the_size_and_the_exchange(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    header = "cluster,model,tp,cp,cp_comm_type,micro_batch_size,global_batch_size,step_s,seq_length"
    lines = [
        "h100-80g:8,llama-2-7b,1,4,,1,2,1.0,8192",
        "h100-80g:8,llama-2-7b,1,8,a2a,1,1,2.0,8192",
    ]
    path.write_text("\n".join([header, *lines]))
    runs = read_table(path)
    assert [str(r.configuration.layout) for r in runs] == ["tp1.cp4.pp1.dp2", "tp1.cp8.pp1.dp1"]
    assert [r.configuration.cp_comm_type for r in runs] == ["p2p", "a2a"]
    assert predict(runs).step_s.shape == (2,)
    for bad, words in (
        ("h100-80g:8,llama-2-7b,1,3,,1,2,1.0,8192", "does not divide 8"),
        ("h100-80g:8,llama-2-7b,1,8,,1,1,1.0,8200", "not divisible by 16"),
        ("h100-80g:8,llama-2-7b,1,8,ring,1,1,1.0,8192", "use one of all_gather"),
    ):
        path.write_text("\n".join([header, bad]))
        with pytest.raises(ValueError, match=words):
            read_table(path)
