"""`limited.py WORDS`: train.py in which each rank may hold little more memory than it does before its first step.

The limit is the system's own: the mean of what keeping all activations and `full` need, by the plan. It is RLIMIT_DATA,
which makes an allocation fail; or, where GROUP names a control group of both ranks, that group's, and the kernel kills.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat import train
from remat.config.command_line import without_local_rank
from remat.machine.start_up import hide_gpus_from_cpu_ranks

GROUP = "REMAT_TEST_MEMORY_GROUP"  # a folder of /sys/fs/cgroup, of version 1 or 2
LIMIT, USED = ("memory.limit_in_bytes", "memory.max"), ("memory.usage_in_bytes", "memory.current")


def limit_group(folder: Path, room: int) -> None:
    """Let the ranks of `folder` hold `room` bytes more, together, than now, and none of it on a disk."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        used = int(one_of(folder, USED).read_text())
        one_of(folder, LIMIT).write_text(str(used + room))
    dist.barrier()


def one_of(folder: Path, names: tuple[str, str]) -> Path:
    return next(folder / name for name in names if (folder / name).exists())


def room_bytes(words: list[str]) -> int:
    from remat.config import compose
    from remat.planning.plan import make_plan

    def peak_bytes(policy: str) -> int:
        cfg = compose.compose_run([*words, f"checkpointing={policy}"]).run
        return make_plan(cfg, world_size=2, on_gpu=False).plan.peak_bytes

    return (peak_bytes("none") + peak_bytes("full")) // 2


def main(words: list[str]) -> int:
    hide_gpus_from_cpu_ranks()
    room = room_bytes(words)
    from remat.training import loop

    start = loop.start

    def start_limited(run: Any) -> Any:
        if group := os.environ.get(GROUP):
            limit_group(Path(group), 2 * room)
            return start(run)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        now = 1024 * int(status["VmData"].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, (now + room, resource.RLIM_INFINITY))
        return start(run)

    loop.start = start_limited
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(without_local_rank(sys.argv[1:])))
