"""The house rules that no linter checks: the tree, the namespace, sizes, layers."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.trainer.common.extras import extras

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    path
    for path in (ROOT / "megatron", ROOT / "copus_ext", ROOT / "tools", ROOT / "scripts")
    if path.exists()
]
SOURCES = sorted(file for package in PACKAGES for file in package.rglob("*.py"))
ALL_SOURCES = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function, without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            has_doc = ast.get_docstring(node) is not None
            doc = (first.end_lineno or 0) - first.lineno + 1 if has_doc else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - doc


def test_megatron_stays_a_namespace_package() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert SOURCES, "nothing to check"


def test_packaging_finds_our_packages_and_nothing_else() -> None:
    setuptools = pytest.importorskip("setuptools")
    tree = ast.parse((ROOT / "setup.py").read_text())
    (include,) = (
        ast.literal_eval(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "find_namespace_packages"
        for keyword in node.keywords
        if keyword.arg == "include"
    )
    found = setuptools.find_namespace_packages(where=str(ROOT), include=include)
    assert "megatron.trainer" in found and "megatron" not in found
    assert all(p.startswith(("megatron.trainer", "copus_ext")) for p in found)


def test_files_and_functions_stay_readable() -> None:
    problems = []
    for path in SOURCES:
        text = path.read_text()
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES:
            problems.append(f"{name(path)}: {num_lines} lines")
        problems += [
            f"{name(path)}: {function} has {lines} lines"
            for function, lines in functions(ast.parse(text))
            if lines > MAX_FUNCTION_LINES
        ]
    assert not problems, problems


def test_page_templates_stay_readable() -> None:
    pages = [file for package in PACKAGES for file in package.rglob("templates/*")]
    lines = {name(file): len(file.read_text().splitlines()) for file in pages}
    assert lines and max(lines.values()) <= MAX_FILE_LINES, lines


def test_nothing_is_left_for_later() -> None:
    later = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    texts = {name(path): path.read_text() for path in ALL_SOURCES}
    assert not [path for path, text in texts.items() if any(word in text for word in later)]


OWN_WORDS = {"copus_ext/launch/workers.py", "copus_ext/commands/replay.py"}
OWN_WORDS |= {"megatron/trainer/config/known_flags.py"}
"""They parse what this program has just written, or a file of its own."""


def test_what_comes_from_outside_has_one_parser() -> None:
    # Another call would let RecursionError through, or a value that is nested too deeply.
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                call = f"{node.value.id}.{node.attr}"
                if call in ("json.load", "json.loads", "yaml.load", "yaml.safe_load"):
                    found.add(name(path))
    assert found == OWN_WORDS | {"megatron/trainer/common/outside.py"}


INVENTED_DATA = {
    "tests/helpers/examples.py": "an example of Megatron-LM, in its words",
    "tests/unit/test_restore.py": "flags that Megatron-LM stores, compared without a run",
    "bench/overhead.py": "the time of the controller's own part of a step",
    "bench/gpu_stub_memory.py": "the memory of a step, whose numbers nothing computes",
    "tests/distributed/worker_memory.py": "the memory of a step",
    "tests/newest_core/write_checkpoint.py": "the format of a checkpoint",
}
"""Files that may name `--mock-data`, with the reason."""


def _is_unit(path: Path) -> bool:
    is_of_extra = "extras" in path.parts and path.name.startswith("test_")
    return path.parent.name == "unit" or (is_of_extra and "ranks" not in path.name)


def test_runs_that_recover_move_or_resume_train_on_text() -> None:
    # With invented data nothing can differ from what a run was trained on.
    about = ("elastic", "relayout", "reshard", "transfer", "resume", "restore", "relaunch")
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    checked = [f for f in files if not _is_unit(f) or any(word in f.name for word in about)]
    words = ("mock" + "-data", "mock" + "_data")
    named = {name(f) for f in checked if any(word in f.read_text() for word in words)}
    assert named == {*INVENTED_DATA}


SCRIPTS = [f for folder in ("scripts", "tests") for f in (ROOT / folder).rglob("*.s[bh]*")]


@pytest.mark.parametrize("script", sorted(SCRIPTS), ids=name)
def test_a_shell_script_parses(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the packages and of the layers' configuration."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("megatron", "copus_ext"):
        shutil.copytree(ROOT / package, tmp_path / package)
    return tmp_path


def lint(house: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=house,
        env={"PYTHONPATH": str(house), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )


def test_the_layers_hold(house: Path) -> None:
    result = lint(house)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        (
            "common/errors.py",
            "from megatron.trainer.logging import tracker",
            "megatron.trainer.common.errors",
        ),
        ("logging/tracker.py", "import copus_ext.controller.callback", "copus_ext"),
        ("stray.py", "", "stray"),
    ],
)
def test_a_broken_layer_is_found(house: Path, file: str, line: str, said: str) -> None:
    target = house / "megatron" / "trainer" / file
    before = target.read_text() if target.exists() else ""
    target.write_text(before + "\n" + line + "\n")
    result = lint(house)
    assert result.returncode == 1
    assert said in result.stdout


def _imports(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports, also those that an import takes from a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_imports_an_extra_that_it_can_be_without() -> None:
    # `of_extra` of tests/helpers skips where the extra has been removed.
    found = {extra.name: extra for extra in extras()}
    commands = {c.replace("-", "_"): e.name for e in found.values() for c in e.commands}
    problems = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        place = path.relative_to(ROOT / "tests").parts
        own = place[1] if place[0] == "extras" else ""
        allowed = {own, *(found[own].needs if own in found else ())}
        for module in _imports(ast.parse(path.read_text())):
            words = module.split(".")
            named = words[words.index("extras") + 1 :][:1] if "extras" in words[:-1] else []
            if words[0] == "tools":
                named = [commands.get(word, own) for word in words[1:2]]
            if {*named} & {*found} - allowed:
                problems.append(f"{name(path)} imports {module}")
    assert not problems, problems
