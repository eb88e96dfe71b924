"""Train: `deepspeed train.py recipe=NAME [option=value ...]`. Also runs under torchrun and as a single process.

The same as `deepspeed --module remat.train`, from any folder, where remat is installed.
"""

import sys

from remat import train
from remat.launch import signals

if __name__ == "__main__":
    sys.exit(signals.around(train.main, sys.argv[1:]))
