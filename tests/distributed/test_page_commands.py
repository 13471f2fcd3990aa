"""Every command of a shell block of a page is run: by the test that `BY_OTHERS` names, or by this
one, page by page, unless `NOT_HERE` says why it cannot be."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.nightly import case
from tests.helpers.of_extras import needs_extra
from tests.helpers.pages import COPUS
from tests.helpers.tokenizer_files import fast_file

QUICKSTART = "tests/distributed/test_quickstart.py::test_it_does_what_its_page_says"
TUTORIAL = "tests/distributed/test_tutorial.py::told"
README = "tests/distributed/test_commands.py::test_the_readme_commands_run"
PLAN = "tests/unit/test_plan_command.py::test_the_commands_of_the_pages_run"
JOBS = "tests/slurm/test_jobs.py::test_"
BY_OTHERS = {
    "README: copus preprocess-data": README,
    "README: torchrun": README,
    "README: copus plan": PLAN,
    "planner: copus plan ": PLAN,
    "README: bash scripts/quickstart.sh": QUICKSTART,
    "index: bash scripts/quickstart.sh": QUICKSTART,
    "quickstart: bash scripts/quickstart.sh": QUICKSTART,
    "quickstart: QUICKSTART_BATCH=8": QUICKSTART,
    "quickstart: copus": QUICKSTART,
    "serving: bash scripts/quickstart.sh": QUICKSTART,
    "troubleshooting: ": "tests/distributed/test_troubleshooting.py::test_commands_run_on_a_run",
    "moe: bash scripts/quickstart.sh": "tests/distributed/test_quickstart.py"
    "::test_a_mixture_of_experts_trains_and_shares_its_experts_out",
    "clusters: bash scripts/local_cpu.sh": "tests/distributed/test_local_cpu.py"
    "::test_another_layout_a_kill_and_term",
    "clusters: srun": "tests/slurm/test_jobs.py::whole",
    "clusters: COPUS_RUN": f"{JOBS}signal_node_loss_and_preemption_change_nothing",
    "clusters: COPUS_STORE": f"{JOBS}times_of_layouts",
    "clusters: COPUS_SWEEP": f"{JOBS}a_grid_of_runs",
    "clusters: COPUS_CONTAINER_IMAGE": "tests/unit/test_slurm_container.py"
    "::test_a_container_sees_repository_run_and_data_and_runs_its_own_python",
    "megatron-lm: srun": "tests/unit/test_megatron_lm_job.py"
    "::test_flags_reach_the_ranks_as_they_are",
    "elastic: python": "tests/extras/elastic/test_ranks_elastic.py"
    "::test_a_rank_and_a_node_are_lost_and_come_again",
    "gpus: copus accept --output": "tests/gpu_stub/test_accept.py::accepted",
    "gpus: copus preprocess-data": TUTORIAL,
    "user-guide: copus preprocess-data --python-stdlib": TUTORIAL,
    "tutorial: copus preprocess-data": TUTORIAL,
    "tutorial: copus replay": TUTORIAL,
    "tutorial: python scripts/compare_runs.py": TUTORIAL,
    "uneven: srun": "tests/extras/probe/test_slurm_probe.py::test_srun_starts_it_on_every_node",
}
"""Begin of a command, behind the name of its page, and the test or fixture that runs it."""
SET_UP = "installs packages; test.sh and quickstart.sh call it first"
NOT_HERE = {
    "README: bash scripts/test.sh": "it is what runs this",
    "index: bash scripts/test.sh": "it is what runs this",
    "quickstart: bash scripts/setup_env.sh": SET_UP,
    'quickstart: . "${COPUS_VENV': SET_UP,
    "tutorial: bash scripts/setup_env.sh": SET_UP,
    'tutorial: . "${COPUS_VENV': SET_UP,
    "gpus: python=": SET_UP,
    'gpus: . "${COPUS_VENV': SET_UP,
    "clusters: COPUS_TORCH=cuda": "a download of torch for CUDA",
    'clusters: . "${COPUS_VENV': SET_UP,
    "clusters: docker build": "docker and enroot",
    "elastic: COPUS_ELASTIC": "SLURM nodes that are lost while others stay",
    "gpus: copus accept --megatron-lm": "a GPU and a checkout of Megatron-LM",
    "gpus: bash scripts/accept_on_device.sh": "a download of the wheels for CUDA",
    "gpus: torchrun": "a GPU",
    "long-context: torchrun": "memory for samples of 65,536 tokens",
    "megatron-lm: ": "a checkout of Megatron-LM, of which tests/guest has some; lines of a job",
}
"""Begin of a command, and what it needs that a test does not have."""
FLAGS = """--num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
--seq-length 64 --max-position-embeddings 64 --swiglu --normalization RMSNorm
--position-embedding-type rope
--disable-bias-linear --micro-batch-size 1 --global-batch-size 8 --train-iters 8 --lr 1e-3
--tokenizer-type ByteLevelTokenizer --data-path data/mine_text_document --eval-interval 4
--eval-iters 1 --save-interval 4 --split 70,25,5"""
SMALLER = {
    r"(YOUR |\$)?\bFLAGS\b": FLAGS,
    r"--nproc-per-node [48]": "--nproc-per-node 2",
    r"--(train-iters|exit-interval) 200": r"--\1 4",
    r"--steps 20": "--steps 4",
    r"--ckpt-step 2000": "--ckpt-step 8",
}
"""What a reader who has little time types in place of words of a page."""


def lines_of(path: Path) -> list[str]:
    """The commands of a page's shell blocks, each behind the name of the page; `FLAGS=` is none."""
    found = []
    for block in re.findall(
        r"^ *```(?:bash|console)\n(.*?)```", path.read_text(), re.DOTALL | re.MULTILINE
    ):
        block = re.sub(r" *\\\n *", " ", block)
        for line in re.findall(r"^.*<<'END'\n(?:.*\n)*?END$|^.+$", block, re.MULTILINE):
            if not line.lstrip().startswith(("#", "FLAGS=")) and line.strip():
                found.append(f"{path.stem}: {line.strip()}")
    return found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL = [line for page in PAGES for line in lines_of(page)]
