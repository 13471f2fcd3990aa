"""From a command line to a configuration: defaults, derived values, refusals."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time

import pytest

from megatron.training.arguments import parse_args, resolve, with_checkpoint_args
from megatron.training.config import GROUPS, Config
from megatron.training.config.fields import field_docstrings, option, option_specs
from megatron.training.errors import UsageError
from megatron.training.known_flags import KnownFlag, known_flags
from megatron.training.layout import Layout
from tests.helpers.examples import GPT3, LLAMA3, MIXTRAL

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 100 --mock-data"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    extra_mode: str = option("observe", choices=("observe", "act"))
    """A flag of another package."""


def config_of(flags: str = "", world: int = 1, **environment: bool) -> Config:
    return resolve(parse_args(f"{BASE} {flags}".split()), world, **environment)


# The whole command line.


def test_every_field_has_a_docstring_and_one_home() -> None:
    seen: set[str] = set()
    for group in GROUPS.values():
        names = [field.name for field in dataclasses.fields(group)]
        assert set(field_docstrings(group)) == set(names)
        assert not seen & set(names)
        seen |= set(names)


def test_no_option_string_twice() -> None:
    ours = [s for group in GROUPS.values() for spec in option_specs(group) for s in spec.strings]
    assert len(ours) == len(set(ours))
    assert not set(ours) & set(known_flags())


def test_defaults_of_the_parser() -> None:
    args = vars(parse_args([]))
    for group in GROUPS.values():
        for spec in option_specs(group):
            assert args[spec.dest] == spec.default
    assert args["explicit_flags"] == frozenset()
    assert args["ignored_flags"] == ()


def test_help_is_quick_and_light() -> None:
    code = (
        "import sys\n"
        "from megatron.training.arguments import parse_args\n"
        "try: parse_args(['--help'])\n"
        "finally: print('heavy', [m for m in sys.modules if m in ('torch', 'megatron.core')])\n"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    elapsed_s = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert "heavy []" in done.stdout
    for group in GROUPS.values():
        for spec in option_specs(group):
            assert spec.strings[0] in done.stdout
    # Half a second is what a user should see; the rest is slack for a busy machine.
    assert elapsed_s < 3.0


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--num-layer 4", ["--num-layer", "did you mean --num-layers?"]),
        ("--tensor-parallel-size=2", ["--tensor-parallel-size", "--tensor-model-parallel-size"]),
        ("--zzzz", ["unknown flag --zzzz"]),
        ("stray", ["'stray'"]),
        ("--lr fast", ["--lr", "fast"]),
        ("--lr-decay-style cubic", ["--lr-decay-style", "cubic"]),
        ("--grpo-kl-beta 1", ["--grpo-kl-beta is refused"]),
        ("--rampup-batch-size 1 2", ["--rampup-batch-size"]),
    ],
)
def test_bad_command_lines(flags: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        parse_args(flags.split())
    for part in parts:
        assert part in str(error.value)


def test_both_spellings() -> None:
    for flag in ("--override-opt_param-scheduler", "--override-opt-param-scheduler"):
        assert parse_args([flag]).override_opt_param_scheduler
    for flag in ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        assert parse_args([flag]).use_checkpoint_opt_param_scheduler


def test_extra_groups_of_other_packages() -> None:
    argv = [*BASE.split(), "--extra-mode", "act"]
    args = parse_args(argv, {"controller": Extra})
    assert args.extra_mode == "act"
    assert "extra_mode" not in resolve(args, 1).flat()
    with pytest.raises(UsageError, match="--extra-mode"):
        parse_args(argv)


# Flags that are known and not implemented.


@pytest.mark.parametrize("flag", list(known_flags().values()), ids=lambda flag: flag.name)
def test_known_flags(flag: KnownFlag) -> None:
    count = flag.nargs if isinstance(flag.nargs, int) else 2
    argv = [flag.name, *["7"] * count]
    if flag.refusal is None:
        assert parse_args(argv).ignored_flags == (flag.name,)
        assert config_of(" ".join(argv)).runtime.notes[0].endswith(flag.name)
        return
    with pytest.raises(UsageError, match=flag.name):
        parse_args(argv)
    for value in flag.neutral:
        assert parse_args([flag.name, value]).ignored_flags == ()


def test_refusals_say_why_and_what_to_do() -> None:
    for flag in known_flags().values():
        assert flag.refusal is None or any(
            word in flag.refusal
            for word in ("use ", "remove ", "set ", "give ", "choose ", "write ", "shard ")
        ), flag.name


def test_one_note_for_all_ignored_flags() -> None:
    config = config_of("--use-mcore-models --no-one-logger --timing-log-level 2")
    assert config.runtime.ignored_flags == (
        "--use-mcore-models",
        "--no-one-logger",
        "--timing-log-level",
    )
    assert sum("--no-one-logger" in note for note in config.runtime.notes) == 1


# The three well-known examples.


def test_gpt3_example() -> None:
    config = resolve(parse_args(GPT3.split()), 4)
    assert config.layout == Layout(tp=2, pp=2)
    assert config.batch.train_samples == 500 * 64
    assert config.optim.lr_decay_samples == 430 * 64
    assert config.optim.lr_warmup_samples == int(0.001 * 430 * 64)
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert config.model.ffn_hidden_size == 2048
    assert config.parallel.distributed_backend == "gloo"
    assert any("--distributed-backend" in note for note in config.runtime.notes)
    assert config.runtime.run_dir == "checkpoints"
    assert config.precision.params_dtype == "fp16"


def test_llama3_example() -> None:
    with pytest.raises(UsageError, match="--decoupled-lr"):
        parse_args(LLAMA3.split())
    config = resolve(parse_args(LLAMA3.replace("--decoupled-lr 5.0e-4", "").split()), 4)
    assert config.layout == Layout(tp=2, dp=2)
    assert config.model.num_query_groups == 2
    assert not config.model.add_bias_linear
    assert config.precision.params_dtype == "bf16"
    assert not config.precision.accumulate_allreduce_grads_in_fp32
    assert config.parallel.sequence_parallel
    assert config.recompute.recompute_granularity == "full"
    assert config.logging.profile and config.logging.profile_step_start == 4
    assert "--rerun-mode" in config.runtime.ignored_flags
    assert "--context-parallel-size" not in config.runtime.ignored_flags


def test_mixtral_example_is_refused_clearly() -> None:
    with pytest.raises(UsageError) as error:
        parse_args(MIXTRAL.split())
    first = str(error.value).split("\n")[0]
    assert "--num-experts 8" in first
    assert "mixture of experts is not supported yet" in first
    assert "remove the --moe-*" in first


# The flat form.


def test_flat_form_is_json_and_comes_back() -> None:
    config = config_of("--iterations-to-skip 3 4 --rampup-batch-size 2 2 16 --global-batch-size 8")
    flat = json.loads(json.dumps(config.flat()))
    assert Config.from_flat(flat, config.explicit) == config
    assert flat["rampup_batch_size"] == [2, 2, 16]


def test_replace_across_groups() -> None:
    config = config_of()
    other = config.replace(num_layers=6, seed=7)
    assert (other.model.num_layers, other.runtime.seed) == (6, 7)
    assert other.replace(num_layers=4, seed=1234) == config
    with pytest.raises(ValueError, match="nun_layers"):
        config.replace(nun_layers=6)


def test_explicit_names() -> None:
    config = config_of("--no-rope-fusion --num-workers 2")
    assert {"apply_rope_fusion", "num_workers", "num_layers"} <= config.explicit
    assert "seed" not in config.explicit


def test_model_shape_from_a_checkpoint() -> None:
    stored = config_of("--swiglu --group-query-attention --num-query-groups 2").flat()
    few = (
        "--use-checkpoint-args --seq-length 16 --lr 1e-3 --micro-batch-size 1 --mock-data "
        "--train-iters 5 --num-layers 8"
    )
    args = parse_args(few.split())
    config = resolve(with_checkpoint_args(args, stored), 1)
    assert config.model.num_layers == 8
    assert config.model.num_query_groups == 2
    assert config.model.ffn_hidden_size == stored["ffn_hidden_size"]
    assert config.batch.seq_length == 16
