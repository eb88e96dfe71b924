"""`small_files.py RANK BYTES WORDS`: train.py in which one rank may write no file above BYTES, as on a full disk."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat import train
from remat.config.command_line import without_local_rank


def main(argv: list[str]) -> int:
    rank, size, *words = without_local_rank(argv)
    if os.environ["RANK"] == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
