"""The words of a command in a pasted script, with the variables that the script itself assigns."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Sequence

_REMARK = re.compile(
    r"""^((?:[^'"\n]|"[^"\n]*"|'[^'\n]*')*?(?<!\S))\#(?!SBATCH).*$""", re.MULTILINE
)
_CONTINUED = re.compile(r"\\[ \t\r]*(?:\n|\Z)")
"""A line that goes on, also where spaces slipped in behind its backslash, or nothing follows."""
_ASSIGNED = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=
    (?:"((?:[^"\\]|\\.)*)"|'([^']*)'|\(([^)]*)\)|((?:\$\([^\n]*\)|`[^`\n]*`|[^\s;&|"'()])*))
    [ \t]*;?[ \t]*(?:\#.*)?$""",
    re.MULTILINE | re.VERBOSE,
)
"""An assignment that is a line of its own: a text, an array, or one word."""
_ARRAY = re.compile(r'"(\$\{\w+\[[@*]\]\})"')
_USED = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^}$]*))?\})")
_COMPUTED = re.compile(r"\$\(\([^\n]*?\)\)|\$\([^()\n]*\)|`[^`\n]*`")
_SUM = re.compile(r"\$\(\(([^\n]*?)\)\)(?!\))")
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # Both round towards zero in a shell.
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}
_ENDS = re.compile(r"\||\|\||&&?|;|\d?>>?.*|&>.*|2>&1")
"""What ends a command, or says where its output goes."""


def words_of(text: str) -> list[str]:
    """The words of a text up to the end of its last command. A variable that a line before assigns
    has its value; others, and what a shell would compute, stay as they are written.

    Raises:
        ValueError: a quotation that does not close.
    """
    text = _CONTINUED.sub(" ", _REMARK.sub(r"\1", text))
    values: dict[str, str] = {}
    for found in _ASSIGNED.finditer(text):
        name, *forms = found.groups()
        values[name] = _filled(next(x for x in forms if x is not None), values)
    text = _filled(_ASSIGNED.sub("", text), values)
    # A computed value may have spaces, and is one word.
    computed: list[str] = []

    def hidden(found: re.Match[str]) -> str:
        computed.append(found[0])
        return f"$({len(computed) - 1})"

    words = shlex.split(_COMPUTED.sub(hidden, text))
    return [re.sub(r"\$\((\d+)\)", lambda x: computed[int(x[1])], word) for word in words]


def flags_of(text: str) -> list[str]:
    """The words of a text of flags alone, which may stand on several lines.

    Raises:
        ValueError: a quotation that does not close.
    """
    return shlex.split(_CONTINUED.sub(" ", text))


def up_to_end(words: Sequence[str]) -> list[str]:
    """The words of a command, without what follows it or says where its output goes."""
    end = next((i for i, word in enumerate(words) if _ENDS.fullmatch(word)), len(words))
    return list(words[:end])


def variables(word: str) -> list[str]:
    """What of a word a shell would fill in, as it is written."""
    return re.findall(r"\$\(.*\)|`.*`|\$\{[^}]*\}|\$\w+|\$[^\w\s]?", word)


def _filled(text: str, values: dict[str, str]) -> str:
    """A text with the variables that have a value; one without takes the default written there."""

    def value(found: re.Match[str]) -> str:
        known = values.get(found[1] or found[2])
        return next((x for x in (known, found[3]) if x is not None), found[0])

    def computed(found: re.Match[str]) -> str:
        terms = re.sub(r"\b[A-Za-z_]\w*", lambda name: values.get(name[0], name[0]), found[1])
        try:
            return str(_number(ast.parse(terms.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return found[0]

    return _SUM.sub(computed, _USED.sub(value, _ARRAY.sub(r"\1", text)))


def _number(term: ast.expr) -> int:
    """The value of whole numbers and their sums, products and quotients. ValueError for others."""
    match term:
        case ast.Constant(value=number) if type(number) is int:
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_number(left), _number(right))
        case _:
            raise ValueError("not a whole number that is known")
