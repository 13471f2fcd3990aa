"""The former name of `slurm_job`, for batch scripts that were submitted or copied before.

It is read for one release.
"""

import sys

from copus_ext.launch.slurm_job import main

if __name__ == "__main__":
    print("note: copus_ext.launch.requeue is now copus_ext.launch.slurm_job", file=sys.stderr)
    sys.exit(main(sys.argv[1:]))
