"""Compare the ways to shard the model states of a run on several nodes: ZeRO-1, 2, 3, or 3 with hpZ.

The ways differ in network traffic. Each is an estimate (settings/screening.py) that changes only sharding and offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remat.config import ds_config
from remat.config.options import ConfigError, RunConfig
from remat.planning.plan import Planned, Recordings
from remat.planning.settings import choices, search
from remat.planning.settings.screening import NO_ACTIVATIONS, Screen
from remat.planning.settings.search import Setting


@dataclass(frozen=True)
class Way:
    """One way to shard. `setting` has the fastest offload that fits; if none fits, the one that lacks least memory.

    `is_taken`: this is the fastest of all ways that fit.
    """

    name: str
    setting: Setting
    is_taken: bool = False

    @property
    def is_timed(self) -> bool:
        """Return whether the seconds of a step are known."""
        planned = self.setting.planned
        return planned.simulation is not NO_ACTIVATIONS and not planned.time.unknown


def compare(cfg: RunConfig, recordings: Recordings) -> list[Way]:
    """Return the ways to shard a run, the least sharded first.

    The list is empty on one node, if the speed or memory of the machine is not known, and with pipeline stages.
    """
    if cfg.hardware.num_nodes == 1 or cfg.train.pipeline_parallel_size > 1 or search.explain_no_search(cfg):
        return []
    screen, by_name = Screen(recordings), dict[str, list[Setting]]()
    for option in choices.strategies(cfg):
        try:
            found = screen.estimate(option.apply(cfg) if option else cfg)
        except ConfigError:
            continue
        words = list(option.words) if option else []
        by_name.setdefault(_name(found), []).append(Setting(words, found))
    best = {name: min(settings, key=_order) for name, settings in sorted(by_name.items())}
    fitting = [setting for setting in best.values() if setting.planned.plan.fits]
    taken = min(fitting, key=_order, default=None)
    return [Way(name, setting, setting is taken) for name, setting in best.items()]


def _name(planned: Planned) -> str:
    name = f"ZeRO-{planned.strategy.zero_stage}"
    return f"{name} with hpZ" if ds_config.second_shard_ranks(planned.strategy.ds) > 1 else name


def _order(setting: Setting) -> tuple[float, ...]:
    planned = setting.planned
    if not planned.plan.fits:
        return (True, search.excess(planned))
    return (False, *search.rank(planned, len(setting.overrides)))


def as_json(ways: Sequence[Way]) -> list[dict[str, Any]]:
    """Return a record for each way: `sharding`, `taken`, `traffic_bytes`, and the keys of `search.setting_as_json`."""
    return [
        {
            "sharding": way.name,
            "taken": way.is_taken,
            "traffic_bytes": way.setting.planned.time.traffic_bytes,
            **search.setting_as_json(way.setting),
        }
        for way in ways
    ]
