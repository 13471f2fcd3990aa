"""Text to an indexed data set: PREFIX_text_document.bin and .idx, as megatron-core reads them.

    copus preprocess-data --python-stdlib --output-prefix data/stdlib --append-eod
    copus preprocess-data --input 'docs/*.jsonl.gz' --output-prefix data/docs \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod

Documents keep the order of the input, whatever the number of workers. Nothing is left under the
final names unless all of it worked. Exit codes: 0 done, 1 failed, 2 wrong flags or input, 130
interrupted.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron.trainer.common.program import CommandParser, program_name, run_command

_SCRIPT = "preprocess_data.py"


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=program_name(_SCRIPT),
        description="Make an indexed data set (.bin and .idx) from text.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files, pipes, folders or patterns; .jsonl, .json and pipes without a suffix hold a "
        "document per line, any other file is one document, and so is a .json in a folder whose "
        "first line is no JSON object; .gz is unpacked",
    )
    source.add_argument(
        "--python-stdlib",
        action="store_true",
        help="all .py files of the running Python's standard library, one document each",
    )
    parser.add_argument("--output-prefix", required=True, help="path of the result without suffix")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys of the texts in a JSON line"
    )
    parser.add_argument("--tokenizer-type", default="ByteLevelTokenizer")
    parser.add_argument("--tokenizer-model", help="file or folder of the tokenizer")
    parser.add_argument("--vocab-size", type=int, help="for NullTokenizer and TikTokenizer")
    parser.add_argument("--vocab-file", help="vocabulary of GPT2BPETokenizer")
    parser.add_argument("--merge-file", help="merges of GPT2BPETokenizer")
    parser.add_argument("--tiktoken-pattern", help="v1 or v2")
    parser.add_argument("--tiktoken-num-special-tokens", type=int, default=1000)
    parser.add_argument("--tiktoken-special-tokens", nargs="+")
    parser.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_false",
        dest="tokenizer_hf_include_special_tokens",
        help="leave out what the post-processor of HuggingFaceTokenizer adds, such as BOS",
    )
    parser.add_argument(
        "--legacy-tokenizer",
        action="store_true",
        help="TikTokenizer reads the names of special tokens in a text as text",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    parser.add_argument(
        "--log-interval", type=int, default=1000, help="documents between two lines of progress"
    )
    parser.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="count documents that cannot be read or tokenized, such as lines that are not JSON, "
        "and go on",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    return run_command(_SCRIPT, lambda: run(make_parser().parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    from megatron.trainer.common.errors import TrainingFailure
    from megatron.trainer.resilience.env_checks import import_core

    import_core()
    from megatron.trainer.data.preprocess import Job, preprocess

    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in vars(args).items()
        if key != "python_stdlib"
    }
    try:
        results = preprocess(Job(**options))
    except OSError as error:
        raise TrainingFailure(
            f"cannot write --output-prefix {args.output_prefix}: {error}"
        ) from error
    for result in results:
        print(result.summary())
    print(results[0].tokens_line)
    print("use it with: --data-path " + " ".join(result.data_path for result in results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
