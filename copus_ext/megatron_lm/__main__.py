"""Runs a script of a Megatron-LM checkout under the controller, without an edit.

torchrun ... -m copus_ext.megatron_lm pretrain_gpt.py FLAGS OF MEGATRON-LM --copus ...
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from megatron.trainer.common.errors import Relaunch, UsageError
from megatron.trainer.common.program import tell
from megatron.trainer.resilience.watchdog import exit_immediately

_PROG = "copus_ext.megatron_lm"


def main(argv: list[str] | None = None) -> int:
    """Takes the controller's flags off the command line, wraps the loop and runs the script.

    Returns:
        Exit code 2 for wrong usage, of the flags or of the run; else the script's own way out is
        taken. A change of layout that cannot go back leaves with 85.
    """
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["-h"], ["--help"]):
        _parser().print_help()
        return 0
    try:
        script, flags, rest = split(words)
    except UsageError as error:
        return _refused(error)
    sys.argv = [str(script), *rest]
    sys.path.insert(0, str(script.resolve().parent))
    if flags is not None:
        from copus_ext.megatron_lm.host import install

        install(flags=flags)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except UsageError as error:
        return _refused(error)
    except Relaunch as error:
        tell(_PROG, f"{error}; start the same command again, which goes on from --load")
        exit_immediately(Relaunch.exit_code)
    return 0


def _refused(error: UsageError) -> int:
    if os.environ.get("RANK", "0") == "0":
        tell(_PROG, f"error: {error}")
    return 2


def split(words: list[str]) -> tuple[Path, Any, list[str]]:
    """The script, the controller's settings (None without `--copus`), and the script's flags.

    Raises:
        UsageError: there is no such script, or a flag of the controller makes no sense.
    """
    from copus_ext.controller.flags import check_has_copus, controller_flags, given_by_value
    from megatron.trainer.config.training import AUTO

    script = Path(words[0]) if words else None
    if script is None or script.suffix != ".py":
        raise UsageError(
            f"no script comes first; give that of your checkout: -m {_PROG} pretrain_gpt.py ..."
        )
    if not script.is_file():
        raise UsageError(f"{script} is not there; give the path of the script of your checkout")
    parser = _parser()
    found, rest = parser.parse_known_args(words[1:])
    ours = [flag for action in parser._actions for flag in action.option_strings]
    for word in (word.partition("=")[0] for word in rest if word.startswith("--copus-")):
        near = difflib.get_close_matches(word, ours, 1)
        meant = f"; did you mean {near[0]}?" if near else "; --help lists those of the controller"
        raise UsageError(f"there is no flag {word}{meant}")
    check_has_copus(given_by_value(found), is_on=found.copus)
    if AUTO in _values_of("--global-batch-size", rest):
        raise UsageError(
            f"--global-batch-size {AUTO} is known to the pretrain_gpt.py of COPUS alone; give the "
            "number that `copus plan` names"
        )
    is_on = found.copus and found.copus_mode != "off"
    return script, controller_flags(found) if is_on else None, rest


def _values_of(flag: str, words: list[str]) -> list[str]:
    apart = [value for word, value in itertools.pairwise(words) if word == flag]
    return [*apart, *(word.partition("=")[2] for word in words if word.startswith(f"{flag}="))]


def _parser() -> argparse.ArgumentParser:
    from copus_ext.megatron_lm.flags import add_copus_args

    usage = f"torchrun ... -m {_PROG} pretrain_gpt.py FLAGS OF MEGATRON-LM --copus ..."
    return add_copus_args(_Parser(usage=usage, add_help=False, allow_abbrev=False))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message)


if __name__ == "__main__":
    sys.exit(main())
