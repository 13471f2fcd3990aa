"""`copus probe-links` with something that goes wrong. First argument: what; the others: its flags.

`hang A B`: node B stops in the middle of its link to node A. `interrupt`: the first node gets a
Ctrl-C in its second round. `die`: node 1 is killed in its second round.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from copus_ext.extras.probe import command, session

_measure = session._measure


def _hang(a: int, b: int) -> Any:
    def measure(*args: Any) -> Any:
        if args[-2] == (a, b) and args[-1] == b:
            time.sleep(1000)
        return _measure(*args)

    return measure


def _signal_in_second(node: int, number: int) -> Any:
    rounds = []

    def measure(*args: Any) -> Any:
        rounds.append(args[-2])
        if len(rounds) == 2 and args[-1] == node:
            os.kill(os.getpid(), number)
        return _measure(*args)

    return measure


def main() -> int:
    what, *rest = sys.argv[1:]
    if what == "hang":
        session._measure = _hang(int(rest.pop(0)), int(rest.pop(0)))
    elif what == "interrupt":
        session._measure = _signal_in_second(0, signal.SIGINT)
    else:
        session._measure = _signal_in_second(1, signal.SIGKILL)
    return command.main(rest)


if __name__ == "__main__":
    sys.exit(main())
