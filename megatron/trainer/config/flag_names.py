"""Names of flags: the nearest to a misspelled one, and names of settings in a file.

Also for a Megatron-LM checkout, which has its own parser and its own groups of flags.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from megatron.trainer.config.fields import OptionSpec, option_specs
from megatron.trainer.config.known_flags import deprecated

_NEAR = 0.8
"""How alike an unknown flag and a hint must be: difflib's ratio, from 0 to 1."""


def settings_of_files(groups: Iterable[type]) -> dict[str, str]:
    """What to write for each flag whose setting stands in a file, by the flag's name.

    Args:
        groups: dataclasses with `option` fields.
    """
    specs = [spec for group in groups for spec in option_specs(group) if spec.in_file]
    return {s.strings[0]: f"write {setting_name(s)} in the file of {s.in_file}" for s in specs}


def setting_name(spec: OptionSpec) -> str:
    """The name of an option in its file: the field's, without what the file's flag begins with."""
    beginning = (spec.in_file or "").strip("-").rpartition("-")[0]
    return spec.dest.removeprefix(beginning + "_")


def nearest_flag(flag: str, names: Collection[str]) -> str | None:
    """The flag that a misspelled one probably meant, or None if none is near.

    Underscores for hyphens, one hyphen for two, and capitals do not count as differences. What
    turns something off is never offered for what turns it on, nor a flag that Megatron-LM gave up.
    """
    plain = _letters(flag)
    spelled = {_letters(name): name for name in sorted(names)[::-1] if name not in deprecated()}
    if plain in spelled:
        return spelled[plain]
    alike = [name for name in spelled if _turns_off(name) == _turns_off(plain)]
    near = difflib.get_close_matches(plain, alike, n=1, cutoff=_NEAR)
    return spelled[near[0]] if near else None


def _letters(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()


def _turns_off(flag: str) -> bool:
    return flag.startswith(("no-", "disable-"))
