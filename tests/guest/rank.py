"""One rank of Megatron-LM's own program on CPU: alone, or under `copus_ext.megatron_lm`.

rank.py plain|copus|moving=CHANGES FLAGS...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tests.guest import cuda_on_cpu

    cuda_on_cpu.install()
    script = str(Path(__file__).with_name("pretrain_script.py"))
    kind, *flags = sys.argv[1:]
    if kind == "plain":
        sys.argv = [script, *flags]
        runpy.run_path(script, run_name="__main__")
    else:
        from copus_ext.megatron_lm.__main__ import main

        if kind != "copus":
            from tests.guest.moving import follow

            follow(kind.removeprefix("moving="))
        sys.exit(main([script, *flags]))
