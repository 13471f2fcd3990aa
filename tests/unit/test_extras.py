"""The core knows extras by their contract alone: it works without any, and takes a new one."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.commands import main as commands
from copus_ext.cost_model.extras import planned_flags
from copus_ext.reshard import saved_state
from megatron.trainer.common.extras import PACKAGES, Extra, defaults_of, extras
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.train.step_feature import StepFeature
from tests.helpers.jobs import TINY

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {extra.name: ROOT / extra.package.replace(".", "/") for extra in extras()}
LARGE = ("elastic", "graph_stages", "serving")
"""Extras that may have 2,500 lines; CONTRIBUTING.md names them."""
REFERENCES = ("flags", "check", "feature", "layout_problems", "batch_problems")
REFERENCES += ("schedule_problems", "planned")
REFERENCES += ("controller_problems", "cost_terms", "step_period", "model_format")
REFERENCES += (
    "launcher",
    "relaunch",
    "callbacks",
    "sinks",
    "segment",
    "as_given",
    "settle",
    "run_data",
)
ALL_CORE = """
import importlib, json, pathlib, sys
from megatron.trainer.common.extras import extras
from megatron.trainer.config import GROUPS
from megatron.trainer.config.arguments import parse_args, resolve
from copus_ext.commands.main import module_of, names
from copus_ext.controller.flags import CopusConfig

