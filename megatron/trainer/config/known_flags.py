"""Flags of Megatron-LM that this trainer knows but does not implement.

`known_flags.yaml` lists them. A harmless flag only costs time or memory, or checks less strictly:
the run does without, and a note says so. The others would change the result. They are refused with
a reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class KnownFlag:
    """One flag that is understood and not implemented."""

    name: str
    """Option string."""
    nargs: int | str
    """Number of values as argparse counts them; 0 for a switch."""
    neutral: tuple[str, ...] = ()
    """Values that ask for nothing beyond the default, so that they are accepted without a note."""
    choices: tuple[str, ...] | None = None
    """The values that exist, or None for any."""
    instead: str | None = None
    """What happens in place of a harmless flag; None if it has no effect that a user would miss."""
    refusal: str | None = None
    """Why the flag is refused, and the fix; None if it is harmless."""

    def asks_for_something(self, values: list[str]) -> bool:
        """Tells whether these values differ from the neutral ones."""
        return not values or any(_plain(v) not in map(_plain, self.neutral) for v in values)


@functools.cache
def _tables() -> dict[str, Any]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@functools.cache
def deprecated() -> Mapping[str, str]:
    """Flags that Megatron-LM itself refuses, and what came in their place."""
    return MappingProxyType(_tables()["deprecated"])


@functools.cache
def of_forks() -> Mapping[str, str]:
    """Flags of forks of Megatron-LM in small letters with hyphens, and what says the same here."""
    return MappingProxyType(_tables()["forks"])


@functools.cache
def refused_beginnings() -> Mapping[str, str]:
    """The beginning of an option string, and why all its unlisted members are refused."""
    return MappingProxyType(
        {
            beginning: entry["why"]
            for entry in _tables()["refused"]
            for beginning in entry.get("beginnings", "").split()
        }
    )


@functools.cache
def known_flags() -> Mapping[str, KnownFlag]:
    """Returns every known flag that is not implemented, by option string."""
    tables, flags = _tables(), {}

    def add(name: str, text: str, **reason: str) -> None:
        nargs, *neutral = text.split()
        choices = tables["choices"].get(name)
        assert name not in flags, name
        flags[name] = KnownFlag(
            name=name,
            nargs=int(nargs) if nargs.isdigit() else nargs,
            neutral=tuple(neutral),
            choices=choices and tuple(choices.split()),
            **reason,
        )

    for nargs, names in tables["harmless"].items():
        for name in names.split():
            add(name, str(nargs))
    for instead, listed in tables["replaced"].items():
        for name, text in listed.items():
            add(name, text, instead=instead)
    for name, use in tables["deprecated"].items():
        nargs = "0" if name == "--checkpoint-activations" else "1"
        add(name, nargs, refusal=f"deprecated; use {use}")
    for entry in tables["refused"]:
        for name, text in entry.get("flags", {}).items():
            add(name, text, refusal=entry["why"])
    return MappingProxyType(flags)


def notes_of(names: Iterable[str]) -> list[str]:
    """What happens in place of the harmless flags of a command line, a line for each reason.

    Args:
        names: option strings of `known_flags`.
    """
    by_reason: dict[str | None, list[str]] = {}
    for name in names:
        by_reason.setdefault(known_flags()[name].instead, []).append(name)
    plain = by_reason.pop(None, [])
    lines = [f"accepted without effect: {', '.join(plain)}"] if plain else []
    return lines + [f"{', '.join(same)}: {reason}" for reason, same in by_reason.items()]


def _plain(value: str) -> str:
    """Makes 1, 1.0 and 1e0 the same text."""
    try:
        return repr(float(value))
    except ValueError:
        return value.lower()
