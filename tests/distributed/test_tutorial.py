"""docs/tutorial.md: its commands run in their order, and print lines of the form that it quotes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from copus_ext.commands import replay
from tests.helpers.jobs import losses_of
from tests.helpers.launch import ROOT, RanksResult, run_ranks
from tests.helpers.pages import COPUS, commands

PAGE = ROOT / "docs/tutorial.md"
SMALLER = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--seq-length 32 --max-position-embeddings 32 --train-iters 60 --eval-iters 1"""
NUMBER, LAYOUT = r"[-+]?\d+(?:\.\d+)?", r"tp\d+\.pp\d+(?:\.vpp\d+)?\.dp\d+"
CHANGE = rf"(?:(?:, )?(?:batch|micro-batch) {NUMBER} -> {NUMBER})+"
GAIN = (
    rf"predicted to (?:gain|lose) {NUMBER}(?: \+- {NUMBER})? %, (?:enough \(it needs {NUMBER} %\)"
    rf"|worth a short trial \(the limit is a predicted (?:gain|loss) of {NUMBER} %\))"
)
CRITICAL = (
    rf"critical batch size about {NUMBER} samples \({NUMBER} to {NUMBER}\), by the published "
    r"law (?:alone|and 8 times the measured noise scale, "
    r"which (?:agrees with it|is larger|is smaller))"
)
STAYS = (
    rf"considered batch {NUMBER} in micro-batches of {NUMBER} on {LAYOUT}: .+|the learning rate .+"
)
LINE = re.compile(
    rf" +\d+  step +\d+  same +(?:(?:batch) +{CHANGE}; (?:{GAIN}); {CRITICAL}"
    rf"(?:; aims at batch {NUMBER}|; batch {NUMBER} is predicted best)?|stay +(?:{STAYS}))"
)
LAST = re.compile(r"(\d+) decisions the same, 0 different")


class Reader:
    """Somebody who types the commands of the page, with a smaller model and fewer steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.left = folder, commands(PAGE)

    def next(self, *begins: str) -> RanksResult:
        while not " ".join(self.left[0]).startswith(begins):
            self.left.pop(0)
        program, *words = self.left.pop(0)
        if program == "copus":
            command, ranks = [*COPUS, *words], 1
        elif program == "python":
            command, ranks = [ROOT / words[0], *words[1:]], 1
        else:
            assert (program, words[:2]) == ("torchrun", ["--nproc-per-node", "2"])
            flags = ["40" if word == "200" else "4" if word == "20" else word for word in words[3:]]
            command, ranks = [ROOT / words[2], *flags, *SMALLER.split()], 2
        return run_ranks(command, ranks, timeout_s=300, cwd=self.folder).check()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command printed, by name; `folder` is where they ran."""
    reader = Reader(tmp_path_factory.mktemp("tutorial"))
    told = {"folder": str(reader.folder)}
    told["data"] = reader.next("copus preprocess-data").stdout
    told["plain"] = reader.next("torchrun").stdout
    told["observe"] = reader.next("torchrun").stdout
    told["replay"] = reader.next("copus replay runs/observe --all").stdout
    told["act"] = reader.next("torchrun").stdout
    reader.next("torchrun")
    told["compared"] = reader.next("python scripts/compare_runs.py").stdout
    assert "--load" in reader.left[0]
    told["continued"] = reader.next("torchrun").stdout
    return told


def test_a_run_that_is_observed_loses_as_the_plain_one(told: dict[str, str]) -> None:
    folder = Path(told["folder"])
    plain, observed = (losses_of(folder / "runs" / name) for name in ("plain", "observe"))
    assert len(plain) == 4 and observed[:4] == plain
    line = next(s for s in told["observe"].splitlines() if s.startswith(" ["))
    assert " | noise scale (samples): " in line


def test_the_replay_says_what_the_page_quotes(
    told: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (quoted,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for text in (quoted, told["replay"]):
        *lines, last = text.splitlines()
        assert lines and LAST.fullmatch(last), last
        assert [line for line in lines if not LINE.fullmatch(line)] == []
    number = LAST.fullmatch(told["replay"].splitlines()[-1])
    assert number and int(number[1]) == len(told["replay"].splitlines()) - 1
    (words,) = re.findall(r"`copus replay (runs/observe --\S+ \d+)`", PAGE.read_text())
    assert replay.main([str(Path(told["folder"], words.split()[0])), *words.split()[1:]]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"\d+ choices the same, \d+ different", last)


def test_the_comparison_is_that_of_the_page(told: dict[str, str]) -> None:
    (quoted,) = re.findall(r"```\n(held-out .*)\n```", PAGE.read_text())
    compared = r"held-out loss [\d.]+ with --copus after \d+ s, [\d.]+ without after \d+ s; .+"
    for line in (quoted, told["compared"].splitlines()[-1]):
        assert re.fullmatch(compared, line), line


def test_a_run_that_was_observed_goes_on_and_may_act(told: dict[str, str]) -> None:
    assert "(iteration 40)" in told["continued"] and "copus: " in told["continued"]
    assert "observed only" in told["observe"] and "observed only" not in told["act"]
