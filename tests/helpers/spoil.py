"""Ways in which an input can be wrong, drawn at random, and how a reader must answer: with a value
or with one line, never with a traceback."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_MAX_S = 60
_WORDS = (
    *("", "0", "-1", "1", "3", "7", "1e400", "-0.0", "nan", "inf", "0x10", "1_000", "٣", "true"),
    *(
        "None",
        "\x00",
        "\n",
        "--",
        "-",
        "a b",
        "1,2",
        ",",
        "9" * 30,
        "9" * 5000,
        "x" * 3000,
        "../..",
    ),
    *("/dev/null", "é\ud800", "[", "{}", "%s%n", "${HOME}", "`id`"),
)
_YAML = (
    *("&a [*a, *a]", "*a", "!!int x", "!!timestamp x", "!!bool 3", "!!python/name:os.system", "? "),
    *("2001-99-99", "[" * 3000, "{a: " * 200, "<<: 1", "- - -", ": ", "|", "1:2:3", ".inf", "~"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 1 << 63, -(1 << 70), 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", "a", "\x1b[2J", "\ud800", "../../x", "x" * 2000, [], {}),
    *([1], [None], {"a": 1}, [[[]]], "1", "nan", "\x00", [0] * 3000, {key: [] for key in "abc"}),
    *(
        10**400,
        -(10**400),
        1e999,
        json.loads("[" * 90 + "]" * 90),
        json.loads("[" * 300 + "]" * 300),
    ),
)
_HOSTILE = (
    *(b"", b"null", b"[]", b"{", b"\xff\xfe", b"\x00" * 9, b'{"a": NaN}', b'"\\ud800"', b"1e999"),
    *(
        b"[" * 50_000,
        b'{"a":' * 20_000,
        b"[" + b"1," * 20_000 + b"1]",
        b"9" * 6000,
        b"-" + b"9" * 4000,
    ),
    b'{"a": 1, "a": ' + b"9" * 4301 + b"}",
    "{}".encode("utf-16"),
    "[1, 2]".encode("utf-32"),
)
"""Texts that parsers have stumbled over."""


# Ways to be wrong


def spoiled_bytes(rng: random.Random, data: bytes) -> bytes:
    """The bytes, cut, changed, doubled or grown at drawn places."""
    how = rng.choice(("cut", "flip", "flip", "zero", "insert", "double", "swap", "empty", "grow"))
    if not data or how == "empty":
        return b"" if data else b"\x00"
    at, size = rng.randrange(len(data)), rng.choice((1, 1, 4, 64, 4096))
    if how == "cut":
        return data[:at]
    if how == "flip":
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if how == "zero":
        return data[:at] + bytes(len(data[at : at + size])) + data[at + size :]
    if how == "insert":
        return data[:at] + rng.randbytes(size) + data[at:]
    if how == "double":
        return data[: at + size] + data[at:]
    if how == "swap":
        return data[at:] + data[:at]
    return data + rng.randbytes(size)


def spoil_file(rng: random.Random, path: Path) -> None:
    """Changes a file or removes it."""
    before = path.read_bytes()
    if rng.random() < 0.1:
        path.unlink()
        return
    while (after := spoiled_bytes(rng, before)) == before:
        pass
    path.write_bytes(after)


def spoiled_value(rng: random.Random, value: Any) -> Any:
    """A JSON value, wrong at one drawn place."""
    value = copy.deepcopy(value)
    inside = value
    while isinstance(inside, (dict, list)) and inside and rng.random() < 0.75:
        key = rng.choice(list(inside)) if isinstance(inside, dict) else rng.randrange(len(inside))
        child = inside[key]
        if not (isinstance(child, (dict, list)) and child) or rng.random() < 0.3:
            _spoil(rng, inside, key)
            return value
        inside = child
    return rng.choice(_VALUES) if inside is value else value


def _spoil(rng: random.Random, holder: Any, key: Any) -> None:
    how = rng.choice(("replace", "replace", "remove", "wrap", "add", "text"))
    if how == "remove":
        del holder[key]
    elif how == "wrap":
        holder[key] = [holder[key]]
    elif how == "text":
        holder[key] = str(holder[key])
    elif how == "add" and isinstance(holder, dict):
        holder[rng.choice(("", "unknown", "__class__"))] = rng.choice(_VALUES)
    else:
        holder[key] = rng.choice(_VALUES)


def spoiled_json(rng: random.Random, value: Any) -> bytes:
    """The text of a JSON value, wrong in one way or several."""
    how = rng.random()
    if how < 0.1:
        return rng.choice(_HOSTILE)
    if how < 0.2:  # at depths around that at which a parser gives up
        depth, (left, right) = rng.randrange(20, 1200), rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        inside = json.dumps(value).encode()
        return left * depth + inside + right * depth
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = spoiled_value(rng, value)
    data = json.dumps(value).encode()
    return spoiled_bytes(rng, data) if rng.random() < 0.3 else data


def spoiled_text(rng: random.Random, text: str) -> str:
    """A text, wrong at up to three places: a word is replaced, or a line is moved."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        parts = re.split(r"(\W)", text)
        at = rng.randrange(len(parts))
        how = rng.choice(("word", "word", "remove", "double", "bytes"))
        if how == "bytes":
            text = spoiled_bytes(rng, text.encode(errors="surrogatepass")).decode(errors="replace")
            continue
        if how == "word":
            parts[at] = rng.choice((*_WORDS, *_YAML))
        elif how == "remove":
            del parts[at]
        else:
            parts.insert(at, parts[at])
        text = "".join(parts)
    return text


