"""The command line is a promise: nothing about it changes by accident."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from copus_ext.controller.flags import CopusConfig
from megatron.trainer.common.extras import extras
from megatron.trainer.config import GROUPS
from megatron.trainer.config.fields import option_specs
from megatron.trainer.config.known_flags import known_flags
from megatron.trainer.config.root import extra_groups

FROZEN = Path(__file__).parent / "data" / "cli.json"
HOW = (
    "if the change is on purpose, run `PYTHONPATH=. python tests/unit/test_cli_frozen.py` from "
    "the repository root and commit tests/unit/data/cli.json with a line in the user guide"
)


def command_line() -> dict[str, dict]:
    """Describes every implemented option by its canonical spelling, and every known one."""
    flags: dict[str, dict] = {}
    further = {name for extra in extras() for name in extra.policies}
    for title, group in {**GROUPS, "copus": CopusConfig}.items():
        for spec in option_specs(group):
            default = list(spec.default) if isinstance(spec.default, tuple) else spec.default
            flags[spec.strings[0]] = {
                "group": title,
                "dest": spec.dest,
                "aliases": list(spec.strings[1:]),
                "type": spec.kind.__name__,
                "default": default,
                # Policies of an extra may go with its folder.
                "choices": [c for c in spec.choices if c not in further] if spec.choices else None,
                "nargs": spec.nargs,
                "required": spec.required,
            }
            if title in extra_groups():
                flags[spec.strings[0]]["extra"] = True
    for name, flag in known_flags().items():
        flags[name] = {"refused": flag.refusal is not None, "nargs": flag.nargs}
    return flags


def test_command_line_is_frozen() -> None:
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(command_line()))
    # The flags of an extra may go with its folder.
    frozen = {n: f for n, f in frozen.items() if not f.get("extra") or f["group"] in extra_groups()}
    lines = [f"{name} is gone" for name in frozen if name not in now]
    lines += [f"{name} is new" for name in now if name not in frozen]
    lines += [
        f"{name} was {frozen[name]} and is {now[name]}"
        for name in now
        if name in frozen and now[name] != frozen[name]
    ]
    assert not lines, "\n".join([*lines, HOW])


def main() -> None:
    """Writes the command line as it is now."""
    FROZEN.parent.mkdir(exist_ok=True)
    flags = sorted(command_line().items())
    rows = [f"{json.dumps(name)}: {json.dumps(flag, sort_keys=True)}" for name, flag in flags]
    FROZEN.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    sys.stdout.write(f"wrote {FROZEN}\n")


if __name__ == "__main__":
    main()
