"""`fp16_runs.py SPEC.json`: as faulty_runs.py, where DeepSpeed also takes fp16 on a CPU whose matrix library has none.

DeepSpeed 0.19.8 asks oneDNN and refuses ("Type fp16 is not supported on your device."); PyTorch itself computes in
fp16 on any CPU, slowly. Loss scale, overflow and skipped steps are DeepSpeed's own code either way.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.support import faulty_runs  # noqa: I001 (first: it settles what this rank may see)

from remat.launch import signals


def main(argv: list[str]) -> int:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    return faulty_runs.main(argv)


if __name__ == "__main__":
    sys.exit(signals.around(main, sys.argv[1:]))
