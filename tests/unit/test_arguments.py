"""From a command line to a configuration: defaults, derived values, refusals."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import GROUPS, Config
from megatron.trainer.config.arguments import (
    nearest_flag,
    parse_args,
    resolve,
    with_checkpoint_args,
)
from megatron.trainer.config.fields import field_docstrings, option, option_specs
from megatron.trainer.config.known_flags import (
    KnownFlag,
    deprecated,
    known_flags,
    of_forks,
    refused_beginnings,
)
from megatron.trainer.config.layout import Layout
from tests.helpers.examples import GPT3, LLAMA3, MIXTRAL, SMALL, config_of, names_a_way_on

DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    extra_mode: str = option("observe", choices=("observe", "act"))
    """A flag of another package."""


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


def test_help_is_light() -> None:
    code = (
        "import sys\n"
        "from megatron.trainer.config.arguments import parse_args\n"
        "try: parse_args(['--help'])\n"
        "finally: print('heavy', [m for m in sys.modules if m in ('torch', 'megatron.core')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "heavy []" in done.stdout
    for group in GROUPS.values():
        for spec in option_specs(group):
            assert spec.strings[0] in done.stdout


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--num-layer 4", ["--num-layer", "did you mean --num-layers?"]),
        ("--tensor-parallel-size=2", ["--tensor-parallel-size", "--tensor-model-parallel-size"]),
        ("--zzzz", ["unknown flag --zzzz"]),
        ("--zzzz -1 --zzzz=-1", ["unknown flag --zzzz"]),
        ("--zzzz -1e-3", ["unknown flag --zzzz"]),
        ("--zzzz -inf", ["unknown flag --zzzz"]),
        ("-num-layers 4", ["unknown flag -num-layers", "--num-layers"]),
        ("--moe-router-topkk 2", ["--moe-router-topkk is refused", "mean --moe-router-topk?"]),
        ("--moe-grouped-gem", ["--moe-grouped-gem is refused", "mean --moe-grouped-gemm?"]),
        ("--moe-zzzz", ["--moe-zzzz is refused: this part of a mixture"]),
        ("stray", ["'stray'"]),
        ("--lr fast", ["--lr", "'fast'"]),
        ("--seed REPEAT", ["--seed", "'REPEAT'"]),
        ("--seed 1.5", ["--seed", "'1.5'"]),
        ("--seed", ["--seed", "one argument"]),
        ("--bf16=yes", ["--bf16", "'yes'"]),
        ("--lr-decay-style cubic", ["--lr-decay-style", "cubic"]),
        ("--cuda-graph-impl some", ["--cuda-graph-impl", "'some'", "transformer_engine"]),
        ("--dist-ckpt-strictness some", ["--dist-ckpt-strictness", "'some'", "log_all"]),
        ("--ckpt-format some", ["--ckpt-format", "'some'"]),
        ("--fp8-format e5m2", ["--fp8-format", "'e5m2'"]),
        ("--timing-log-level 3", ["--timing-log-level", "'3'"]),
        ("--grpo-kl-beta 1", ["--grpo-kl-beta is refused"]),
        ("--rampup-batch-size 1 2", ["--rampup-batch-size", "3 arguments"]),
    ],
)
def test_bad_command_lines(flags: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        parse_args(flags.split())
    assert names_a_way_on(str(error.value)) and "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_all_problems_of_a_command_line_each_once() -> None:
    flags = (
        "--top_k -1 --moe-latent-size 8 --mint_p=2 --top_k -2 --bf16 --moe-new 1 --tp-comm-overlap"
    )
    with pytest.raises(UsageError) as error:
        parse_args(flags.split())
    lines = str(error.value).split("\n")
    named = ["--moe-latent-size 8", "--top_k", "--mint_p", "--moe-new"]
    assert len(lines) == len(named) and all(name in "\n".join(lines) for name in named)
    assert all(map(names_a_way_on, lines))


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--num-layer", "--num-layers"),
        ("--micro-batch", "--micro-batch-size"),
        ("--seq-len", "--seq-length"),
        ("--pipeline-parallel-size", "--pipeline-model-parallel-size"),
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
        ("--use-flash-attention", "--use-flash-attn"),
        ("--train-iterations", "--train-iters"),
        ("--num-expert", "--num-experts"),
        ("--no-bias-swiglu", "--no-bias-swiglu-fusion"),
        ("--num_layers", "--num-layers"),
        ("--override-opt-param_scheduler", "--override-opt-param-scheduler"),
        ("--dist_ckpt_strictness", "--dist-ckpt-strictness"),
        ("-seed", "--seed"),
        ("--BF16", "--bf16"),
        ("--verify-data-set", None),
        ("--top_k", None),
        ("--wandb-mode", None),
        ("--gradient-checkpointing", None),
        ("--learning-rate", None),
        ("--dropout", None),
        ("--linear-layers", None),
        ("--batch-siz", None),
        ("--no-async-save", None),
        ("--bias-swiglu-fusion", None),
    ],
)
def test_hints_are_near(flag: str, meant: str | None) -> None:
    ours = [s for group in GROUPS.values() for spec in option_specs(group) for s in spec.strings]
    assert nearest_flag(flag, [*ours, *known_flags()]) == meant


@pytest.mark.parametrize("flag", ["--RMSNorm", "--use_rms_norm", "--use-flash-attn-v2"])
def test_a_flag_of_a_fork_is_told_in_the_words_of_megatron_lm(flag: str) -> None:
    instead = of_forks()[flag.replace("_", "-").lower()]
    with pytest.raises(UsageError, match=f"^unknown flag {flag}; write {instead}$"):
        parse_args([flag])


def test_what_flags_of_forks_become_is_known_and_they_are_not() -> None:
    ours = {s for group in GROUPS.values() for spec in option_specs(group) for s in spec.strings}
    for flag, instead in of_forks().items():
        assert flag not in ours | {*known_flags()}
        assert {word for word in instead.split() if word.startswith("--")} <= ours


def test_both_spellings() -> None:
    for flag in ("--override-opt_param-scheduler", "--override-opt-param-scheduler"):
        assert parse_args([flag]).override_opt_param_scheduler
    for flag in ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        assert parse_args([flag]).use_checkpoint_opt_param_scheduler


def test_extra_groups_of_other_packages() -> None:
    argv = [*SMALL.split(), "--extra-mode", "act"]
    args = parse_args(argv, {"controller": Extra})
    assert args.extra_mode == "act"
    assert "extra_mode" not in resolve(args, 1).flat()
    with pytest.raises(UsageError, match="--extra-mode"):
        parse_args(argv)


# Flags that are known and not implemented.


def words_of(flag: KnownFlag) -> list[str]:
    """The flag with values that ask for something."""
    count = flag.nargs if isinstance(flag.nargs, int) else 2
    value = next(v for v in flag.choices or ["7"] if v not in flag.neutral)
    return [flag.name, *[value] * count]


HARMLESS = [flag for flag in known_flags().values() if flag.refusal is None]
REFUSED = [flag for flag in known_flags().values() if flag.refusal is not None]


def test_harmless_flags_are_accepted_and_named_in_one_note_each() -> None:
    config = config_of(" ".join(word for flag in HARMLESS for word in words_of(flag)))
    assert set(config.runtime.ignored_flags) == {flag.name for flag in HARMLESS}
    named = [word for note in config.runtime.notes for word in note.split(": ")[0].split(", ")]
    plain = [
        word
        for note in config.runtime.notes
        if "without effect" in note
        for word in note.split(": ")[1].split(", ")
    ]
    for flag in HARMLESS:
        assert (named + plain).count(flag.name) == 1
        assert (flag.name in named) == (flag.instead is not None)
        assert any(note.endswith(f": {flag.instead}") for note in config.runtime.notes) == (
            flag.instead is not None
        )


def test_refused_flags_say_why_and_what_to_do() -> None:
    with pytest.raises(UsageError) as error:
        parse_args([word for flag in REFUSED for word in words_of(flag)])
    lines = str(error.value).split("\n")
    assert lines == [f"{' '.join(words_of(f))} is refused: {f.refusal}" for f in REFUSED]
    assert all(map(names_a_way_on, [*lines, *refused_beginnings().values()]))


def test_values_that_ask_for_nothing_need_no_note() -> None:
    for flag in known_flags().values():
        for value in flag.neutral:
            if flag.choices is None or value in flag.choices:
                assert parse_args([flag.name, value]).ignored_flags == ()


def test_no_flag_of_megatron_lm_is_unknown() -> None:
    """Those of core 0.16.1 to 0.20.0: name -> number of values, and the values there are.
    What only the newer one takes may be missing."""
    theirs = json.loads((DATA / "megatron_lm_flags_0.16.json").read_text())["flags"]
    newer = json.loads((DATA / "megatron_lm_flags_0.20.json").read_text())["flags"]
    ours = {s: x for group in GROUPS.values() for x in option_specs(group) for s in x.strings}
    problems = []
    for name, (nargs, choices) in (newer | theirs).items():
        spec, known = ours.get(name), known_flags().get(name)
        if spec is not None:
            mine = 0 if spec.kind is bool else 1 if spec.nargs is None else spec.nargs
            values = None if spec.choices is None else sorted(map(str, spec.choices))
        elif known is not None:
            mine, values = known.nargs, None if known.choices is None else sorted(known.choices)
        else:
            if not name.startswith(tuple(refused_beginnings())):
                problems.append(f"{name} is not known")
            continue
        # A string that is read otherwise than there is no other flag.
        more = set(newer.get(name, (nargs, choices))[1] or ())
        allowed = set(choices or ()) <= set(values or choices or ()) <= set(choices or ()) | more
        if mine != nargs or (values is not None and not allowed):
            problems.append(f"{name} takes {mine} {values}, there {nargs} {choices}")
    assert len(theirs) > 600 and len(newer) > 200 and not problems, problems


def test_what_was_given_up_names_its_successor() -> None:
    ours = {s for group in GROUPS.values() for spec in option_specs(group) for s in spec.strings}
    assert set(deprecated().values()) <= ours and not set(deprecated()) & ours


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--dist-ckpt-strictness log_all", "is refused in any case"),
        ("--dist-ckpt-strictness ignore_all", "is refused in any case"),
        ("--cuda-graph-impl local --cuda-graph-scope attn", "no CUDA graphs"),
        ("--offload-modules core_attn", "--recompute-granularity"),
        ("--use-mp-args-from-checkpoint-args", "the layout is that of the flags"),
        ("--ckpt-format torch", "as torch_dist"),
        ("--inprocess-restart --inprocess-granularity rank", "supervisor"),
    ],
)
def test_notes_say_what_happens_instead(flags: str, note: str) -> None:
    config = config_of(flags)
    (line,) = [line for line in config.runtime.notes if note in line]
    assert all(flag in line for flag in flags.split() if flag.startswith("--"))
    assert config.checkpoint.ckpt_format == "torch_dist"


# The three well-known examples.


def test_gpt3_example() -> None:
    config = resolve(parse_args(GPT3.split()), 4)
    assert config.layout == Layout(tp=2, pp=2)
    # Exactly 500 steps, of which the first ones are smaller: 16 in 22 steps, 32 in 11, 48 in 7.
    ramped = 22 * 16 + 11 * 32 + 7 * 48
    assert config.batch.train_samples == ramped + (500 - 40) * 64
    assert config.optim.lr_decay_samples == ramped + (430 - 40) * 64
    assert config.optim.lr_warmup_samples == int(0.001 * config.optim.lr_decay_samples)
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert config.model.ffn_hidden_size == 2048
    assert config.parallel.distributed_backend == "gloo"
    assert any("--distributed-backend" in note for note in config.runtime.notes)
    assert config.runtime.run_dir == "checkpoints"
    assert config.precision.params_dtype == "fp16"


def test_llama3_example() -> None:
    config = resolve(parse_args(LLAMA3.split()), 4)
    assert config.optim.decoupled_lr == 5.0e-4
    assert config.layout == Layout(tp=2, dp=2)
    assert config.model.num_query_groups == 2
    assert not config.model.add_bias_linear
    assert config.precision.params_dtype == "bf16"
    assert not config.precision.accumulate_allreduce_grads_in_fp32
    assert config.parallel.sequence_parallel
    assert config.recompute.recompute_granularity == "full"
    assert config.logging.profile and config.logging.profile_step_start == 4
    assert "--ckpt-assume-constant-structure" in config.runtime.ignored_flags
    assert "--rerun-mode" not in config.runtime.ignored_flags, "it is disabled"
    assert "--context-parallel-size" not in config.runtime.ignored_flags


def test_mixtral_example_is_taken_as_it_is() -> None:
    config = resolve(
        parse_args(MIXTRAL.split()), 64, cuda_available=True, transformer_engine_available=True
    )
    assert config.moe.num_experts == 8 and config.layout.ep == 8
    assert config.moe.moe_grouped_gemm


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
    stored = config_of(
        "--swiglu --group-query-attention --num-query-groups 2 --vocab-file v.json --merge-file m"
    ).flat()
    few = (
        "--use-checkpoint-args --seq-length 16 --lr 1e-3 --micro-batch-size 1 --mock-data "
        "--train-iters 5 --num-layers 8"
    )
    args = parse_args(few.split())
    config = resolve(with_checkpoint_args(args, stored), 1)
    assert config.model.num_layers == 8
    assert config.model.num_query_groups == 2
    assert config.model.ffn_hidden_size == stored["ffn_hidden_size"]
    assert (config.data.vocab_file, config.data.merge_file) == ("v.json", "m")
    assert config.batch.seq_length == 16
