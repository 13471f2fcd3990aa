"""Counters, random streams, FLOPs, callbacks, guard: the small pure parts of the loop."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron.trainer.common import optional
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config.model_shape import LatentShape, ModelShape
from megatron.trainer.distributed.process_groups import random_seed_at
from megatron.trainer.logging.tracker import NullTracker
from megatron.trainer.model.flops import training_flops_per_sample
from megatron.trainer.model.init import InitialWeights, draw_weights
from megatron.trainer.optim.optimizer import mark_decoupled
from megatron.trainer.resilience import env_checks
from megatron.trainer.train import reporting
from megatron.trainer.train.callbacks import Callback, CallbackContext, Callbacks, Request
from megatron.trainer.train.reporting import _Interval
from tests.helpers.launch import ROOT
from tests.helpers.steps import step_info


def test_state_counts_and_survives_json() -> None:
    state = TrainState()
    state.advance(samples=8, updated=True, finite_loss=True, flops=3.0)
    state.advance(samples=8, updated=False, finite_loss=False, flops=3.0)
    state.skip_samples(16)
    assert (state.iteration, state.consumed_samples, state.lr_samples) == (3, 32, 8)
    assert state.skipped_samples == 16
    assert (state.skipped_iterations, state.nan_iterations) == (1, 1)
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize("unknown", [{"old": 1}, {"settings": {"old": None}}])
def test_a_state_of_another_version_says_what_to_do(unknown: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"^old is not known .*; resume with the version"):
        TrainState.from_json({**TrainState().to_json(), **unknown})


def test_random_streams_differ_in_every_part_and_repeat() -> None:
    seeds = {
        random_seed_at(seed, consumed, "pp", pp, "dp", dp)
        for seed in range(3)
        for consumed in (0, 8, 80)
        for pp in range(3)
        for dp in range(3)
    }
    assert len(seeds) == 81
    assert random_seed_at(1, 2, "x") == random_seed_at(1, 2, "x")
    assert all(0 <= seed < 1 << 62 for seed in seeds)


def flops(**changes: Any) -> float:
    sizes = {
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 32,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "kv_channels": 4,
        "padded_vocab_size": 128,
    }
    return training_flops_per_sample(ModelShape(**{**sizes, **changes}), 16)


def test_flops_of_a_small_model_counted_by_hand() -> None:
    per_layer = 8 * 8 * 4 + 8 * 16 + 2 * 8 * 32
    assert flops() == 6 * 16 * (2 * per_layer + 8 * 128)
    assert flops(gated=True) - flops() == 6 * 16 * 2 * 8 * 32


def test_flops_of_latent_attention_and_further_tokens_counted_by_hand() -> None:
    widths = {"kv_lora_rank": 6, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3}
    heads, mlp, head = 2, 2 * 8 * 32, 8 * 128
    shared = 8 * (6 + 2) + 6 * heads * (4 + 3) + heads * 3 * 8 + heads * (4 + 2 + 3) * 16 / 2
    whole = LatentShape(q_lora_rank=None, **widths)
    assert flops(latent=whole) == 6 * 16 * (2 * (shared + 8 * heads * 6 + mlp) + head)
    small = LatentShape(q_lora_rank=5, **widths)
    layer = shared + 8 * 5 + 5 * heads * 6 + mlp
    assert flops(latent=small) == 6 * 16 * (2 * layer + head)
    assert flops(latent=small, mtp_num_layers=3) == 6 * 16 * (
        2 * layer + head + 3 * (layer + 16 * 8 + head)
    )


def test_initial_deviations_by_tensor() -> None:
    std = InitialWeights(init_method_std=0.02, num_layers=8).std
    assert std("decoder.layers.mlp.linear_fc1.weight") == 0.02
    assert std("decoder.layers.mlp.linear_fc2.weight") == 0.005
    assert std("decoder.final_layernorm.weight") is None
    assert std("decoder.layers.mlp.linear_fc1.bias") is None
    assert std("decoder.layers.mlp.linear_fc1.layer_norm_weight") is None
    with pytest.raises(ValueError, match=r"new_matrix\.weight"):
        std("decoder.layers.new_matrix.weight")


def test_initial_weights_are_drawn_as_the_flags_say() -> None:
    def drawn(key: str, **flags: Any) -> torch.Tensor:
        full = torch.empty(300, 100)
        initial = InitialWeights(init_method_std=0.02, num_layers=8, **flags)
        initial.fill(full, key, torch.Generator().manual_seed(1))
        return full

    words, fc1 = "embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc1.weight"
    assert drawn(words, embedding_std=1.0).std().item() == pytest.approx(1.0, rel=0.02)
    assert drawn(fc1, embedding_std=1.0).std().item() == pytest.approx(0.02, rel=0.02)
    bound = math.sqrt(6 / 400)
    for key in (words, fc1, "mtp.layers.0.eh_proj.weight"):
        uniform = drawn(key, xavier_uniform=True)
        assert uniform.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert uniform.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    apart = drawn(words, xavier_uniform=True, embedding_std=1.0)
    assert apart.std().item() == pytest.approx(1.0, rel=0.02)


def test_a_parameter_without_a_global_name_is_not_left_as_it_is() -> None:
    chunk: Any = torch.nn.Linear(2, 2)
    chunk.sharded_state_dict = lambda metadata: {}
    with pytest.raises(ValueError, match="parameter weight"):
        draw_weights(chunk, InitialWeights(init_method_std=0.02, num_layers=8), seed=1)


def test_groups_with_rates_of_their_own_are_found_again() -> None:
    groups = [{"default_config": True}, {"default_config": False}, {}]
    mark_decoupled(groups)
    assert [group.get("is_decoupled_lr") for group in groups] == [False, True, None]


class Asks(Callback):
    def __init__(self, kind: Any) -> None:
        self.request = Request(kind=kind, reason=kind)

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        return self.request


def context() -> CallbackContext:
    empty: Any = SimpleNamespace()
    return CallbackContext(
        model=[], optimizer=empty, scheduler=empty, groups=empty, config=empty, state=empty
    )


@pytest.mark.parametrize("kinds", [("save", "stop", "save"), ("stop", "save")])
def test_a_stop_wins_over_a_save(kinds: tuple[str, ...]) -> None:
    wanted = Callbacks(map(Asks, kinds)).fire("on_train_step_end", context())
    assert wanted is not None and wanted.kind == "stop"


def test_the_events_are_those_of_megatron_lm_and_our_six() -> None:
    named = "setup_start data_init_start train_start train_step_start train_step_end log train_end"
    evaluation = ("start", "step_start", "step_end", "end")
    events = {f"on_{name}" for name in named.split()} | {"on_grads_ready", "on_checkpoint_saved"}
    events |= {"on_relayout_start", "on_relayout_end", "on_segment_start"}
    events |= {f"on_{split}_{name}" for split in ("eval", "test") for name in evaluation}
    found = {name for name in vars(Callback) if name.startswith("on_")}
    assert found == events | {"on_train_error"}
    callback = Callback()
    assert all(getattr(callback, event)(context()) is None for event in events)
    # One rank alone sees an error, so that it is no event of all.
    assert callback.on_train_error(context(), ValueError()) is None


@pytest.mark.parametrize("version", [None, "0.15.0", "0.16.0", "0.20.0", "1.0"])
def test_other_versions_of_megatron_core_are_refused_with_the_command(version: str | None) -> None:
    problem = env_checks.core_version_problem(version)
    assert problem is not None and "pip install" in problem


@pytest.mark.parametrize(
    ("core", "engine", "wanted"),
    [
        ("0.16.1", "2.11.0", None),
        ("0.16.1", "2.9.1+cu13", None),
        ("0.16.1", "2.12.0", ">=2.9,<2.12"),
        ("0.19.2+abc", "2.15.1", None),
        ("0.17.1", "2.4.0", ">=2.11"),
    ],
)
def test_versions_that_do_not_go_together_are_named(
    core: str, engine: str, wanted: str | None
) -> None:
    note = env_checks.engine_note(core, engine)
    assert (note is None) == (wanted is None)
    assert note is None or (wanted and wanted in note and core in note and engine in note)


ENGINE_FAILS = {
    # As a wheel that was built for another release says it, and a package without its library.
    "AssertionError": "raise AssertionError('TransformerEngine package version mismatch')",
    "RuntimeError": "raise RuntimeError('Found empty transformer-engine meta package')",
}


def with_engine(
    folder: Path, version: str, text: str, *command: str | Path
) -> subprocess.CompletedProcess[str]:
    """Runs Python where a Transformer Engine is installed whose source is a text."""
    engine = folder / "transformer_engine"
    (engine / "pytorch").mkdir(parents=True)
    (engine / "__init__.py").write_text(text)
    (engine / "pytorch" / "__init__.py").touch()
    about = folder / f"transformer_engine-{version}.dist-info"
    about.mkdir()
    fields = {"Metadata-Version": "2.1", "Name": "transformer-engine", "Version": version}
    (about / "METADATA").write_text("".join(f"{k}: {v}\n" for k, v in fields.items()))
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("kind", ENGINE_FAILS)
def test_an_engine_that_finds_fault_with_itself_is_wrong_usage(kind: str, tmp_path: Path) -> None:
    """Before megatron-core imports it, which would let the error through."""
    program = [ROOT / "pretrain_gpt.py", "--device", "cpu", "--mock-data"]
    result = with_engine(tmp_path, "2.4.0", ENGINE_FAILS[kind], *program)
    assert result.returncode == UsageError.exit_code
    (line,) = result.stderr.splitlines()
    core = importlib.metadata.version("megatron-core")
    wanted = optional.engine_range(core)
    for part in ("Transformer Engine 2.4.0", kind, f"megatron-core {core}", f"]{wanted}"):
        assert part in line


@pytest.mark.parametrize(("engine", "code"), [("2.11.0+4329ff8", 0), ("2.4.0", 2)])
def test_versions_are_told_where_nothing_can_be_imported(
    engine: str, code: int, tmp_path: Path
) -> None:
    """As where an image is built, without the driver of a GPU."""
    program = ["-m", "megatron.trainer.resilience.env_checks"]
    result = with_engine(tmp_path, engine, "import libcuda", *program)
    core = importlib.metadata.version("megatron-core")
    assert result.returncode == code
    assert {f"megatron-core {core}", f"transformer-engine {engine}"} < {*result.stdout.splitlines()}
    assert (optional.engine_range(core) in result.stderr) == (code == 2)


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.18.2+abc", "0.19.2"])
def test_these_versions_of_megatron_core_are_accepted(version: str) -> None:
    assert env_checks.core_version_problem(version) is None


def test_this_environment_is_accepted() -> None:
    env_checks.check_environment()


def test_a_second_training_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    problem = env_checks.namespace_problem([tmp_path])
    assert problem is not None and str(tmp_path) in problem


def test_a_copus_that_belongs_to_another_checkout_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts/setup_env.sh writes it, of two checkouts with one COPUS_VENV."""
    other, bin_ = tmp_path / "other", tmp_path / "venv" / "bin"
    (other / "megatron" / "trainer").mkdir(parents=True)
    bin_.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(bin_ / "python"))
    launcher = "export PYTHONPATH={}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    for root, says in ((other, "belongs to"), (tmp_path, "remove that package")):
        (bin_ / "copus").write_text(launcher.format(root))
        problem = env_checks.namespace_problem([other / "megatron"])
        assert problem is not None and says in problem and str(other) in problem


