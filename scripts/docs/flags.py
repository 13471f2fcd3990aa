"""The page of flags and the file of settings, made from the dataclasses of the parser.

PYTHONPATH=. python scripts/docs/flags.py      writes docs/copus.yaml
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import yaml

from copus_ext.controller.flags import CopusConfig, settings_by_name
from megatron.trainer.config import GROUPS
from megatron.trainer.config.arguments import TITLES
from megatron.trainer.config.fields import OptionSpec, option_specs
from megatron.trainer.config.flag_names import setting_name
from megatron.trainer.config.known_flags import KnownFlag

_CODE = re.compile(r"`[^`]+`|(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?:-\*)?")
"""What is shown as code: what a docstring marks so, and flags."""
_HEAD = """# Flags

<style>td:last-child code { white-space: nowrap }</style>

What `python pretrain_gpt.py --help` says, group by group. Names, meanings and defaults are
Megatron-LM's; those that begin with `--copus` are the controller's. A switch takes no value. One
whose meaning begins with "Turn off" ends what is on without it. Where no default is shown, the last
column says what follows.
"""
_OF_THE_FILE = """
These settings stand in the YAML file of `--copus-config`. `docs/copus.yaml` lists all of them with
their defaults. The flags may stand there too, without their dashes and without `copus`.

| setting | value | default | meaning |
|---|---|---|---|"""
_KNOWN = """## Flags of Megatron-LM that have no effect here

Accepted, with one note in the log.
"""
_REPLACED = """Those of the table only cost time or memory, or check less strictly. The run does
without, and its note says what happens instead.

| flags | what happens |
|---|---|"""
_REFUSED = """## Flags of Megatron-LM that are refused

They would change the result and are not implemented. Some have values that ask for nothing; with
these they are accepted.
"""


_SETTINGS = """# Every setting of --copus-config FILE, with its default. Copy what you change.
# A flag on the command line wins over the file.
"""


def all_groups() -> dict[str, type]:
    """Title -> dataclass of every group of flags, in the order of `--help`."""
    groups = {TITLES[name]: group for name, group in GROUPS.items()}
    return {**groups, "copus controller": CopusConfig}


def flags_page(groups: Mapping[str, type], known: Iterable[KnownFlag]) -> str:
    """Writes the page.

    Args:
        groups: title -> dataclass with `option` fields.
        known: flags that are understood and not implemented.

    Returns:
        Markdown, with HTML only for the anchors: `flags.md#--seq-length` leads to that flag.
    """
    parts = [_HEAD]
    for title, group in groups.items():
        specs = option_specs(group)
        parts.append(f"## {title.capitalize()}\n")
        if group.__doc__:
            parts.append(_cell(group.__doc__) + "\n")
        parts.append("| flag | value | default | meaning |\n|---|---|---|---|")
        parts += [_row(spec) for spec in specs if spec.in_file is None]
        if group is CopusConfig:
            parts.append(_OF_THE_FILE)
            parts += [_row(spec) for spec in specs if spec.in_file is not None]
        parts.append("")
    flags = sorted(known, key=lambda flag: flag.name)
    parts.append(_KNOWN)
    plain = [f"`{f.name}`" for f in flags if f.refusal is None and f.instead is None]
    parts.append(", ".join(plain) + "\n")
    parts.append(_REPLACED)
    parts += _by_reason((f.instead, f) for f in flags if f.instead is not None)
    parts.append("")
    parts.append(_REFUSED)
    parts.append("| flags | why, and what to do |\n|---|---|")
    parts += _by_reason((f.refusal, f) for f in flags if f.refusal is not None)
    return "\n".join(parts) + "\n"


def _by_reason(flags: Iterable[tuple[str, KnownFlag]]) -> Iterator[str]:
    """A row for each reason, with the flags that it holds for and the values that are exempt."""
    ordered = sorted(flags, key=lambda entry: (entry[0], entry[1].name))
    for reason, same in groupby(ordered, key=lambda entry: entry[0]):
        names = ", ".join(
            f"`{f.name}`"
            + (f" (not {', '.join(f'`{v}`' for v in f.neutral)})" if f.neutral else "")
            for _, f in same
        )
        yield f"| {names} | {_cell(reason)} |"


def _row(spec: OptionSpec) -> str:
    names = f"`{setting_name(spec)}`"
    if spec.in_file is None:
        anchors = {string: html.escape(string) for string in spec.strings}
        names = "<br>".join(f'<a id="{a}"></a>`{string}`' for string, a in anchors.items())
    if spec.kind is bool:
        value, default = "switch", ""
        text, turns_off = spec.help, spec.default and not spec.help.startswith("Accepted")
        text = f"Turn off: {text[:1].lower()}{text[1:]}" if turns_off else text
    else:
        value = {int: "integer", float: "number", str: "text"}[spec.kind]
        if spec.choices is not None:
            value = ", ".join(f"`{choice}`" for choice in spec.choices)
        elif spec.nargs is not None:
            value = (
                f"{spec.nargs} times {value}" if isinstance(spec.nargs, int) else f"{value}, ..."
            )
        shown = spec.default not in (None, ())
        default = f"`{spec.default}`" if shown else "**required**" if spec.required else ""
        text = spec.help
    return f"| {names} | {value} | {default} | {_cell(text)} |"


def _cell(text: str) -> str:
    """One line of Markdown in which flags are code and nothing else has a meaning."""
    text = " ".join(text.split())
    parts, end = [], 0
    for found in _CODE.finditer(text):
        parts += [_plain(text[end : found.start()]), f"`{found[0].strip('`')}`"]
        end = found.end()
    return "".join([*parts, _plain(text[end:])])


def _plain(text: str) -> str:
    return re.sub(r"([\\`|*_\[\]])", r"\\\1", html.escape(text, quote=False))


def settings_file() -> str:
    """Writes `docs/copus.yaml`: all settings of the controller, each with its default."""
    parts = [_SETTINGS]
    for name, spec in settings_by_name().items():
        text = f"{spec.help} Flag: {spec.strings[0]}." if spec.in_file is None else spec.help
        if spec.choices is not None:
            text += f" One of: {', '.join(map(str, spec.choices))}."
        parts.append(
            textwrap.fill(
                text, 96, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
            )
        )
        parts.append(yaml.safe_dump({name: spec.default}))
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "copus.yaml").write_text(settings_file())
