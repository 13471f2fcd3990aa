"""Starts the ranks of a run, and again when the run asks for it or crashes.

python -m copus_ext.launch.supervisor [flags] -- pretrain_gpt.py FLAGS
copus launch [flags] -- FLAGS

One for each node; that of node 0 decides for all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from copus_ext.launch.head import LeaderNode
from copus_ext.launch.node import WorkerNode
from copus_ext.launch.options import read_options
from copus_ext.launch.say import say
from megatron.training.common.errors import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Supervises a job on this node.

    Returns:
        The exit code: 0 done, 1 given up, 2 wrong usage, 85 to be started again elsewhere, 128 + N
        after signal N, else that of the ranks.
    """
    try:
        options = read_options(sys.argv[1:] if argv is None else argv)
        node = LeaderNode(options) if options.node_rank == 0 else WorkerNode(options)
        return node.run_job()
    except UsageError as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