def test_the_private_names_that_tear_down_uses_exist() -> None:
    assert hasattr(parallel_state, "_global_process_group_list")
    assert callable(RotaryEmbedding.forward.cache_clear)  # pyright: ignore[reportFunctionMemberAccess]
    assert hasattr(param_and_grad_buffer, "_ParamAndGradBucketGroup")
    assert callable(torch._fused_adam_) and callable(torch._fused_adamw_)


def test_an_apex_that_breaks_on_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("import pyramid_of_another_project\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="pip uninstall apex"):
        env_checks.check_environment()


class Events(NullTracker):
    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.lines: list[str] = []

    def event(self, kind: str, iteration: int, consumed_samples: int, **fields: Any) -> None:
        assert kind == "alert" and fields["alert"] == "old checkpoint"
        self.iterations.append(iteration)
        self.lines.append(fields["line"])


def test_a_checkpoint_older_than_two_intervals_is_told_once_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting.dist, "get_rank", lambda: 1)
    events, state = Events(), TrainState(iteration=100)
    job: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(save_interval=10)),
        context=SimpleNamespace(checkpoint_iteration=None),
        checkpointer="some",
        state=state,
        tracker=events,
    )
    reporter = reporting.Reporter(job)
    for state.iteration in range(101, 160):
        if state.iteration == 142:
            job.context.checkpoint_iteration = 140
        reporter._look_at_checkpoints(step_info(iteration=state.iteration))
    assert events.iterations == [121, 131, 141]
    none = "there is no checkpoint yet of this launch, which began at iteration 100, after 21 steps"
    assert events.lines[0] == none
    job.context.checkpoint_iteration = 150
    reporter._look_at_checkpoints(step_info(iteration=171))
    assert events.lines[-1] == "the last checkpoint is of iteration 150, 21 steps ago"
    state.iteration, job.context.checkpoint_iteration = 0, None
    reporter = reporting.Reporter(job)
    state.iteration = 21
    reporter._look_at_checkpoints(step_info(iteration=21))
    assert events.lines[-1] == "there is no checkpoint yet, after 21 steps"


def test_the_mean_loss_is_that_of_the_steps_taken() -> None:
    interval = _Interval()
    steps: list[dict[str, Any]] = [{}, {"loss": 4.0}, {"loss": 1e9, "updated": False}]
    for changes in steps:
        interval.add(step_info(**changes), 1.0)
    interval.add(step_info(loss=math.nan, updated=False), 1.0)
    assert interval.losses == [{"lm loss": 2.0}, {"lm loss": 4.0}]
    assert (interval.steps, interval.skipped, interval.nan) == (4, 2, 1)
