"""Trains like pretrain_gpt.py, and no file can grow beyond a size.

worker_small_files.py BYTES FLAGS
"""

from __future__ import annotations

import resource
import sys

from tests.helpers.jobs import prepare


def main() -> int:
    """Trains; the code of pretrain_gpt.py."""
    prepare()
    from copus_ext.commands import pretrain

    limit = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(main())
