"""How a dataclass field says what its command-line option looks like."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any

_CLI = "cli"


@dataclass(frozen=True, kw_only=True)
class Option:
    """The command-line side of one field."""

    strings: tuple[str, ...] = ()
    """Option strings, the canonical one first; empty means `--` and the field name with hyphens."""
    choices: tuple[Any, ...] | None = None
    """Allowed values, or None for any."""
    nargs: int | str | None = None
    """Number of values as argparse counts them; None means one."""
    required: bool = False
    """Whether a run needs the flag to be given."""
    in_file: str | None = None
    """Flag of the file where this option stands; None for the command line."""
    word: str | None = None
    """A word that may stand for the value until the configuration is resolved."""


def option(
    default: Any,
    *strings: str,
    choices: tuple[Any, ...] | None = None,
    nargs: int | str | None = None,
    required: bool = False,
    in_file: str | None = None,
    word: str | None = None,
) -> Any:
    """Declares a field that has a command-line option.

    Args:
        default: what the parser gives when the flag is absent; None where the value is derived
            later.
        strings: option strings, if they differ from the field name.
        required: whether a run needs the flag.
        in_file: flag of the file where the option stands in place of the command line.
        word: may stand for the value until the configuration is resolved.
    """
    cli = Option(
        strings=strings,
        choices=choices,
        nargs=nargs,
        required=required,
        in_file=in_file,
        word=word,
    )
    return dataclasses.field(default=default, metadata={_CLI: cli})


def derived(default: Any) -> Any:
    """Declares a field without a flag: its value follows from other fields."""
    return dataclasses.field(default=default)


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """One field of a group, ready to become an argparse option."""

    dest: str
    """Field name, which is Megatron's argparse dest."""
    strings: tuple[str, ...]
    """All option strings, the canonical one first."""
    kind: type
    """Type of one value: bool, int, float or str."""
    default: Any
    """Parser default."""
    choices: tuple[Any, ...] | None
    """Allowed values, or None."""
    nargs: int | str | None
    """Number of values as argparse counts them, or None for one."""
    required: bool
    """Whether a run needs the flag to be given."""
    help: str
    """The docstring below the field."""
    in_file: str | None = None
    """Flag of the file where the option stands; None for the command line."""
    word: str | None = None
    """A word that may stand for the value, or None."""

    def read(self, text: str) -> Any:
        """Reads one value as the command line does.

        Raises:
            ValueError: the text is not a value of this option; says what would be.
        """
        if text == self.word:
            return text
        reader = {int: _whole_number, float: _number, str: str}[self.kind]
        value = reader(text)
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{text!r} is not one of {', '.join(map(str, self.choices))}")
        return value


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number; give one") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number; give one") from None


@functools.cache
def option_specs(group: type) -> tuple[OptionSpec, ...]:
    """Lists the command-line options of a configuration dataclass in the order of its fields."""
    hints = typing.get_type_hints(group)
    docs = field_docstrings(group)
    specs = []
    for field in dataclasses.fields(group):
        cli = field.metadata.get(_CLI)
        if cli is None:
            continue
        specs.append(
            OptionSpec(
                dest=field.name,
                strings=cli.strings or ("--" + field.name.replace("_", "-"),),
                kind=_value_type(hints[field.name]),
                default=field.default,
                choices=cli.choices,
                nargs=cli.nargs,
                required=cli.required,
                help=docs.get(field.name, ""),
                in_file=cli.in_file,
                word=cli.word,
            )
        )
    return tuple(specs)


def _value_type(annotation: Any) -> type:
    """Returns the type of one value of `int`, `int | None`, `tuple[int, ...]`, `tuple[int, ...]
    | None`."""
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        (annotation,) = [a for a in typing.get_args(annotation) if a is not NoneType]
    if typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    assert isinstance(annotation, type), annotation
    return annotation


@functools.cache
def field_docstrings(group: type) -> dict[str, str]:
    """Returns the string literal below each field of a dataclass, by field name, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(group)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs = {}
    for statement, after in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs
