"""Text from checkpoints: the model's own choice, no padding, the same again, and clear refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.inference.sampling_params import SamplingParams

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.load import Stored
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.extras.generate import command as generate
from megatron.trainer.extras.generate.model import (
    GREEDY,
    Generated,
    TextGenerator,
    _config_of,
    check_sampling,
    open_generator,
)
from tests.helpers.checkpoints import (
    BIASED,
    FLAGS,
    ITERATION,
    SHARED,
    command,
    index_of,
    make_checkpoint,
)
from tests.helpers.of_extras import of_extra

BYTES = {"tokenizer_type": "ByteLevelTokenizer", "padded_vocab_size": 384, "vocab_size": None}
GPT2 = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
}
QK = {"qk_layernorm": True, "group_query_attention": False, "num_query_groups": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "qk": QK,
    "further tokens": {"mtp_num_layers": 1},
    "mixture": {k: v for k, v in BIASED.items() if k not in FLAGS},
    "mixture in part": {
        **{k: v for k, v in SHARED.items() if k not in FLAGS},
        "moe_layer_freq": "2",
    },
}
TOKENS = 257
PROMPT = "def f(x):"


def quiet(pieces: list[Any]) -> None:
    """Matrices as at the start of a training, so that logits are close to each other."""
    for i, piece in enumerate(pieces):
        if "norm" not in piece.key and not piece.key.startswith("optimizer"):
            pieces[i] = dataclasses.replace(piece, make=lambda p=piece: 0.1 * p.make())


def loud_padding(pieces: list[Any]) -> None:
    """The rows of the output layer that are no token win against those that are."""
    quiet(pieces)
    at = index_of(pieces, "output_layer.weight")

    def make(plain: Callable[[], torch.Tensor] = pieces[at].make) -> torch.Tensor:
        rows = plain()
        rows[TOKENS:] *= 100
        return rows

    pieces[at] = dataclasses.replace(pieces[at], make=make)


def written(root: Path, change: Any = quiet, **flags: Any) -> Path:
    return make_checkpoint(root, dtype="fp32", change=change, **{**BYTES, **flags})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("generate") / "c")


def params(num: int = 8, **others: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num, **others)


def logits_of(model: TextGenerator, tokens: list[int]) -> torch.Tensor:
    """What the bare model says after all of these tokens, without a cache and without a mask."""
    bare = model._wrapper.model
    with torch.no_grad():
        ids = torch.tensor([tokens])
        return bare(ids, torch.arange(len(tokens))[None], None)[0, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_takes_what_the_whole_model_finds_most_likely(kind: str, tmp_path: Path) -> None:
    with open_generator(written(tmp_path / "c", **KINDS[kind])) as model:
        found = model.generate(PROMPT, params(top_k=GREEDY), seed=1)
        tokens = model.tokens_of(PROMPT, "it")
        context: Any = model._wrapper.inference_context
        cache = context.key_value_memory_dict
        assert {len(t) for kept in cache.values() for t in kept} == {len(tokens) + 8}
        for token in found.generated_tokens:
            assert token == int(logits_of(model, tokens)[:TOKENS].argmax())
            tokens.append(token)
    assert len(found.generated_tokens) == 8 and len(set(found.generated_tokens)) > 1


def test_the_weights_are_those_of_the_checkpoint(checkpoint: Path) -> None:
    archive = of_extra("megatron.trainer.extras.inspect_checkpoint.archive")
    stored = archive.open_archive(checkpoint, step=None).read("output_layer.weight")
    with open_generator(checkpoint) as model:
        weights = dict(model._wrapper.model.named_parameters())
        assert torch.equal(weights["output_layer.weight"], stored)
        assert not any(p.requires_grad for p in weights.values())


def test_another_layout_on_disk_gives_the_same_text(checkpoint: Path, tmp_path: Path) -> None:
    texts = []
    for i, words in enumerate([None, "--tp 2 --pp 2 --dp 1", "--tp 1 --pp 2 --vpp 2 --dp 2"]):
        root = checkpoint if words is None else tmp_path / str(i)
        if words is not None:
            with contextlib.redirect_stdout(io.StringIO()):
                convert_checkpoint = of_extra("megatron.trainer.extras.convert.command")
                assert convert_checkpoint.main([str(checkpoint), str(root), *words.split()]) == 0
        with open_generator(root) as model:
            texts.append([model.generate(PROMPT, p, 3) for p in (params(), params(top_k=GREEDY))])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_padding_is_never_taken(dtype: str, tmp_path: Path) -> None:
    root = make_checkpoint(tmp_path / "c", dtype=dtype, change=loud_padding, **BYTES)
    ways = [{"top_k": GREEDY}, {"temperature": 50.0}, {"top_k": 200}, {"top_p": 0.9}, {}]
    with open_generator(root) as model:
        assert int(logits_of(model, list(PROMPT.encode())).argmax()) >= TOKENS
        for way in ways:
            found = model.generate(PROMPT, params(6, **way), seed=1)
            assert max(found.generated_tokens) < TOKENS, way


def test_a_seed_gives_the_same_text_again_in_any_company(checkpoint: Path) -> None:
    with open_generator(checkpoint) as model:
        first = model.generate(PROMPT, params(), seed=7)
        model.generate("something else", params(5), seed=1)
        assert model.generate(PROMPT, params(), seed=7) == first
        others = {model.generate(PROMPT, params(), seed=s).generated_text for s in range(8)}
    assert len(others) == 8
    assert not dist.is_initialized()


def test_filters_keep_to_the_most_likely_tokens(checkpoint: Path) -> None:
    with open_generator(checkpoint) as model:
        logits = logits_of(model, list(PROMPT.encode()))[:TOKENS]
        order = logits.argsort(descending=True).tolist()
        share = logits.softmax(0)[order].cumsum(0)
        nucleus = order[: int((share < 0.05).sum()) + 1]

        def drawn(**way: Any) -> set[int]:
            texts = (model.generate(PROMPT, params(1, **way), seed) for seed in range(30))
            return {token for one in texts for token in one.generated_tokens}

        assert drawn(top_k=3) == set(order[:3])
        assert len(found := drawn(top_p=0.05)) > 1 and found <= set(nucleus)
        assert len(drawn(top_k=TOKENS)) > 15


def test_generation_ends_with_the_document_and_with_the_positions(checkpoint: Path) -> None:
    with open_generator(checkpoint) as model:
        plain = model.generate(PROMPT, params(20, top_k=GREEDY), seed=1)
        assert (len(plain.generated_tokens), plain.finish_reason) == (20, "length")
        long = model.generate("x" * 30, params(20), seed=1)
        assert (len(long.generated_tokens), long.finish_reason) == (2, "context")
        last = model.generate("x" * 31, params(1), seed=1)
        assert (len(last.generated_tokens), last.finish_reason) == (1, "length")
        # The token that it writes fifth now ends a document.
        end = plain.generated_tokens[5]
        model.tokenizer.eod = end  # pyright: ignore[reportAttributeAccessIssue]
        stopped = model.generate(PROMPT, params(20, top_k=GREEDY), seed=1)
    at = plain.generated_tokens.index(end)
    assert stopped.generated_tokens == plain.generated_tokens[:at]
    assert stopped.finish_reason == "eod"


def test_bytes_that_are_no_text_are_marked(checkpoint: Path) -> None:
    with open_generator(checkpoint) as model:
        found = model.generate("\u00e9", params(30), seed=1)
    assert found.generated_text == bytes(found.generated_tokens).decode("utf-8", errors="replace")
    assert "\ufffd" in found.generated_text


def test_a_word_is_written_as_it_stands_after_others(checkpoint: Path) -> None:
    class Words:
        """Joins words with blanks, as a tokenizer whose words carry none."""

        def detokenize(self, ids: list[int]) -> str:
            return " ".join("abc"[i] for i in ids)

    with open_generator(checkpoint) as model:
        model.tokenizer = Words()  # pyright: ignore[reportAttributeAccessIssue]
        assert model._text_after([0, 1], [2, 0]) == " c a"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num": 0}, "--num-tokens-to-generate 0"),
        ({"temperature": -1.0}, "--temperature -1"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"temperature": float("inf")}, "--temperature inf"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_k": 258}, "--top-k 258 must be from 0, which keeps all, to 257"),
        ({"top_p": 1.1}, "--top-p 1.1"),
        ({"top_k": 2, "top_p": 0.5}, "exclude"),
    ],
)
def test_choices_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_sampling(params(**given), TOKENS)


# The command


def call(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    return command(capsys, generate, *words)


def test_the_command_prints_text_and_writes_json(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "one\\ntwo"}\n"three"\n{"prompt": "four"}\n')
    out = tmp_path / "out.jsonl"
    words = ["--load", checkpoint, "--num-tokens-to-generate", 4, "--temperature", 0]
    many = ["--prompt", "zero", "--prompts-file", tmp_path / "p.jsonl"]
    assert call(capsys, *words, *many, "--output", out) == (0, "", "")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["prompt"] for r in records] == ["zero", "one\ntwo", "three", "four"]
    assert {f.name for f in dataclasses.fields(Generated)} == set(records[0])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\nthree\r\n")))
    code, text, _ = call(capsys, *words, "--prompts-file", "-", "--one-line")
    lines = text.splitlines()
    assert code == 0 and len(lines) == 2
    assert lines[1] == repr("three" + records[2]["generated_text"])
    code, text, _ = call(capsys, *words, "--prompt", "zero", "--greedy")
    assert (code, text) == (2, "")
    greedy = [*words[:-2], "--greedy", "--prompt", "zero", "three"]
    code, text, _ = call(capsys, *greedy)
    shown = generate.harmless(records[0]["generated_text"])
    assert code == 0 and text.startswith(f"--- 1 of 2\nzero{shown}\n--- 2 of 2\nthree")


def test_a_terminal_is_told_nothing() -> None:
    assert generate.harmless("a\x1b[2J\tb\n\u00e9") == "a\ufffd[2J\tb\n\u00e9"
    assert generate.harmless("\r\x00\x9b\u3000") == "\ufffd" * 3 + "\u3000"


def refused(words: str, said: str, **others: Any) -> Any:
    return pytest.param(words, said, others, id=words or said)


@pytest.mark.parametrize(
    ("words", "said", "others"),
    [
        refused("", "no prompt is given"),
        refused("--prompt ", "prompt 1 of --prompt is empty"),
        refused("--prompt ok --prompts-file FILE", "line 2, is empty", file="a\n\nb\n"),
        refused("--prompts-file FILE", "cannot be read", file=b"\xff"),
        refused("--prompts-file nowhere.txt", "--prompts-file nowhere.txt cannot be read"),
        refused("--prompts-file FILE", "line 1, is not valid JSON", file="{", name="p.jsonl"),
        refused("--prompts-file FILE", "line 1, has no prompt", file="{}", name="q.jsonl"),
        refused("--prompt " + "x" * 32, "32 positions"),
        refused("--prompt \udcff", "cannot become tokens"),
        refused("--prompt a --top-k 300", "--top-k 300"),
        refused("--prompt a --greedy --top-p 0.5", "drop it or --top-p"),
        refused("--prompt a --seed -1", "--seed -1"),
        refused("--prompt a --ckpt-step 3", "load iteration 5 instead with --ckpt-step 5", code=1),
        refused("--prompt a --tokenizer-type Foo", "--tokenizer-type Foo is not supported"),
        refused("--prompt 7 --tokenizer-type NullTokenizer", "--vocab-size"),
        refused("--prompt a --output /nowhere/x", "there is no folder /nowhere"),
        refused("--prompt a --top-q 3", "unrecognized arguments"),
        pytest.param(
            "--prompt a --device cuda",
            "--device cuda needs a GPU",
            {},
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    words: str,
    said: str,
    others: dict[str, Any],
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / others.get("name", "prompts.txt")
    text = others.get("file", "")
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    given = [str(file) if word == "FILE" else word for word in words.split(" ") if words]
    code, out, err = call(capsys, "--load", checkpoint, *given)
    assert (code, out) == (others.get("code", 2), "")
    (line,) = err.splitlines()
    assert line.startswith("generate.py: error: ") and said in line
    assert not dist.is_initialized()


def test_checkpoints_that_cannot_be_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, str] = {"nowhere": "is not a directory", "empty": "holds no checkpoint"}
    (tmp_path / "empty").mkdir()
    written(tmp_path / "small", padded_vocab_size=128)
    said["small"] = "the tokenizer has 257 tokens but checkpoint"
    written(tmp_path / "odd", tokenizer_type="FooTokenizer")
    said["odd"] = "--tokenizer-type FooTokenizer is not supported"
    written(tmp_path / "moved", tokenizer_type="HuggingFaceTokenizer", tokenizer_model="gone.json")
    said["moved"] = "--tokenizer-model gone.json is not a file"
    for name, words in said.items():
        code, out, err = call(capsys, "--load", tmp_path / name, "--prompt", "a")
        assert (code, out) == (2, ""), err
        (line,) = err.splitlines()
        assert words in line
        assert not dist.is_initialized()


def flip(folder: Path) -> None:
    data = next(folder.glob("*.distcp"))
    spoiled = bytearray(data.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    data.write_bytes(spoiled)


def test_damage_is_passed_over_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = written(tmp_path / "c")
    whole = files.folder_of(root, ITERATION)
    newer = shutil.copytree(whole, files.folder_of(root, ITERATION + 1))
    (root / files.TRACKER).write_text(str(ITERATION + 1))
    words = ["--load", root, "--prompt", "a"]
    assert call(capsys, *words)[0] == 0
    flip(newer)
    code, out, err = call(capsys, *words)
    assert code == 0 and out.startswith("a") and "note: " in err and "iteration 5" in err
    flip(whole)
    code, out, err = call(capsys, *words)
    assert (code, out) == (1, "") and "checkpoint is damaged" in err


def test_a_world_of_several_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"), open_generator(checkpoint):
        pass


def test_a_moved_tokenizer_can_be_named_again(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, "def": 1, "f": 2, "g": 3, "<s>": 4, "</s>": 5}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="g")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 4), ("</s>", 5)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    gone = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "gone")}
    root = written(tmp_path / "c", padded_vocab_size=128, **gone)
    with (
        pytest.raises(UsageError, match="gone is not a file"),
        open_generator(root),
    ):
        pass
    with open_generator(root, flags=["--tokenizer-model", str(tmp_path)]) as generator:
        # As transformers gives it, without the end that would end the document before it goes on.
        assert generator.tokens_of("def f", "--prompt") == [4, 1, 2]
        assert generator.tokenizer.eod == 5
        found = generator.generate("def f", params(6, top_k=GREEDY), seed=1)
    assert len(found.generated_tokens) <= 6
    assert set(found.generated_text.split()) <= {"def", "f", "g", "<s>", "<|endoftext|>"}


def test_a_checkpoint_without_flags_is_refused() -> None:
    about: dict[str, Any] = {"iteration": 5, "state": TrainState(), "lengths": None}
    stored = Stored(folder=Path("c/iter_0000005"), arguments={}, metadata={}, **about)
    with pytest.raises(TrainingFailure, match="c/iter_0000005 does not hold the flags"):
        _config_of(stored, [])