TABLE = (*BY_OTHERS, *NOT_HERE)
HERE: dict[str, list[str]] = {}
for _line in ALL:
    if not _line.startswith(TABLE):
        HERE.setdefault(_line.partition(": ")[0], []).append(_line.partition(": ")[2])


RANKS = ("torchrun", "copus launch", "python -m copus_ext.launch")
SLOW = {name for name, lines in HERE.items() if any(line.startswith(RANKS) for line in lines)}
SLOW |= {"planner", "relayout", "simulate", "user-guide"}
"""Pages whose commands start ranks, or compute for long."""


def test_the_account_of_commands_has_no_dead_entry() -> None:
    assert len(ALL) > 90
    assert [start for start in TABLE if not any(line.startswith(start) for line in ALL)] == []
    for named in BY_OTHERS.values():
        file, _, name = named.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), named


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run of two ranks under `--copus`, and what pages name beside it."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "texts").mkdir()
    for text in sorted(Path(tarfile.__file__).parent.glob("[a-c]*.py")):
        shutil.copy(text, folder / "texts")
    run(folder, "copus preprocess-data --input texts --output-prefix data/mine --append-eod")
    run(folder, "torchrun --nproc-per-node 2 pretrain_gpt.py FLAGS --save checkpoints --copus")
    (folder / "runs/quickstart").mkdir(parents=True)
    for name in ("RUN", "SRC", "runs/my_run", "runs/act", "runs/quickstart/checkpoints"):
        (folder / name).symlink_to(folder / "checkpoints")
    (folder / "README.md").symlink_to(ROOT / "README.md")
    _write_inputs(folder)
    yield folder


def _write_inputs(folder: Path) -> None:
    """The files that the pages take to be the reader's own."""
    graph, shape = re.findall(
        r"```json\n(.*?)```", (ROOT / "docs/graph-stages.md").read_text(), re.DOTALL
    )
    layer = {"3": 0.01, "4": 0.004, "8": 0.0001}
    losses = {"schema": "copus-serving-sensitivity/1", "group_size": 128, "loss": 2.31}
    mixed = {"gpu": "H100-80GB", "num_nodes": 3, "gpus_per_node": 1, "constants": "h100-80g"}
    speeds = {"intra_bytes_per_s": "450GB/s", "nic_bytes_per_s": "400GB/s"}
    files = {
        "graph.json": graph,
        "shape.json": shape,
        "losses.json": json.dumps({**losses, "loss_16": 2.311, "loss_increase": [layer] * 80}),
        "mixed.json": json.dumps(
            {**mixed, **speeds, "nodes": [{"count": 2}, {"gpu": "A100-80GB"}]}
        ),
        "runs.csv": "cluster,model,tp,pp,micro_batch_size,global_batch_size,step_s\n"
        + "".join(f"a100-80g:16,llama-2-7b,{tp},2,1,64,{8 + tp}\n" for tp in (1, 2, 4, 8)),
        "prompts.jsonl": '{"prompt": "def "}\n{"prompt": "class "}\n',
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "docs").mkdir()
    with gzip.open(folder / "docs/some.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": Path(tarfile.__file__).read_text()[:20_000]}) + "\n")
    (folder / "my-tokenizer").mkdir()
    fast_file(folder / "my-tokenizer")


def run(folder: Path, line: str) -> None:
    """Runs a command as a page has it, but for `SMALLER`; it must leave with 0."""
    for found, instead in SMALLER.items():
        line = re.sub(found, instead, line)
    if not line.startswith(("copus", "python", "torchrun")):
        subprocess.run(["bash", "-ec", line], cwd=folder, check=True, timeout=60)
        return
    program, *words = shlex.split(line, comments=True)
    ranks = 1
    if program == "torchrun":
        assert words[0] == "--nproc-per-node"
        ranks, words = int(words[1]), words[2:]
    elif program == "copus":
        words = [*COPUS, *words]
    words = [str(ROOT / word) if word == "pretrain_gpt.py" else word for word in words]
    launcher = "fresh" if "launch" in line else "direct"
    run_ranks(words, ranks, timeout_s=300, cwd=folder, launcher=launcher).check()


@pytest.mark.timeout(900)
@needs_extra(
    "convert", "generate", "graph_stages", "huggingface", "inspect_checkpoint", "phase_plan"
)
@needs_extra("accept", "planner_validation", "serving", "simulate")
@pytest.mark.parametrize("page", [case(name, daily=name not in SLOW, id=name) for name in HERE])
def test_the_commands_of_a_page_run(trained: Path, page: str) -> None:
    for command in HERE[page]:
        if command.startswith("copus convert-checkpoint SRC"):
            shutil.rmtree(trained / "DST", ignore_errors=True)
        if command.startswith("echo 8 >") or command.startswith("touch RUN"):
            (trained / "RUN/control").mkdir(exist_ok=True)
        run(trained, command)
