"""Generates text with a trained model, from a checkpoint of any layout.

copus generate --load runs/quickstart/checkpoints --prompt "def " --greedy
copus generate --load checkpoints --prompts-file prompts.jsonl --output texts.jsonl

One process, on a GPU if there is one. The tokenizer is the checkpoint's. Exit codes: 0 done,
1 the checkpoint does not load or a file cannot be written, 2 wrong flags or prompts, 3 the
checkpoint is malformed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.program import about, run_command, tell
from megatron.trainer.config.arguments import Parser, add_checkpoint_flags

_SCRIPT = "generate.py"
_TOKENIZER_FLAGS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_JSON_KEYS = ("text", "prompt")


def parser() -> argparse.ArgumentParser:
    p = Parser(**about(_SCRIPT, __doc__))
    p.add_argument(
        "--load", type=Path, required=True, metavar="DIR", help="the --save directory of the run"
    )
    add_checkpoint_flags(p)
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    prompts = p.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt",
        "--prompts",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEXT",
        help="text to continue; may be given several times",
    )
    prompts.add_argument(
        "--prompts-file",
        "--prompt-file",
        metavar="FILE",
        help="file with one prompt a line, or - for standard input; a line of a .jsonl file is a "
        "string, or an object with the key text or prompt",
    )
    choice = p.add_argument_group("choice of tokens")
    choice.add_argument("--num-tokens-to-generate", type=int, default=30, metavar="N")
    choice.add_argument("--greedy", action="store_true", help="always take the most likely token")
    choice.add_argument("--temperature", type=float, help="divide the logits by this (default 1.0)")
    choice.add_argument("--top-k", "--top_k", type=int, help="draw from the K most likely tokens")
    choice.add_argument(
        "--top-p", "--top_p", type=float, help="draw from the most likely tokens that sum up to P"
    )
    choice.add_argument("--seed", type=int, default=1234, help="seed of the draws (%(default)s)")
    tokenizer = p.add_argument_group("tokenizer, where it has moved since the run")
    for name in _TOKENIZER_FLAGS:
        tokenizer.add_argument(f"--{name.replace('_', '-')}")
    output = p.add_argument_group("output")
    output.add_argument(
        "--output",
        "--output-path",
        type=Path,
        metavar="FILE",
        help="write one JSON object per line for each prompt, instead of printing text",
    )
    output.add_argument(
        "--one-line",
        action="store_true",
        help="print each text on one line, line ends as \\n",
    )
    return p


def prompts_of(args: argparse.Namespace) -> dict[str, str]:
    """What to say about each prompt in an error -> the prompt; in the order given.

    Raises:
        UsageError: there is none, or the file cannot be read as prompts.
    """
    found = {f"prompt {i} of --prompt": text for i, text in enumerate(args.prompt, 1)}
    if args.prompts_file is not None:
        lines = _text_of(args.prompts_file).split("\n")
        if lines[-1] == "":
            lines.pop()
        is_json = args.prompts_file.endswith((".jsonl", ".json"))
        for number, line in enumerate(lines, 1):
            where = f"--prompts-file {args.prompts_file}, line {number},"
            found[where] = _prompt_in(line, where) if is_json else line.removesuffix("\r")
    if not found:
        raise UsageError("no prompt is given; give --prompt TEXT or --prompts-file FILE")
    return found


def _text_of(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts-file {file} cannot be read: {error}") from error


def _prompt_in(line: str, where: str) -> str:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from error
    if isinstance(value, dict):
        value = next((value[key] for key in _JSON_KEYS if key in value), None)
    if not isinstance(value, str):
        raise UsageError(f'{where} has no prompt; write {{"text": "..."}}')
    return value


def sampling_of(args: argparse.Namespace) -> Any:
    """megatron-core's parameters of the flags.

    Raises:
        UsageError: flags exclude each other.
    """
    from megatron.core.inference.sampling_params import SamplingParams

    from megatron.trainer.extras.generate.model import GREEDY

    others = {"--temperature": args.temperature, "--top-k": args.top_k, "--top-p": args.top_p}
    given = [flag for flag, value in others.items() if value is not None]
    if args.greedy and given:
        raise UsageError(f"--greedy draws nothing; drop it or {given[0]}")
    if not 0 <= args.seed < 1 << 63:
        raise UsageError(f"--seed {args.seed} must be from 0 to 2^63 - 1")
    is_greedy = args.greedy or args.temperature == 0
    return SamplingParams(
        num_tokens_to_generate=args.num_tokens_to_generate,
        temperature=1.0 if is_greedy or args.temperature is None else args.temperature,
        top_k=GREEDY if is_greedy else args.top_k or 0,
        top_p=0.0 if is_greedy else args.top_p or 0.0,
    )


def run(args: argparse.Namespace) -> int:
    """Loads, generates and writes; returns the exit code."""
    prompts = prompts_of(args)
    if args.output is not None and not args.output.parent.is_dir():
        raise UsageError(f"--output {args.output}: there is no folder {args.output.parent}")
    from megatron.trainer.resilience.env_checks import check_environment, set_process_defaults

    set_process_defaults()
    # Told of every group and of what a pre-training run would miss.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    check_environment()
    from megatron.trainer.extras.generate.model import check_sampling, open_generator

    params = sampling_of(args)
    given = {name: getattr(args, name) for name in _TOKENIZER_FLAGS}
    flags = [w for n, v in given.items() if v for w in (f"--{n.replace('_', '-')}", v)]
    with open_generator(
        args.load,
        step=args.ckpt_step,
        device=args.device,
        flags=flags,
        trust_unverified=args.ckpt_trust_unverified,
    ) as model:
        check_sampling(params, model.tokenizer.vocab_size)
        for where, prompt in prompts.items():
            model.tokens_of(prompt, where)
        for problem in model.stored.skipped:
            tell(_SCRIPT, f"note: {problem}; iteration {model.stored.iteration} writes instead")
        with _opened(args.output) as file:
            for number, prompt in enumerate(prompts.values()):
                # A seed for each: what one prompt draws does not depend on those before it.
                seed = (args.seed + number) % (1 << 63)
                written = model.generate(prompt, params, seed)
                if args.output is not None:
                    line = json.dumps(dataclasses.asdict(written))
                elif args.one_line:
                    line = repr(prompt + written.generated_text)
                else:
                    head = f"--- {number + 1} of {len(prompts)}\n" if len(prompts) > 1 else ""
                    line = head + harmless(prompt + written.generated_text)
                print(line, file=file, flush=True)
    return 0


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[IO[str]]:
    """Where lines go: the file, or standard output."""
    if output is None:
        yield sys.stdout
        return
    try:
        file = output.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from error
    with file:
        yield file


def harmless(text: str) -> str:
    """The text for a terminal, which obeys control characters: all but line ends and tabs become
    replacement characters."""
    keep = ("\n", "\t")
    return "".join(
        "\ufffd" if unicodedata.category(c) == "Cc" and c not in keep else c for c in text
    )


def main(argv: list[str] | None = None) -> int:
    """Reads flags, generates, and turns problems into one line and an exit code."""
    return run_command(_SCRIPT, lambda: run(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
