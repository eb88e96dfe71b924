"""Choose the settings with which a run that ran out of memory continues.

`python -m remat.planning.settings.less_memory cuda|cpu WORDS`: WORDS are the arguments of `remat plan`, for a machine
that is smaller by the memory that was missing. It prints the overrides as JSON, or null if nothing fits there. They
train the same and leave the sharding as it is, so that a saved state of the run can be loaded. This is a process of its
own, because a rank that ran out of memory has no room for a plan, and a killed rank makes none.
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

SHARDS_STATE = "deepspeed.config"  # the axis of planning/settings/choices.py that a saved state depends on
OPTION = "checkpointing.budget_gib"


def choose(args: Sequence[str], recordings: Recordings, *, on_gpu: bool) -> list[str] | None:
    """Return the overrides of the fastest setting that needs less memory, None if there is none. Raises ConfigError.

    With checkpointing=budget the overrides include the budget in GiB: `auto` would use all of the real GPU.
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