root = pathlib.Path(sys.argv[1])
for package in ("megatron", "copus_ext"):
    for file in sorted((root / package).rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        importlib.import_module(name.removesuffix(".__init__"))
for name in names():
    importlib.import_module(module_of(name)).main
flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --lr 1e-3 "
flags += "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 2 --data-path x --copus"
args = parse_args(flags.split(), {"copus controller": CopusConfig})
config = resolve(args, 2)
again = type(config).from_flat(config.flat(), config.explicit)
assert again == config
from copus_ext.goodput.policies import named
from megatron.trainer.config.fields import option_specs

(policy,) = (x for x in option_specs(CopusConfig) if x.dest == "copus_policy")
for name in policy.choices:
    named(CopusConfig(copus_policy=name).copus_policy)
print(json.dumps({"extras": [e.name for e in extras()], "groups": [*GROUPS]}))
"""
"""Imports each module of a tree, and reads flags; prints the extras that are there."""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for package in ("megatron", "copus_ext"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    return tmp_path


def in_house(house: Path, program: str) -> str:
    """What a program prints that sees the packages of a copy."""
    environment = {**os.environ, "PYTHONPATH": str(house), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program, str(house)]
    result = subprocess.run(
        command, cwd=house, env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize("extra", extras(), ids=lambda extra: extra.name)
def test_an_extra_has_what_it_names(extra: Extra) -> None:
    for what in REFERENCES:
        assert getattr(extra, what) is None or callable(extra.get(what)), what
    folder = FOLDERS[extra.name]
    assert (folder / "README.md").is_file(), "what it is for, its source, its gain, how to use it"
    for reference in extra.policies.values():
        assert callable(extra.load(reference).weigh), reference
    for module in extra.commands.values():
        assert (folder / module.replace(".", "/")).with_suffix(".py").is_file()
    lines = sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))
    assert lines <= (2500 if extra.name in LARGE else 2000), lines


def test_the_page_of_the_architecture_lists_the_extras_and_what_they_need() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    names = {e.name: ", ".join(f"`{needed}`" for needed in e.needs) for e in extras()}
    wanted = [
        f"| `{extra.name}` | {extra.title} | {names[extra.name]} |"
        for package in PACKAGES
        for extra in extras()
        if extra.package.startswith(package)
    ]
    lacks, has = ([x for x in a if x not in b] for a, b in ((wanted, rows), (rows, wanted)))
    assert rows == wanted, f"docs/architecture.md: add {lacks}, drop {has}, in order of the names"


def test_each_extra_is_found_once() -> None:
    names = [extra.name for extra in extras()]
    assert len(names) == len({*names}) and names == sorted(names)
    flags = [
        f.name for extra in extras() if extra.flags for f in dataclasses.fields(extra.get("flags"))
    ]
    assert len(flags) == len({*flags})


def test_the_core_works_without_any(house: Path) -> None:
    assert json.loads(in_house(house, ALL_CORE))["extras"] == [*FOLDERS]
    for package in PACKAGES:
        shutil.rmtree(house / package.replace(".", "/"), ignore_errors=True)
    found = json.loads(in_house(house, ALL_CORE))
    assert not found["extras"] and not {*found["groups"]} & {*FOLDERS}


def test_an_installed_extra_that_does_not_import_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = EntryPoint("broken", "no_such_package.extra_of_it", "copus.extras")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [broken])
    assert {extra.name for extra in extras.__wrapped__()} == {*FOLDERS}
    assert "the installed extra broken is left out: No module named" in caplog.text


def test_no_extra_takes_the_place_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = Extra(title="greedy", commands={"plan": "own"}, package="greedy")
    monkeypatch.setattr(commands, "extras", lambda: (greedy,))
    assert commands.module_of("plan") == "copus_ext.commands.plan"
    assert commands.names().count("plan") == 1


def test_the_planner_asks_an_extra_that_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataclasses.replace(
        next(extra for extra in extras() if extra.layout_problems), cost_terms=None, planned=None
    )
    monkeypatch.setattr("copus_ext.cost_model.extras.extras", lambda: (made,))
    name, default = next(iter(defaults_of(made).items()))
    assert planned_flags(SimpleNamespace(**{name: 7})) == {name: 7}
    assert planned_flags(SimpleNamespace(**{name: default})) == {}


def test_no_extra_needs_another_that_it_does_not_name() -> None:
    for name, folder in FOLDERS.items():
        (needs,) = (extra.needs for extra in extras() if extra.name == name)
        others = [extra.package for extra in extras() if extra.name not in (name, *needs)]
        for file in folder.rglob("*.py"):
            text = file.read_text()
            assert not [package for package in others if package in text], file


def test_no_file_of_the_core_names_an_extra() -> None:
    places = [folder.parent for folder in FOLDERS.values()]
    for package in ("megatron", "copus_ext"):
        for file in (ROOT / package).rglob("*.py"):
            if not any(place in file.parents for place in places):
                text = file.read_text()
                assert not [e.package for e in extras() if e.package in text], file


DEMONSTRATION = {
    "extra.py": '''"""Counts steps, for a test."""
from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="count",
    flags="parts:CountConfig",
    check="parts:check",
    feature="parts:counter",
    layout_problems="parts:layout_problems",
    controller_problems="parts:controller_problems",
    cost_terms="parts:cost_terms",
    step_period="parts:step_period",
    segment="parts:segment",
    settle="parts:settle",
    as_given="parts:as_given",
    model_format="parts:Counted",
    launcher="parts:Counting",
    plan_commands={"counted": "parts:Planned"},
    commands={"count": "parts"},
)
''',
    "parts.py": '''"""Says how far it counts."""
from dataclasses import dataclass
from copus_ext.launch.launchers import Launcher
from copus_ext.planner.commands import PlanCommand
from copus_ext.planner.request import UsageProblem
from megatron.trainer.common.extras import CostTerms
from megatron.trainer.config.fields import option
from megatron.trainer.config.segment import Segment


@dataclass(frozen=True, kw_only=True)
class CountConfig:
    count_to: int | None = option(None)
    """How far."""


def check(draft, environment):
    count = draft["count_to"]
    draft.require(count != 13, "--count-to 13 is refused; use 14")


def layout_problems(arguments, layout):
    too_many = arguments.get("count_to") is not None and layout.tp > 1
    return ["--count-to needs --tensor-model-parallel-size 1"] if too_many else []


def controller_problems(arguments, moves):
    is_there = moves and arguments.get("count_to") is not None
    return ["--count-to depends on the layout; use --copus-layouts current"] if is_there else []


def cost_terms(candidates):
    number = candidates.extras["count_to"]
    return CostTerms(
        parameter_bytes=number,
        layer_bytes=1e6,
        layer_products=((number, 64, 64, 1e6),),
        sent_layer_bytes=1e6,
        sent_parameter_bytes=4.0,
    )


def step_period(arguments):
    return arguments.get("count_to") or 1


def segment(config):
    end = config.batch.train_samples
    return Segment(seq_length=16, start=1, end=end, ratio=2) if count_of(config) == 4 else None


def settle(config, stored):
    return config.replace(count_to=6) if count_of(config) == 5 else config


def count_of(config):
    return config.extras["count"].count_to


def as_given(stored, now):
    return {**stored, "rotary_base": 7}


class Counted:
    name, title = "counted", "a counted model"

    def is_model(self, folder):
        return (folder / "counted").exists()

    def add_flags(self, group):
        group.add_argument("--count-from", type=int)

    def save(self, source, destination, changes, *, flags, **how):
        raise ValueError(f"counted from {flags.count_from}")


class Planned(PlanCommand):
    help = "search, and count"

    def add_flags(self, group):
        group.add_argument("--count-of", type=int, default=0)

    def check(self, args, model, cluster):
        if args.count_of < 0:
            raise UsageProblem("--count-of must be at least 0")

    def of_batch(self, planner, plan, *, top):
        return Count(plan.num_ranked)


@dataclass
class Count:
    number: int
    fits = True

    def add_to(self, record):
        record["counted"] = self.number

    def show(self, console):
        console.print(f"counted {self.number}")


class Counting:
    flag = "--counting"

    def add_flags(self, parser):
        parser.add_argument("--counting", action="store_true")

    def launcher(self, given):
        return Launcher(module="no.such", folder="counting") if given.counting else None

    def runner(self, environment):
        return (lambda flags, train: 7) if "COUNTING" in environment else None


def counter(config, model, groups):
    return None


def main(argv):
    print("one two")
    return 0
''',
}
NEW_ONE = """
import contextlib, io, json, os, pathlib
from copus_ext.commands.main import main, names
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import check_run
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.memory import memory
from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.step import step_time
from copus_ext.launch.options import read_options
from copus_ext.planner.space import REJECTION_CODES, Limits, enumerate_points, to_config_batch
from megatron.trainer.checkpoint.formats import format_of
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.extras import step_period
from megatron.trainer.config.arguments import build_parser, parse_args, resolve
from megatron.trainer.config.arguments import with_checkpoint_args

base = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --lr 1e-3 "
base += "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 2 --data-path x "
config = resolve(parse_args((base + "--count-to 3").split()), 1)
assert config.extras["count"].count_to == 3 and config.flat()["count_to"] == 3
longer = config.replace(count_to=4)
assert longer.extras["count"].count_to == 4 and config.segment.is_whole_run
assert not longer.segment.is_whole_run and longer.segment.sample_at(2) == 0
assert resolve(parse_args((base + "--count-to 5").split()), 1).extras["count"].count_to == 6
args = parse_args(base.split())
assert with_checkpoint_args(args, {"rotary_base": 9}).rotary_base == 7
for flags, said in (("13", "use 14"), ("3 --tensor-model-parallel-size 2", "needs --tensor")):
    try:
        resolve(parse_args((base + "--count-to " + flags).split()), 2)
    except UsageError as error:
        assert said in str(error), error
    else:
        raise AssertionError(flags)
planned = spec_of_flags((base + "--count-to 3").split())
plain = spec_of_flags(base.split())
assert planned.extras == {"count_to": 3} and not plain.extras
points = enumerate_points(planned, preset("cpu:2"), 4, Limits(overlap=False))
codes = {(int(tp), REJECTION_CODES[code]) for tp, code in zip(points.tp, points.code) if code >= 0}
assert (2, "extra") in codes and not any(tp == 1 and code == "extra" for tp, code in codes)
first = points.take(points.tp == 1)
grown, usual = (memory(to_config_batch(m, preset("cpu:2"), first)).stages for m in (planned, plain))
held, layers = usual["weights"] / 4, (2 / first.pp) * (usual["weights"] > 0)
assert abs(grown["optimizer"] - usual["optimizer"] - 3 * held - 1e6 * layers).max() < 1
constants = preset("cpu:2").load_constants()
timed = [step_time(to_config_batch(m, preset("cpu:2"), first), constants) for m in (planned, plain)]
slow, fast = timed
assert (slow.parts["optimizer"] > fast.parts["optimizer"]).all()
more = slow.parts["dp"] - fast.parts["dp"]
copies = first.dp * first.cp
assert (more[copies > 1] > 0).all() and (more[copies == 1] == 0).all(), more
assert step_period({"count_to": 3}) == 3 and step_period({}) == 1
config = resolve(parse_args((base + "--count-to 3").split()), 2)
check_run(CopusConfig(copus=True, copus_layouts="current"), config)
try:
    check_run(CopusConfig(copus=True, copus_layouts="all"), config)
except UsageError as error:
    assert "--count-to depends" in str(error)
else:
    raise AssertionError("moved")
words = ["--nproc-per-node", "1", "--", *base.split()]
assert read_options(words, {}).launcher is None
options = read_options(["--counting", "--nnodes", "1:2", "--rdzv-endpoint", "x:1", *words], {})
assert options.launcher.folder == "counting" and options.min_nodes == 1
try:
    read_options(["--nnodes", "1:2", *words], {})
except UsageError as error:
    assert "needs --counting" in str(error), error
else:
    raise AssertionError("1:2")
searched = ["plan", "counted", "--model", "llama-2-7b", "--cluster", "h100-80g:8"]
searched += ["--global-batch-size", "64"]
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(searched) == 0 and main([*searched, "--json"]) == 0
table, _, record = said.getvalue().partition("\\n{")
number = json.loads("{" + record)["plans"][0]["counted"]
assert number > 0 and f"counted {number}" in table
with contextlib.redirect_stderr(io.StringIO()) as said:
    assert main([*searched, "--count-of", "-1"]) == 2
assert "--count-of must be" in said.getvalue()
os.environ["COUNTING"] = "1"
assert main(["pretrain", *base.split(), "--device", "cpu"]) == 7
assert format_of(pathlib.Path.cwd()) is None
convert = "convert-checkpoint a b --format counted --count-from 4".split()
if "convert-checkpoint" in names():  # of an extra
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(convert) == 3
    assert "counted from 4" in said.getvalue()
assert "--count-to N" in build_parser().format_help() and "count" in names()
assert main(["count"]) == 0
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_new_folder_is_a_new_extra(house: Path, package: str) -> None:
    folder = house / package.replace(".", "/") / "count"
    folder.mkdir(parents=True)
    for name, text in DEMONSTRATION.items():
        (folder / name).write_text(text)
    assert in_house(house, NEW_ONE) == "one two"


def test_an_extra_is_gone_without_another_that_it_needs(house: Path) -> None:
    folder = house / PACKAGES[0].replace(".", "/")
    head = DEMONSTRATION["extra.py"].partition("EXTRA =")[0]
    for name, needs in (("a", ("b",)), ("b", ("nobody",)), ("c", ("d",)), ("d", ())):
        (folder / name).mkdir(parents=True)
        has = f"title={name!r}, commands={{{name!r}: 'parts'}}, needs={needs!r}"
        text = f"{head}EXTRA = Extra({has})"
        (folder / name / "extra.py").write_text(text)
        (folder / name / "parts.py").write_text('"""Nothing."""')
    program = "from megatron.trainer.common.extras import extras; "
    found = in_house(house, f"{program}print(*(extra.name for extra in extras()))").split()
    assert {*found} & {"a", "b", "c", "d"} == {"c", "d"}
    told = """
import contextlib, io
from copus_ext.commands.main import main
with contextlib.redirect_stderr(io.StringIO()) as said:
    for name in "ab":
        with contextlib.suppress(SystemExit):
            main([name])
print(repr(said.getvalue()))
"""
    said = in_house(house, told)
    assert "a needs the extra b, which is absent" in said
    assert "b needs the extra nobody, which is absent" in said


def test_a_change_of_layout_counts_what_extras_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_state.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(saved_state.dist, "get_backend", lambda: "none")
    monkeypatch.setattr(saved_state, "free_bytes", lambda is_cuda: 1e9)
    config = resolve(parse_args([*TINY.split(), "--train-iters", "1"]), 1)
    plan: Any = SimpleNamespace(source=[[]], target=[[]], target_bytes=[0])

    class Keeps(StepFeature):
        def __init__(self, needed: float, released: float) -> None:
            self.bytes = needed, released

        def relayout_bytes(self, config: Any, held: int) -> tuple[float, float]:
            assert held == 0
            return self.bytes

    def check(*features: StepFeature) -> None:
        device, model = SimpleNamespace(is_cuda=False), SimpleNamespace(chunks=[])
        job: Any = SimpleNamespace(device=device, model=model, features=features)
        saved_state.check_memory(job, plan, config)

    check(StepFeature(), Keeps(0.9e9, 0.0))
    check(Keeps(2.0e9, 0.5e9), Keeps(0.0, 0.6e9))
    with pytest.raises(saved_state.TooLarge, match=r"2.00 GB are needed .* 1.50 GB are free"):
        check(Keeps(1.0e9, 0.5e9), Keeps(1.0e9, 0.0))