def spoiled_lines(rng: random.Random, records: list[dict[str, Any]]) -> bytes:
    """Records as lines of JSON, one of them wrong, or all of the text."""
    lines = [json.dumps(record).encode() for record in records]
    at = rng.randrange(len(lines))
    lines[at] = spoiled_json(rng, records[at])
    data = b"\n".join(lines) + b"\n"
    return spoiled_bytes(rng, data) if rng.random() < 0.2 else data


def spoiled_flags(rng: random.Random, flags: list[str], known: list[str]) -> list[str]:
    """A command line, wrong at up to four places."""
    words = list(flags)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(words))
        how = rng.choice(("value", "value", "value", "remove", "double", "add", "add", "word"))
        if how == "value":
            at = min(at | 1, len(words) - 1)
            words[at] = rng.choice(_WORDS)
        elif how == "remove":
            del words[at]
        elif how == "double":
            words.insert(at, words[at])
        elif how == "add":
            words += [rng.choice(known), rng.choice(_WORDS)][: rng.choice((1, 2))]
        else:
            words.insert(at, rng.choice(_WORDS))
    return words


# Readers


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Raises TimeoutError in what runs too long."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {_MAX_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_MAX_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def problem_of(act: Callable[[], Any], *allowed: type[BaseException]) -> str | None:
    """Runs a reader. A refusal is one line: its exception must be of the kinds that the programs
    catch, and say something."""
    try:
        with _in_time():
            act()
    except allowed as error:
        return None if str(error).strip() else f"{type(error).__name__} that says nothing"
    except BaseException as error:  # also SystemExit of a kind that is not foreseen
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def code_of(main: Callable[[list[str]], int], *arguments: Any) -> tuple[int | str, str]:
    """Exit code of a tool's `main`, or what it raised; and its error output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _in_time():
                return main([str(a) for a in arguments]), err.getvalue()
        except SystemExit as error:
            return int(error.code or 0), err.getvalue()
        except BaseException as error:
            return f"{type(error).__name__}: {str(error)[:200]}", err.getvalue()


def tool_problem(result: tuple[int | str, str], *codes: int) -> str | None:
    """What is wrong with how a tool ended."""
    code, said = result
    if isinstance(code, str):
        return code
    if "Traceback" in said:
        return f"a traceback: {said[-200:]}"
    if code not in (0, *codes):
        return f"exit code {code}: {said[-200:]}"
    if code and not said.strip():
        return f"exit code {code} without a word"
    return None
