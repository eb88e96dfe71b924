"""What scripts/demo.sh must know beforehand: `python scripts/demo_plan.py OVERRIDE...` prints GPUS STOP_AT RUN_DIR."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat.machine.start_up import hide_gpus_from_cpu_ranks  # noqa: E402


def main(overrides: list[str]) -> int:
    """Visible GPUs, the step half way, and the folder the run will have. A bad override is one message and exit 2."""
    hide_gpus_from_cpu_ranks()
    import torch

    from remat.config import compose
    from remat.config.options import ConfigError

    try:
        run = compose.compose_run(overrides).run
    except ConfigError as error:
        print(f"\nremat: {error}\n", file=sys.stderr)
        return 2
    if run.train.steps is None:
        print("\nscripts/demo.sh stops half way: give train.steps=N, not train.epochs alone\n", file=sys.stderr)
        return 2
    folder = Path(run.output_dir).expanduser() / run.name / str(run.run_id)
    print(torch.cuda.device_count(), run.train.steps // 2, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
