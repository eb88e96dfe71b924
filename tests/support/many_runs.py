"""Run several configurations one after another in one launch: `deepspeed many_runs.py SPEC.json`.

Start-up costs 15 s a launch, a tiny run one: this is how a matrix of strategies stays affordable. The spec is
{"name": [override, ...]}; each run writes its own run directory, and rank 0 writes SPEC.done.json at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat.machine.start_up import hide_gpus_from_cpu_ranks, share_cores

share_cores()
hide_gpus_from_cpu_ranks()

from remat.config import compose  # noqa: E402
from remat.machine import distributed, ops  # noqa: E402
from remat.report import console  # noqa: E402
from remat.training import build, loop  # noqa: E402
from tests.support import recordings  # noqa: E402
from tests.support.pool import leave_groups  # noqa: E402


def main(spec_path: Path) -> None:
    ops.use_environment_folder()
    console.quiet_libraries(debug=False)
    recordings.share()
    done = {}
    for name, overrides in json.loads(spec_path.read_text()).items():
        composed = compose.compose_run(overrides)
        parts = build.build(composed)
        outcome = loop.train(parts)
        parts.engine.destroy()
        done[name] = {
            "folder": str(parts.folder),
            "finished": outcome.finished,
            "metrics": dict(outcome.metrics),
        }
        del parts, outcome
        leave_groups()
    if distributed.rank_from_env() == 0:
        spec_path.with_suffix(".done.json").write_text(json.dumps(done))
    distributed.shut_down()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
