"""`deepspeed fails_in.py WHICH WORDS`: a real run in which rank 1 asks for more memory than there is.

WHICH says in which call of an MLP of the model it does. The allocation is torch's own and fails for real.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat import train
from remat.machine.start_up import hide_gpus_from_cpu_ranks


def ask_in_mlp(which: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward, calls = LlamaMLP.forward, 0

    def asking(self: Any, rows: Any) -> Any:
        nonlocal calls
        calls += self.training and not rows.is_meta  # not in the small copy that packing tries
        if calls == which:
            rows.new_empty(1 << 50)
        return forward(self, rows)

    LlamaMLP.forward = asking


def main(argv: list[str]) -> int:
    from remat.config.command_line import without_local_rank

    which, *words = without_local_rank(argv)
    if os.environ.get("RANK") == "1":
        hide_gpus_from_cpu_ranks()
        ask_in_mlp(int(which))
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
