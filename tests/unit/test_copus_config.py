"""The controller's flags, its file of settings, and what was called otherwise before."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.controller.callback import Controller
from copus_ext.controller.flags import (
    CopusConfig,
    check_has_copus,
    controller_flags,
    given_by_value,
    read_settings,
    settings_by_name,
)
from copus_ext.megatron_lm.host import add_copus_args
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import build_parser, parse_args
from megatron.trainer.config.fields import option_specs
from scripts.docs.flags import settings_file

ROOT = Path(__file__).parents[2]


def parse(*words: str) -> Any:
    return parse_args(words, {"copus controller": CopusConfig})


def test_help_shows_a_dozen_flags_and_the_file() -> None:
    shown = build_parser({"copus controller": CopusConfig}).format_help()
    specs = option_specs(CopusConfig)
    on_line = [spec for spec in specs if spec.in_file is None]
    assert len(on_line) == 13
    assert all(f"{spec.strings[0]} " in shown for spec in on_line)
    assert not any(spec.strings[0] in shown for spec in specs if spec.in_file)


def words_of(spec: Any) -> list[str]:
    """A flag of the controller with a value that is its default where it has one."""
    if spec.kind is bool:
        return [spec.strings[0]]
    value = spec.default if spec.default is not None else {str: "x", int: 2, float: 2.0}[spec.kind]
    return [spec.strings[0], str(value)]


SPECS = option_specs(CopusConfig)
OTHERS = [spec for spec in SPECS if spec.dest != "copus" and spec.in_file is None]


@pytest.mark.parametrize("spec", OTHERS, ids=lambda spec: spec.dest)
def test_a_flag_of_the_controller_needs_the_controller(spec: Any) -> None:
    words = words_of(spec)
    line = f"{spec.strings[0]}: no effect without --copus; add --copus, or remove it"
    spellings = [words, ["=".join(words)]]
    for spelling in spellings[:1] if spec.kind is bool else spellings:
        args = parse(*spelling)
        with pytest.raises(UsageError) as raised:
            check_has_copus(args.explicit_flags, is_on=args.copus)
        assert str(raised.value) == line
        args = parse(*spelling, "--copus")
        check_has_copus(args.explicit_flags, is_on=args.copus)


def test_one_line_names_all_flags_that_need_the_controller() -> None:
    args = parse("--copus-layouts", "all", "--lr", "1", "--copus-mode", "off")
    with pytest.raises(UsageError) as raised:
        check_has_copus(args.explicit_flags, is_on=args.copus)
    line = "--copus-mode, --copus-layouts: no effect without --copus; add --copus, or remove them"
    assert str(raised.value) == line
    # Megatron-LM's own parser does not say which flags were given.
    assert given_by_value(args) == {"copus_mode", "copus_layouts"}
    own = add_copus_args(argparse.ArgumentParser())
    assert given_by_value(own.parse_args([])) == set()
    assert given_by_value(own.parse_args(["--copus-mode", "off"])) == {"copus_mode"}


def test_a_launch_refuses_them_before_anything_else(tmp_path: Path) -> None:
    words = ["--copus-layouts", "current", "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith("error: --copus-layouts: no effect without --copus; add --copus, or remove it")
    )


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "copus.yaml"
    path.write_text("prebuild: 2\ninterval: 4e4\nbatch_grid: [24, 48]\nallow-shrink: true\n")
    flags = controller_flags(parse("--copus", "--copus-config", str(path), "--copus-interval", "9"))
    assert (flags.copus_prebuild, flags.copus_batch_grid) == (2, "24,48")
    assert (flags.copus_interval, flags.copus_allow_shrink) == (9.0, True)
    # Megatron-LM's own parser does not say which flags were given.
    other = vars(parse("--copus", "--copus-config", str(path), "--copus-policy", "static"))
    del other["explicit_flags"]
    assert controller_flags(SimpleNamespace(**other)) == CopusConfig(
        copus=True,
        copus_config=str(path),
        copus_policy="static",
        copus_prebuild=2,
        copus_interval=4e4,
        copus_batch_grid="24,48",
        copus_allow_shrink=True,
    )


def test_the_documented_file_holds_every_setting_at_its_default() -> None:
    path = ROOT / "docs" / "copus.yaml"
    assert path.read_text() == settings_file(), "PYTHONPATH=. python scripts/docs/flags.py"
    read = read_settings(path)
    assert read == {
        spec.dest: getattr(CopusConfig(), spec.dest) for spec in settings_by_name().values()
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_grit: 8", "unknown setting batch_grit; did you mean batch_grid"),
        ("copus: true", "unknown setting copus"),
        ("gns_estimator: speed", "gns_estimator: 'speed' is not one of"),
        ("prebuild: 1.5", "prebuild: '1.5' is not a whole number"),
        ("prebuild: true", "prebuild: True is no int"),
        ("allow_shrink: 1", "allow_shrink: 1 is neither true nor false"),
        ("interval: {a: 1}", "interval: {'a': 1} is no float"),
        ("- prebuild", "write one `name: value` in each line"),
        ("a: b: c", "is not valid YAML"),
        ("prebuild: 1\nprebuild: 2", "it has 'prebuild' twice; keep one of them"),
        ("prebuild: 1\ncopus-prebuild: 2", "copus-prebuild is prebuild, which stands there twice"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "copus.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_settings(path)
    assert words in str(raised.value) and str(raised.value).startswith(f"--copus-config {path}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("doubling_ratio: 1", "", "{where}: doubling_ratio 1 must exceed 1 and be finite"),
        (
            "max_global_batch_size: 0",
            "",
            "--copus-max-global-batch-size 0 must be positive; {where} sets "
            "--copus-max-global-batch-size",
        ),
        (
            "max_global_batch_size: 8",
            "--copus-min-global-batch-size 16",
            "--copus-min-global-batch-size 16 is above --copus-max-global-batch-size 8; {where} "
            "sets --copus-max-global-batch-size",
        ),
        (
            "max_global_batch_size: 8",
            "--copus-max-global-batch-size 0",
            "--copus-max-global-batch-size 0 must be positive",
        ),
    ],
)
def test_a_value_that_the_controller_refuses_is_named_with_its_file(
    tmp_path: Path, text: str, words: str, line: str
) -> None:
    path = tmp_path / "copus.yaml"
    path.write_text(text)
    flags = controller_flags(parse("--copus", "--copus-config", str(path), *words.split()))
    with pytest.raises(UsageError) as raised:
        Controller(flags)
    assert str(raised.value) == line.format(where=f"--copus-config {path}")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_settings(Path("/nowhere/copus.yaml"))


def test_an_empty_file_and_yaml_words(tmp_path: Path) -> None:
    path = tmp_path / "copus.yaml"
    path.write_text("")
    assert read_settings(path) == {}
    path.write_text("mode: off\nlr_rule: none\nmax_micro_batch_size: null\n")
    assert read_settings(path) == {
        "copus_mode": "off",
        "copus_lr_rule": "none",
        "copus_max_micro_batch_size": 64,
    }


@pytest.mark.parametrize("words", ["--copus-prebuild 2", "--copus-prebuild=2"])
def test_a_setting_of_the_file_is_no_flag(words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse("--copus", *words.split())
    assert str(raised.value) == (
        "--copus-prebuild is not a flag; write prebuild in the file of --copus-config"
    )
    own = add_copus_args(argparse.ArgumentParser())
    assert own.parse_args([]).copus_prebuild == CopusConfig().copus_prebuild
    with pytest.raises(SystemExit):
        own.parse_args(words.split())


def test_no_hint_offers_a_flag_that_belongs_in_the_file() -> None:
    with pytest.raises(UsageError, match="unknown flag --copus-prebuilt; remove it"):
        parse("--copus-prebuilt", "2")


def test_the_flags_join_the_parser_of_a_checkout_with_a_configuration_of_its_own() -> None:
    code = (
        "import argparse\n"
        "from copus_ext.megatron_lm.host import add_copus_args\n"
        "args = add_copus_args(argparse.ArgumentParser()).parse_args(['--copus'])\n"
        "from copus_ext.controller.flags import controller_flags\n"
        "assert controller_flags(args).copus"
    )
    path = os.pathsep.join([str(ROOT / "tests/helpers/fake_megatron_lm"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)


def test_the_policy_of_the_paper_has_two_names(tmp_path: Path) -> None:
    path = tmp_path / "copus.yaml"
    path.write_text("policy: paper\n")
    values = read_settings(path)
    assert CopusConfig(**values) == CopusConfig(copus_policy="copus")
