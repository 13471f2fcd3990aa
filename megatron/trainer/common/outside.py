"""JSON and YAML that anybody may have written: from a socket, or from a file that may be damaged.

A parser raises many kinds of errors. Here all of them are ValueError, so that a reader has one to
catch.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_NESTING = 100
"""Objects and lists inside one another. What is deeper makes a parser fail with RecursionError, or
whatever copies, prints or stores the value later."""
_MAX_YAML_BYTES = 1 << 20


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: also as bytes in UTF-8, UTF-16 or UTF-32.
        finite: refuse NaN, Infinity and numbers that a float cannot hold. Otherwise Python's
            parser makes `nan` and `inf` of them.

    Raises:
        ValueError: one line. It is not valid JSON or not text, a number has too many digits, or the
            value is nested deeper than `MAX_NESTING`.
    """
    hooks: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):  # advice for who writes the program
            raise ValueError("a number is too long") from None
        raise
    # Counted first, which is cheap: most texts have too few brackets to be deep.
    brackets: tuple[Any, ...] = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_NESTING and _is_deep(value):
        raise ValueError("it is nested too deeply")
    return value


def parse_yaml(text: str) -> Any:
    """The value of a YAML text of plain values, lists and mappings.

    Raises:
        ValueError: one line. It is not valid YAML, a value is none of its kind, a name stands twice
            in a mapping, it is nested deeper than `MAX_NESTING`, or it has aliases, of which a
            short text can make an endless value.
    """
    import yaml

    if len(text) > _MAX_YAML_BYTES:
        raise ValueError(f"it has more than {_MAX_YAML_BYTES} characters")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_NESTING:
                raise ValueError("it is nested too deeply")
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has an alias; write the value out")
        _check_names(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    # Of a tag such as !!int or !!timestamp before something else.
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a value is not of the kind that its tag names: {error!r}") from error


def _check_names(node: Any) -> None:
    """Raises:
    ValueError: a name stands twice in a mapping, of which YAML would take the last.
    """
    left = [node]
    while left:
        node = left.pop()
        if not isinstance(getattr(node, "value", None), list):
            continue
        names = [str(pair[0].value) for pair in node.value if isinstance(pair, tuple)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"it has {twice[:40]!r} twice; keep one of them")
        for item in node.value:
            left += item if isinstance(item, tuple) else [item]


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is in it")
    return value


def _is_deep(value: Any) -> bool:
    """Whether a value is nested deeper than `MAX_NESTING`; goes down by one level at a time."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            child
            for one in level
            if isinstance(one, (dict, list))
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
