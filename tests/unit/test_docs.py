"""README.md and docs/: links, commands, what the site is made of."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import logging
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.commands import replay
from copus_ext.commands.main import module_of
from copus_ext.commands.pretrain import resolve_run
from copus_ext.controller import rules
from copus_ext.controller.decision_log import read_journal
from copus_ext.controller.flags import CopusConfig, controller_flags
from copus_ext.launch.options import read_options
from megatron.trainer.config.arguments import build_parser, parse_args
from megatron.trainer.config.fields import option, option_specs
from megatron.trainer.config.flag_names import setting_name
from megatron.trainer.config.known_flags import known_flags
from scripts.docs import pictures
from scripts.docs.flags import all_groups, flags_page
from tests.helpers.launch import ROOT
from tests.helpers.pages import commands

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
JOURNAL = DOCS / "results" / "tutorial_observe.journal.jsonl"


@pytest.fixture(scope="module")
def page() -> str:
    return flags_page(all_groups(), known_flags().values())


def test_the_page_of_flags_has_those_of_the_parser_and_no_other(page: str) -> None:
    parser = build_parser({"copus controller": CopusConfig})
    known = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    there = {s for action in known for s in action.option_strings} - {"-h", "--help"}
    shown = re.findall(r'<a id="([^"]+)"></a>', page)
    assert sorted(shown) == sorted(there)
    told = page.split("that have no effect here")[1]
    texts = " ".join(f"{flag.refusal} {flag.instead}" for flag in known_flags().values())
    named = set(re.findall(r"`(--[\w-]+[a-z0-9])`", told))
    assert set(known_flags()) <= named
    assert all(name in texts for name in named - set(known_flags()))
    plain = re.sub(r"[`\\]", "", told)
    assert all(str(flag.instead) in plain for flag in known_flags().values() if flag.instead)


def test_each_flag_is_shown_with_its_group_values_and_default(page: str) -> None:
    rows = {
        row.split("`")[1]: row for row in re.findall(r"^\| (?:<a id|`[a-z]).*$", page, re.MULTILINE)
    }
    for title, group in all_groups().items():
        assert f"## {title.capitalize()}\n" in page
        for spec in option_specs(group):
            name = setting_name(spec) if spec.in_file else spec.strings[0]
            row = rows[name]
            assert spec.help
            assert all(f"`{choice}`" in row for choice in spec.choices or ())
            if spec.kind is not bool and spec.default not in (None, ()):
                assert f"`{spec.default}`" in row
            assert ("required" in row.split(" | ")[2]) == spec.required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hostile:
    worst: str = option("a", choices=("a",))
    """<script>alert(1)</script> | one *more* [cell](javascript:x) for --worst."""


def test_a_docstring_cannot_break_the_page() -> None:
    text = flags_page({"hostile": Hostile}, [])
    (row,) = [line for line in text.splitlines() if "--worst" in line]
    assert "<script" not in text and r"\[cell\]" in row and r"\*more\*" in row
    assert len(re.findall(r"(?<!\\)\|", row)) == 5 and row.count("`--worst`") == 2


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_reads_well_in_the_repository(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text):
        assert "//" not in link and not link.startswith("/"), f"{link} is not relative"
        assert (path.parent / link).exists(), f"{link} leads nowhere"
    of_mkdocs = r"^(?:!!!|\?\?\?|:::|===|\[TOC\])|\{[:#.] ?[\w=]"
    assert not re.findall(of_mkdocs, re.sub(r"`[^`]*`", "", text), re.MULTILINE)


def test_the_pages_of_the_api_are_of_modules_that_exist() -> None:
    modules = re.findall(r": api/([\w.]+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert len(modules) > 5
    assert [m for m in modules if not (ROOT / (m.replace(".", "/") + ".py")).exists()] == []


def accept(program: str, *flags: str, world_size: int) -> None:
    """Reads flags as a run would.

    Raises:
        UsageError: the run would be refused.
    """
    assert program == "pretrain_gpt.py"
    args = parse_args(flags, {"copus controller": CopusConfig})
    controller = controller_flags(args)
    rules.check(controller)
    rules.check_run(controller, resolve_run(args, world_size))


MODEL = """--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128
--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 64 --train-samples 6400
--position-embedding-type rope --lr 1e-3 --tokenizer-type ByteLevelTokenizer
--data-path data/text_document"""
STANDS_FOR = {"YOUR": [], "K": ["0"], "FLAGS": MODEL.split()}
"""What a reader puts in place of a word of a page."""
WITHIN = ("copus", "python")
WITH_COMMANDS = [path.stem for path in sorted(DOCS.glob("*.md")) if "```bash\n" in path.read_text()]


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_commands_are_accepted(name: str) -> None:
    found = commands(DOCS / f"{name}.md")
    assert found
    for command in found:
        program, *words = [one for word in command for one in STANDS_FOR.get(word, [word])]
        if program == "srun":
            program, *words = words[next(i for i, word in enumerate(words) if word in WITHIN) :]
        if [program, words[0]] == ["copus", "launch"]:
            program, words = "python", ["-m", "copus_ext.launch.supervisor", *words[1:]]
        if program == "torchrun":
            assert words[0] == "--nproc-per-node"
            if words[2] == "-m":
                assert importlib.util.find_spec(words[3])
            else:
                accept(*words[2:], world_size=int(words[1]))
        elif program == "bash" or words[0].startswith("scripts/"):
            assert (ROOT / words[0]).exists()
        elif words[:2] == ["-m", "copus_ext.launch.supervisor"]:
            options, flags = read_options(words[2:]), words[words.index("--") + 1 :]
            flags = flags[flags[0] == "pretrain_gpt.py" :]
            accept("pretrain_gpt.py", *flags, world_size=options.nproc_per_node or 2)
        elif program == "python" and words[0] == "-m":
            assert importlib.util.find_spec(words[1])
        elif program == "python":
            accept(*words, world_size=8)
        else:
            assert program == "copus"
            tool = importlib.import_module(module_of(words[0]))
            parser = getattr(tool, "parser", None) or tool.make_parser
            parse = tool.parse if words[0] == "plan" else parser().parse_args
            parse(words[1:])


def test_the_python_of_the_tutorial_reads_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "observe"
    run.mkdir(parents=True)
    shutil.copy(JOURNAL, run / "journal.jsonl")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)
    exec(compile(code, "tutorial.md", "exec"), {})
    decisions = [r for r in read_journal(JOURNAL) if r["kind"] == "decision"]
    rows = sum(len(d["situation"]["rows"]) for d in decisions)
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(decisions) + rows


def test_the_tutorial_quotes_what_replay_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "tutorial.md").read_text()
    (quoted,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert replay.main([str(JOURNAL), "--all"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in quoted.splitlines() if line not in said] == []
    ((c, different, of),) = re.findall(r"-multiplier (\d+)` .*?\(here (\d+) of (\d+)\)", text)
    assert replay.main([str(JOURNAL), "--noise-scale-multiplier", c]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{int(of) - int(different)} choices the same, {different} different"


def test_the_run_of_the_tutorial_answers_its_first_question() -> None:
    known = [
        (r["iteration"], r["situation"]["noise"])
        for r in read_journal(JOURNAL)
        if r["kind"] == "decision"
    ]
    (told,) = re.findall(r"from about step (\d+) on", (DOCS / "tutorial.md").read_text())
    for iteration, noise in known:
        assert (noise["status"] == "ok") == (iteration > int(told))
    assert known[-1][1]["status"] == "ok" and known[-1][1]["effective_steps"] >= 20


def test_the_pictures_can_be_drawn_again(tmp_path: Path) -> None:
    assert pictures.main(["--output", str(tmp_path)]) == 0
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "pictures").iterdir()}
    concepts = (DOCS / "concepts.md").read_text()
    assert all(f"pictures/{name}" in concepts for name in drawn)
    for name in drawn:
        now, then = (
            lines_of((folder / name).read_text()) for folder in (tmp_path, DOCS / "pictures")
        )
        # The last matplotlib for Python 3.10 places labels elsewhere, and what lies beside them.
        near = pytest.approx(then, abs=0.5 if sys.version_info >= (3, 11) else 2)
        assert len(now) > 100 and now == near, f"{name} is not of its data"


def lines_of(svg: str) -> list[float]:
    """Coordinates of all that is drawn with straight lines."""
    return [float(x) for d in re.findall(r' d="([^"]*)"', svg) for x in re.findall(r"-?[\d.]+", d)]


@pytest.mark.parametrize(
    ("html", "is_lost"),
    [
        ("<p>Three things:\n* one</p>", True),
        ("<p>Said <code>so</code>:\n| a | b |\n|---|---|</p>", True),
        ("<p>|G|^2 and\n|G|</p>", False),
        ("<p>Said.</p>\n<ul>\n<li>one</li></ul>\n<p>a\n- b</p>".replace("\n- b", " - b"), False),
    ],
)
def test_blocks_that_the_site_would_not_show_are_found(
    html: str, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hooks: Any = importlib.import_module("scripts.docs.hooks")
    with caplog.at_level(logging.WARNING, "mkdocs"):
        seen = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
        assert hooks.on_page_content(html, seen, None, None) == html
    assert bool(caplog.records) == is_lost


@pytest.mark.parametrize(
    ("name", "text", "is_found"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>', True),
        ("a.html", "<link rel=stylesheet href=//fonts.example/x.css>", True),
        ("a.html", '<a href="https://arxiv.org">a page</a><img src="x.svg">', False),
        ("a.css", "@import url(https://fonts.example/x.css)", True),
        ("a.css", "a{background:url(data:image/png;base64,x)}", False),
    ],
)
def test_what_another_host_would_serve_is_found(
    tmp_path: Path, name: str, text: str, is_found: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hooks: Any = importlib.import_module("scripts.docs.hooks")
    (tmp_path / name).write_text(text)
    with caplog.at_level(logging.WARNING, "mkdocs"):
        hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    assert bool(caplog.records) == is_found
