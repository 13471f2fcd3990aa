"""The words of a shell's text: what ends a command, and what variables that are known stand for."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator

from copus_ext.planner.shell_pattern import Character, quoted, unquoted, without

Value = str | list[str]
"""Of a variable: a text, or the elements of an array."""
_CONTINUED = re.compile(r"\\[ \t\r]*(?:\n|\Z)")
"""A line that goes on, also where spaces slipped in behind its backslash, or nothing follows."""
_OPERATOR = re.compile(r"\|\||&&|;;&?|;&|\|&|\(\)|[|&;()\n]")
_REDIRECT = re.compile(r"(?:<<<|&?>>?|<)[&|]?[ \t]*")
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*\n)(.*?)^[ \t]*\2[ \t]*$", re.DOTALL | re.M)
_NAME = re.compile(r"\$(\w+|[#?@*!$-])")
_BRACED = re.compile(r"\$\{(\w+)(?:\[([@*])\])?(?:(:?[-=+])(.*))?\}", re.DOTALL)
_TRIMMED = re.compile(r"\$\{(\w+)(##?|%%?)(.*)\}", re.DOTALL)
_HIDDEN = re.compile("\ue000(\\d+)\ue001")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # Both round towards zero in a shell.
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}
_LARGEST_POWER = 62
"""Exponent up to which powers are computed; a shell's numbers have 64 bits."""
_NOT_CLOSED = "a quotation or a bracket does not close; paste the text whole, in single quotes"


def flags_of(text: str) -> list[str]:
    """The words of a text of flags alone, which may stand on several lines.

    Raises:
        ValueError: a quotation that does not close.
    """
    try:
        return shlex.split(_CONTINUED.sub(" ", text))
    except ValueError:
        raise ValueError(_NOT_CLOSED) from None


def variables(word: str) -> list[str]:
    """What of a word a shell would fill in, as it is written."""
    return re.findall(r"\$\(.*\)|`.*`|\$\{[^}]*\}|\$\w+|\$[^\w\s]?", word)


def tokens(text: str) -> list[tuple[str, str]]:
    """The words of a script as they are written, `("word", ...)`; what ends a command, `("end",
    ...)`; and texts that a command reads, `("here", ...)`. Redirections and remarks are left out,
    and a line that begins with a flag goes on with the one before.

    Raises:
        ValueError: a quotation that does not close.
    """
    found: list[tuple[str, str]] = []
    word, i, is_target = "", 0, False
    while i <= len(text):
        rest = text[i : i + 2]
        joined = _CONTINUED.match(text, i)
        if joined is None and rest and (rest[0] in "\\'\"`" or rest in ("$(", "${", "<(", ">(")):
            end = _end(text, i + (rest[0] in "<>"))
            word, i = word + text[i:end], end
            continue
        if rest[:1] == "(" and _ARRAY.fullmatch(word):
            end = _end(text, i)
            word, i = word + text[i:end], end
            continue
        goes_on = joined is None and rest and rest[0] not in " \t\r\n|&;()<>"
        if goes_on and not (rest[0] == "#" and not word):
            word, i = word + rest[0], i + 1
            continue
        # Something ends the word.
        number = rest[:1] in ("<", ">") and word.isdecimal()
        if word and not number:
            if not is_target:
                found.append(("word", word))
            is_target = False
        is_start = not found or found[-1][0] == "end" or found[-1][1] in ("if", "elif", "while")
        word, was = "", word
        if was == "[[" or (rest == "((" and is_start):
            i, close = (i, "]]") if was == "[[" else (i + 2, "))")
            end = text.find(close, i)
            if end < 0:
                raise ValueError(_NOT_CLOSED)
            found[len(found) - (was == "[[") :] = [("word", close + text[i:end])]
            i = end + 2
        elif joined is not None:
            i = joined.end()
        elif rest[:1] == "#":
            i += len(re.match(r"[^\n]*", text[i:])[0])  # pyright: ignore[reportOptionalSubscript]
        elif here := _HERE.match(text, i):
            found.append(("here", here[4]))
            text = text[:i] + here[3] + text[here.end() :]
        elif redirect := _REDIRECT.match(text, i) or (rest == "&>" and _REDIRECT.match(text, i)):
            is_target, i = True, redirect.end()
        elif end_of := _OPERATOR.match(text, i):
            i = end_of.end()
            if end_of[0] != "\n" or not re.match(r"\s*-", text[i:]):
                found.append(("end", end_of[0]))
                is_target = False
        else:
            i += 1
    return found


