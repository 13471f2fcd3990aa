"""torchrun with an exit code that says how the ranks ended; torchrun itself leaves with 1 always.

python -m copus_ext.launch.ranks TORCHRUN_FLAGS program.py FLAGS
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Sequence

_SAYS_ITSELF = (2, 85)
"""Codes of ranks that have said why in a line of their own."""
_TELLING = (85, 86, 2)
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Runs the ranks to their end.

    Returns:
        0, or the code of the ranks: 128 + N if signal N ended one.
    """
    _end_with_parent()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(argv))
    except ChildFailedError as error:
        first = error.get_first_failure()[1].exitcode
        code = code_of([first, *(failure.exitcode for failure in error.failures.values())])
        if code not in _SAYS_ITSELF:
            print(error, file=sys.stderr, flush=True)
        return code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def code_of(codes: Sequence[int]) -> int:
    """One code for ranks that failed.

    A rank that was killed is the cause of what the others say; SIGTERM is torchrun's own way to end
    those that are left.

    Args:
        codes: as Popen gives them, that of the first failure first.
    """
    killed = [code for code in codes if code < 0 and code != -signal.SIGTERM]
    telling = [code for code in _TELLING if code in codes]
    code = (killed or telling or list(codes))[0]
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    """Lets Linux send SIGTERM to this process when its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
