"""The patterns of a shell that take something off a value, for example of `${NAME%%-[^a-z]*}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

Character = tuple[str, bool]
"""Of a pattern, and whether it stands for itself, as within quotes."""
_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\[-`{-~",
    "space": "\\s",
    "upper": "A-Z",
    "word": "a-zA-Z0-9_",
    "xdigit": "0-9A-Fa-f",
}


def quoted(text: str) -> list[Character]:
    """The characters of a text within quotes."""
    return [(x, True) for x in text]


def unquoted(text: str) -> list[Character]:
    """Those of a text outside of them, in which a backslash quotes the next."""
    found: list[Character] = []
    for pair in re.findall(r"\\.|.", text, re.DOTALL):
        found.append((pair[-1], len(pair) == 2 or pair == "\\"))
    return found


def matches(value: str, pattern: str) -> bool:
    """Whether a value is what a pattern without quotes or backslashes describes."""
    return re.fullmatch(_expression([(x, False) for x in pattern]), value, re.DOTALL) is not None


def without(value: str, how: str, pattern: Sequence[Character]) -> str:
    """A value without what a pattern takes off its begin (`#`) or its end (`%`): the shortest, or
    with the sign twice the longest."""
    is_whole = re.compile(_expression(pattern), re.DOTALL).fullmatch
    cuts = range(len(value) + 1)
    is_begin, is_long = how[0] == "#", len(how) == 2
    for i in cuts if is_begin != is_long else reversed(cuts):
        if is_whole(value[:i] if is_begin else value[i:]):
            return value[i:] if is_begin else value[:i]
    return value


def _expression(pattern: Sequence[Character]) -> str:
    """A regular expression that matches what a pattern does."""
    found, i = "", 0
    while i < len(pattern):
        one = pattern[i]
        i += 1
        if one == ("*", False):
            # Several in a row are one, which is much faster.
            found += "" if found.endswith(".*") and pattern[i - 2] == one else ".*"
        elif one == ("?", False):
            found += "."
        elif one == ("[", False) and (bracket := _bracket(pattern, i)) is not None:
            text, i = bracket
            found += text
        else:
            found += re.escape(one[0])
    return found


def _bracket(pattern: Sequence[Character], i: int) -> tuple[str, int] | None:
    """The expression of a set of characters behind its bracket, and where it ends; None where it
    does not, so that the bracket stands for itself."""
    negates = pattern[i : i + 1] in ([("!", False)], [("^", False)])
    start = i = i + negates
    members = ""
    while i < len(pattern):
        one, is_quoted = pattern[i]
        if (one, is_quoted) == ("]", False) and i > start:
            if not members:
                return ("." if negates else "(?!)"), i + 1
            return f"[{'^' * negates}{members}]", i + 1
        rest = "".join(x for x, _ in pattern[i:])
        named = re.match(r"\[:(\w+):\]", rest)
        if named and not is_quoted:
            members += _CLASSES.get(named[1], "")
            i += named.end()
            continue
        is_range = pattern[i + 1 : i + 2] == [("-", False)] and i + 2 < len(pattern)
        if is_range and pattern[i + 2] != ("]", False):
            last = pattern[i + 2][0]
            members += f"{re.escape(one)}-{re.escape(last)}" if one <= last else ""
            i += 3
            continue
        members += re.escape(one)
        i += 1
    return None