def _end(text: str, i: int) -> int:
    """Behind the quotation, the substitution or the brackets that begin at a place of a text."""
    opening = text[i]
    if opening == "\\":
        return min(i + 2, len(text))
    j = i + 1
    if opening in "'`":
        j = text.find(opening, j)
        if j < 0:
            raise ValueError(_NOT_CLOSED)
        return j + 1
    if opening == "$":
        opening, j = text[j], j + 1
    closing = {"(": ")", "{": "}"}.get(opening, opening)
    while j < len(text) and text[j] != closing:
        if opening == "(" and text[j] == "#" and text[j - 1].isspace():
            j = (text.find("\n", j) + 1) or len(text)
            continue
        nested = "\\`" if opening == '"' else "\\`'\"" + "(" * (opening == "(")
        inner = text[j] in nested or text.startswith(("$(", "${"), j)
        j = _end(text, j) if inner else j + 1
    if j >= len(text):
        raise ValueError(_NOT_CLOSED)
    return j + 1


class Words:
    """Fills in the variables that are known. What is not stays as it is written, in one word."""

    def __init__(self) -> None:
        self._hidden: list[str] = []

    def shown(self, word: str) -> str:
        """A word for the reader, with what only a shell computes as it was written."""
        while _HIDDEN.search(word):
            word = _HIDDEN.sub(lambda found: self._hidden[int(found[1])], word)
        return word

    def split(self, raw: str, values: dict[str, Value]) -> list[str]:
        """The words that a written one becomes."""
        found: list[str] = []
        current: str | None = None
        for piece, splits in self._pieces(raw, values):
            fields = piece if isinstance(piece, list) else [piece]
            text = fields[0] if splits and isinstance(piece, str) else ""
            if splits:
                fields = [word for field in fields for word in _fields(field)]
            if text[:1].isspace() and current is not None:
                found.append(current)
                current = None
            for n, part in enumerate(fields):
                if n:
                    found.append(current or "")
                    current = None
                current = (current or "") + part
            if text[-1:].isspace() and current is not None:
                found.append(current)
                current = None
        return found if current is None else [*found, current]

    def text(self, raw: str, values: dict[str, Value]) -> str:
        """What a written word is where it is not taken apart, as in an assignment."""
        pieces = (piece for piece, _ in self._pieces(raw, values))
        return "".join(" ".join(p) if isinstance(p, list) else p for p in pieces)

    def _pieces(self, raw: str, values: dict[str, Value]) -> Iterator[tuple[Value, bool]]:
        """Parts of a word with their values, and whether spaces in them part words."""
        i = 0
        while i < len(raw):
            end = i + 1
            if raw[i] == "'":
                end = _end(raw, i)
                yield raw[i + 1 : end - 1], False
            elif raw[i] == '"':
                end = _end(raw, i)
                inner = [piece for piece, _ in self._filled(raw[i + 1 : end - 1], values)]
                if len(inner) == 1:
                    yield inner[0], False
                else:
                    yield "".join(" ".join(p) if isinstance(p, list) else p for p in inner), False
            elif raw[i] == "\\":
                end = _end(raw, i)
                yield raw[i + 1 : end], False
            else:
                # Quotations within a substitution are part of it.
                end = i
                while end < len(raw) and raw[end] not in "'\"\\":
                    nested = raw[end] == "`" or raw.startswith(("$(", "${"), end)
                    end = _end(raw, end) if nested else end + 1
                yield from self._filled(raw[i:end], values)
            i = end

    def _filled(self, text: str, values: dict[str, Value]) -> Iterator[tuple[Value, bool]]:
        """Parts of a text outside of single quotes."""
        i = plain = 0
        while i < len(text):
            name = _NAME.match(text, i)
            if text[i] == "\\":
                yield text[plain:i], False
                joined = _CONTINUED.match(text, i)
                end = joined.end() if joined else _end(text, i)
                yield " " if joined else _unescaped(text[i:end]), False
            elif name or text[i] == "`" or text.startswith(("$(", "${"), i):
                end = name.end() if name else _end(text, i)
                if plain < i:
                    yield text[plain:i], False
                yield self._value(text[i:end], values), True
            else:
                i += 1
                continue
            i = plain = end
        if plain < len(text):
            yield text[plain:], False

    def _value(self, item: str, values: dict[str, Value]) -> Value:
        if item.startswith("$(("):
            return self.number(item[3:-2], values) or self._hide(item)
        if item[0] == "`" or item.startswith("$("):
            return self._hide(_NAME.sub(lambda x: _joined(values.get(x[1], x[0])), item))
        if name := _NAME.fullmatch(item):
            return values.get(name[1], item)
        if (found := _TRIMMED.fullmatch(item)) and found[1] in values:
            pattern, value = self._pattern(found[3], values), values[found[1]]
            # Without an index the first element of an array is meant.
            value = value if isinstance(value, str) else "".join(value[:1])
            return self._hide(item) if pattern is None else without(value, found[2], pattern)
        if not (found := _BRACED.fullmatch(item)):
            return self._hide(item)
        value, how, other = values.get(found[1]), found[3] or "", found[4] or ""
        is_set = value is not None and (how[:1] != ":" or _joined(value) != "")
        if how.endswith("+"):
            return self.text(f'"{other}"', values) if is_set else ""
        if how and not is_set:
            value = self.text(other, values)
            if how.endswith("="):
                values[found[1]] = value
            return value
        if value is None:
            return item
        return _joined(value) if found[2] == "*" else value

    def _pattern(self, raw: str, values: dict[str, Value]) -> list[Character] | None:
        """The characters of a pattern; None where a shell alone knows them."""
        found: list[Character] = []
        i = 0
        while i < len(raw):
            end = _end(raw, i) if raw[i] in "'\"\\" else i
            if raw[i] in "'\\":
                found += quoted(raw[i + 1 : end - (raw[i] == "'")])
            else:
                is_quoted = raw[i] == '"'
                while not is_quoted and end < len(raw) and raw[end] not in "'\"\\":
                    nested = raw[end] == "`" or raw.startswith(("$(", "${"), end)
                    end = _end(raw, end) if nested else end + 1
                for piece, is_filled in self._filled(raw[i + is_quoted : end - is_quoted], values):
                    text = _joined(piece)
                    if (is_filled and "$" in text) or _HIDDEN.search(text) or text[-1:] == "$":
                        return None
                    found += quoted(text) if is_quoted else unquoted(text)
            i = end
        return found

    def number(self, text: str, values: dict[str, Value]) -> str:
        """What whole numbers make, as a text; empty where that is not known."""
        text = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda x: x[1] or x[2], text)
        terms = re.sub(r"\b[A-Za-z_]\w*", lambda x: _joined(values.get(x[0], x[0])), text)
        try:
            return str(_number(ast.parse(terms.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return ""

    def _hide(self, item: str) -> str:
        self._hidden.append(item)
        return f"\ue000{len(self._hidden) - 1}\ue001"


def _joined(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _unescaped(pair: str) -> str:
    """A character behind a backslash within double quotes."""
    return pair[1:] if pair[1:] in ('"', "$", "`", "\\") else pair


def _fields(text: str) -> list[str]:
    """The words of a value. Quotes in it are taken as those of `eval`, for which they are meant."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _number(term: ast.expr) -> int:
    """The value of whole numbers and what is made of them. ValueError for others."""
    match term:
        case ast.Constant(value=number) if type(number) is int:
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_number(left), _number(right))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _number(left), _number(right)
            if 0 <= power <= _LARGEST_POWER and abs(base) ** power < 2**63:
                return base**power
            raise ValueError("too large a power")
        case _:
            raise ValueError("not a whole number that is known")
