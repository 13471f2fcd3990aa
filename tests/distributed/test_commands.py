"""Flag lists in the style of well-known Megatron-LM examples, on four ranks. `test_quickstart`
has torchrun start such a run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers.implementations import ByteLevelBPETokenizer

from megatron.trainer.checkpoint import files
from tests.helpers.examples import GPT3, LLAMA3, with_values
from tests.helpers.jobs import losses_of, steps_of
from tests.helpers.launch import ROOT, RanksResult, run_ranks
from tests.helpers.pages import COPUS

LOG_LINE = re.compile(
    r"^ \[[-\d:. ]+\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): [\d.]+ \|.* learning rate: [\d.E+-]+ \| "
    r"global batch size: +\d+ \| lm loss: [\d.E+-]+ \| loss scale: [\d.]+ \| grad norm: [\d.]+ \| "
    r"number of skipped iterations: +\d+ \| number of nan iterations: +\d+ \|",
    re.MULTILINE,
)


def train(flags: list[str], cwd: Path, nproc: int = 4) -> RanksResult:
    """Runs in a folder of its own, since the examples name relative places."""
    program = [ROOT / "pretrain_gpt.py", *flags]
    return run_ranks(program, nproc, timeout_s=600, cwd=cwd)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a GPT-2 style vocabulary and a data set of real text made with it."""
    folder = tmp_path_factory.mktemp("text")
    library = Path(shutil.__file__).parent
    sources = [str(library / name) for name in ("argparse.py", "shutil.py", "tarfile.py")]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(sources, vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save_model(str(folder))
    vocabulary = ["--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt"]
    texts = folder / "texts"
    texts.mkdir()
    for source in sources:
        shutil.copy(source, texts)
    command = [ROOT / "tools/preprocess_data.py", "--input", texts, "--append-eod", *vocabulary]
    kind = ["--tokenizer-type", "GPT2BPETokenizer", "--output-prefix", folder / "my"]
    run_ranks([*command, *kind], 1, timeout_s=120, launcher="direct").check()
    return folder


def gpt3_flags(text: Path, folder: Path) -> list[str]:
    """The example for GPT-3, made small, whose ramp and iterations stand beside each other."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(text / name, folder)
    flags = with_values(
        GPT3,
        {
            "--num-layers": "4",
            "--hidden-size": "64",
            "--num-attention-heads": "4",
            "--seq-length": "64",
            "--max-position-embeddings": "64",
            "--global-batch-size": "8",
            "--rampup-batch-size": "4 4 8",
            "--train-iters": "8",
            "--lr-decay-iters": "7",
            "--lr": "2.0e-3",
            "--log-interval": "1",
            "--save-interval": "6",
            "--eval-interval": "4",
            "--eval-iters": "2",
            "--data-path": str(text / "my_text_document"),
            "--split": "70,30,0",
        },
    )
    # From the default scale of 2^32 the first twenty steps or so would overflow.
    return [*flags, "--initial-loss-scale", "4096"]


def test_gpt3_style_trains_real_text_saves_and_goes_on(text: Path, tmp_path: Path) -> None:
    flags = gpt3_flags(text, tmp_path)
    result = train([*flags, "--exit-interval", "5"], tmp_path).check()
    assert "gloo" in result.stdout and "--distributed-backend" in result.stdout
    lines = LOG_LINE.findall(result.stdout)
    assert [int(iteration) for iteration, _, _ in lines] == [1, 2, 3, 4, 5]
    assert "validation loss at iteration 4 | lm loss value:" in result.stdout
    result = train(flags, tmp_path).check()
    assert "loaded checkpoints/iter_0000005" in result.stdout
    steps = steps_of(tmp_path / "checkpoints")
    assert [step["global_batch_size"] for step in steps] == [4, 4] + [8] * 6
    assert steps[-1]["consumed_samples"] == 56, "the 8 iterations asked for"
    assert losses_of(tmp_path / "checkpoints")[-1] < losses_of(tmp_path / "checkpoints")[0]
    assert files.read_latest(tmp_path / "checkpoints") == len(steps)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    wanted = {"lm loss", "lm loss vs samples", "learning-rate", "batch-size", "grad-norm"}
    assert tags >= wanted | {"loss-scale", "lm loss validation"}
    assert [e.step for e in events.Scalars("lm loss")] == list(range(1, len(steps) + 1))


def test_llama_style_trains(tmp_path: Path) -> None:
    flags = with_values(
        LLAMA3,
        {
            "--num-layers": "4",
            "--hidden-size": "64",
            "--ffn-hidden-size": "128",
            "--num-attention-heads": "4",
            "--kv-channels": "16",
            "--seq-length": "64",
            "--max-position-embeddings": "64",
            "--global-batch-size": "8",
            "--train-samples": "40",
            "--lr-decay-samples": "40",
            "--lr-warmup-samples": "8",
            "--vocab-size": "500",
            "--eval-iters": "1",
            "--eval-interval": "3",
        },
    )
    result = train(flags, tmp_path).check()
    assert len(LOG_LINE.findall(result.stdout)) == 5
    assert "throughput per GPU (TFLOP/s/GPU):" in result.stdout
    assert "layout" in result.stdout and "TP2" in result.stdout.upper().replace(" ", "")
    assert files.read_latest(tmp_path / "checkpoints") == 5


def test_the_readme_commands_run(tmp_path: Path) -> None:
    """Preprocess and train, as printed, with fewer steps; a second time under other layouts."""
    readme = (ROOT / "README.md").read_text()
    blocks = "".join(re.findall(r"```bash\n(.*?)```", readme, re.DOTALL))
    joined = [line.partition(" #")[0] for line in blocks.replace("\\\n", " ").splitlines()]
    preprocess = next(c for c in joined if c.startswith("copus preprocess-data"))
    run = next(c for c in joined if c.startswith("torchrun"))
    texts = tmp_path / "my_texts"
    texts.mkdir()
    shutil.copy(Path(shutil.__file__).with_name("tarfile.py"), texts)
    flags = preprocess.split()[1:]
    made = run_ranks([*COPUS, *flags], 1, timeout_s=120, cwd=tmp_path, launcher="direct")
    made.check()
    nproc, program, *flags = run.removeprefix("torchrun --nproc-per-node ").split()
    assert (nproc, program) == ("4", "pretrain_gpt.py")
    fewer = {"--train-iters": "4", "--eval-interval": "2", "--save-interval": "2"}
    flags = with_values(" ".join(flags), {**fewer, "--eval-iters": "1"})
    first = train([*flags, "--exit-interval", "2"], tmp_path).check()
    assert "saved iteration 2" in first.stdout
    other = with_values(" ".join(flags), {"--pipeline-model-parallel-size": "1"})
    second = train(other, tmp_path, 2).check()
    assert "loaded checkpoints/iter_0000002" in second.stdout
    losses = losses_of(tmp_path / "checkpoints")
    assert len(losses) == 4 and losses[-1] < losses[0]
