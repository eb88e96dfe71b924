"""`reshard_runs.py [copies] SPEC.json`: as many_runs, and more is told of each run.

With `copies`, what a resumed engine holds is saved again before its first step, in FOLDER_OF_THE_RUN/loaded-R-STEP, R
being the number of ranks. SPEC.done.json has for each run the sample ids of its steps, the rows of its metrics, and of
stages what each rank holds (tests/support/stages.py). A run whose name ends in "stopped" gets a SIGTERM on its last
rank in its second step. With KILL_IN_RESHARD=N in the environment, rank 0 kills itself as it is about to read the Nth
tensor while it cuts a state.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat.machine.start_up import hide_gpus_from_cpu_ranks, share_cores

os.environ["OMP_NUM_THREADS"] = "1"  # a single rank too: two threads wait for each other on a busy machine
share_cores()
hide_gpus_from_cpu_ranks()

import cpuinfo  # noqa: E402

from remat.config import compose  # noqa: E402
from remat.launch import signals  # noqa: E402
from remat.machine import distributed, ops  # noqa: E402
from remat.report import console  # noqa: E402
from remat.saving import save  # noqa: E402
from remat.saving.state_files import SavedWeights  # noqa: E402
from remat.training import build, loop  # noqa: E402
from tests.support import recordings, stages, tiny  # noqa: E402
from tests.support.pool import leave_groups  # noqa: E402


def watch(batches: Any, ids: list[list[int]], stops: bool) -> None:
    """Note the sample ids of each step. If it `stops`, this rank gets a signal in its second step."""
    original = batches.next_step

    def next_step() -> Any:
        batch = original()
        ids.append(batch.sample_ids.tolist())
        if stops and len(ids) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    batches.next_step = next_step


def kill_at(number: int) -> None:
    original, count = SavedWeights.read, 0

    def read(self: SavedWeights, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    SavedWeights.read = read  # type: ignore[method-assign]


def main(argv: list[str]) -> int:
    spec_path = Path(argv[-1])
    recordings.share()
    ops.use_environment_folder()
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    console.quiet_libraries(debug=False)
    if number := os.environ.get("KILL_IN_RESHARD"):
        kill_at(int(number))
    done = {}
    for name, overrides in json.loads(spec_path.read_text()).items():
        composed = compose.compose_run(overrides)
        parts = build.build(composed)
        if parts.resumed and "copies" in argv:
            step = parts.resumed.progress.step
            folder = parts.folder / f"loaded-{parts.world.size}-{step}"
            save.save(parts.engine, folder, step=step, client_state={}, keep=1)
        ids: list[list[int]] = []
        is_last = parts.world.rank == parts.world.size - 1
        watch(parts.batches, ids, name.endswith("stopped") and is_last)
        held = [] if parts.pipeline is None else stages.count_held(parts.pipeline)
        loop.train(parts)
        parts.engine.destroy()
        done[name] = {"ids": ids, "rows": tiny.rows(parts.folder), "held": distributed.gather(held)}
        del parts
        leave_groups()
    if distributed.rank_from_env() == 0:
        spec_path.with_suffix(".done.json").write_text(json.dumps(done))
    distributed.shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(signals.around(main, sys.argv[1:]))
