"""Choose what a run that ran out of memory goes on with.

`python -m remat.planning.settings.less_memory cuda|cpu WORDS`: WORDS are those of `remat plan` for a machine that is
smaller by what was missing. The overrides are printed as JSON, or null where nothing fits there. They train the same,
and a saved state of the run fits them: what shards the state stays. A process of its own, because a rank that ran out
has no room for a plan, and a killed one makes none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from remat.config import compose
from remat.config.options import Policy
from remat.planning import budget
from remat.planning.plan import GPU_MEMORY, Recordings, needed_bytes
from remat.planning.settings.search import Search, Setting

SHARDS_STATE = (
    "deepspeed.config"  # of the axes of planning/settings/choices.py, what a saved state does not fit
)
OPTION = "checkpointing.budget_gib"


def choose(args: Sequence[str], recordings: Recordings, *, on_gpu: bool) -> list[str] | None:
    """Return the overrides of the fastest setting that needs less, None where there is none. Raises ConfigError.

    A run with checkpointing=budget may stay one: its budget is then told, for its GPU is as large as it was.
    """
    cfg = compose.from_command_line(list(args)).run
    search = Search(args, cfg, recordings)
    found = search.fastest(1, pinned=[SHARDS_STATE])
    if cfg.checkpointing.policy is Policy.budget and cfg.checkpointing.budget_gib != "auto":
        smaller = search.plan([f"{OPTION}=auto"])
        found += [smaller] if smaller and smaller.planned.plan.fits else []
    if not found:
        return None
    best = min(found, key=lambda setting: setting.cost)
    overrides = [word for word in best.overrides if not word.startswith(OPTION)]
    return [*overrides, *_budget(best, on_gpu=on_gpu)] or None


def _budget(setting: Setting, *, on_gpu: bool) -> list[str]:
    planned = setting.planned
    if planned.cfg.checkpointing.policy is not Policy.budget:
        return []
    size = needed_bytes(planned, GPU_MEMORY) if on_gpu else planned.plan.peak_bytes
    return [f"{OPTION}={budget.gib_up(size)}"]


if __name__ == "__main__":
    print(json.dumps(choose(sys.argv[2:], Recordings(), on_gpu=sys.argv[1] == "cuda")))
