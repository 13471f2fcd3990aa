"""Pre-trains a GPT with Megatron-LM's flags; `copus pretrain` where the package is installed.

torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 8 --hidden-size 256 ... --data-path
my_text_document
"""

import sys

from copus_ext.commands.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
