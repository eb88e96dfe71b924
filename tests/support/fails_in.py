"""`deepspeed fails_in.py WHICH WORDS`: a real run in which rank 1 asks for more memory than there is.

WHICH says in which call of an MLP of the model it does. The allocation is torch's own and fails for real. `backward N`
raises the error of a GPU's allocator in the backward of that call, `update N` in the optimizer's Nth step. With
`unadvised N` it is the call, and the search for advice, which takes half a minute, has no time.
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


def ask_without_advice(which: int) -> None:
    from remat.training import out_of_memory

    out_of_memory.ADVICE_S = 0
    ask_in_mlp(which)


def run_out(*_: Any) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def run_out_in_backward(which: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward, calls = LlamaMLP.forward, 0

    def followed(self: Any, rows: Any) -> Any:
        nonlocal calls
        found = forward(self, rows)
        calls += self.training and not rows.is_meta
        if calls == which and found.requires_grad:
            found.register_hook(run_out)
        return found

    LlamaMLP.forward = followed


def run_out_in_update(which: int) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    step, calls = DeepSpeedEngine._take_model_step, 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == which:
            run_out()
        return step(self, *args, **kwargs)

    DeepSpeedEngine._take_model_step = counted


def main(argv: list[str]) -> int:
    from remat.config.command_line import without_local_rank

    which, *words = without_local_rank(argv)
    if os.environ.get("RANK") == "1":
        hide_gpus_from_cpu_ranks()
        where, _, count = which.rpartition(" ")
        {
            "": ask_in_mlp,
            "unadvised": ask_without_advice,
            "backward": run_out_in_backward,
            "update": run_out_in_update,
        }[where](int(count))
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
