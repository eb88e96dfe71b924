"""`stops_in_save.py FOLDER`: the runs of FOLDER/runs.json; rank 1 halts within the last save of the last run.

It has then written half of its file of that state; FOLDER/halted holds its pid, and it waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat.machine.start_up import hide_gpus_from_cpu_ranks, share_cores

share_cores()
hide_gpus_from_cpu_ranks()

from remat.config import compose  # noqa: E402
from remat.machine import ops  # noqa: E402
from remat.report import console  # noqa: E402
from remat.training import build, loop  # noqa: E402


def halt_in(engine: Any, state: str, folder: Path) -> None:
    original = engine.checkpoint_engine.save

    def save(content: Any, path: str) -> None:
        original(content, path)
        if state in path:
            os.truncate(path, Path(path).stat().st_size // 2)
            (folder / "part").write_text(str(os.getpid()))
            (folder / "part").rename(folder / "halted")
            signal.pause()

    engine.checkpoint_engine.save = save


def main(folder: Path) -> None:
    ops.use_environment_folder()
    console.quiet_libraries(debug=False)
    *whole, last = json.loads((folder / "runs.json").read_text())
    for words in [*whole, last]:
        composed = compose.compose_run(words)
        parts = build.build(composed)
        if words is last and os.environ["RANK"] == "1":
            halt_in(parts.engine, f"tmp-step-{composed.run.train.steps:06d}", folder)
        loop.train(parts)
        parts.engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
