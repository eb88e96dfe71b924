"""Record micro-batches on meta tensors, each once. Plans that differ only in ZeRO's settings share a recording."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch

from remat.activation_checkpointing import apply
from remat.activation_checkpointing.policy import without_engine
from remat.config.options import ConfigError, RunConfig
from remat.model import loss, meta_kernels, packing
from remat.planning import strategy
from remat.planning.budget import Corners
from remat.planning.simulation import simulate

META = torch.device("meta")


class Recordings:
    """A cache of recorded micro-batches. Pass the same one to every `make_plan` of a search.

    `made` counts the recordings that were really made. `corners` are those of the layers that tables were chosen for.
    """

    def __init__(self) -> None:
        self.made = 0
        self.corners: Corners = {}
        self._found: dict[str, simulate.Recording] = {}

    def get(self, cfg: RunConfig, decided: strategy.Strategy, *, on_gpu: bool = True) -> simulate.Recording:
        """Return the recorded micro-batch of the run of `cfg`, from the cache if it is there.

        It does not depend on the machine, nor on ZeRO settings, except whether the stage is 3.
        """
        train = cfg.train
        depends_on = (
            (cfg.model, cfg.peft, cfg.checkpointing, decided.decisions, decided.zero_stage == 3, on_gpu),
            decided.packed,
            (train.precision, train.loss, train.micro_batch_size, train.seq_len, train.neftune_alpha > 0),
        )
        key = repr(depends_on)
        if key not in self._found:
            self._found[key] = _record(cfg, decided, on_gpu=on_gpu)
            self.made += 1
        return self._found[key]


def _record(cfg: RunConfig, decided: strategy.Strategy, *, on_gpu: bool) -> simulate.Recording:
    """Record one micro-batch of the real model on meta tensors, with the run's policies applied."""
    decisions = without_engine(decided.decisions)
    if decisions != decided.decisions and cfg.checkpointing.deepspeed.cpu_checkpointing:
        raise ConfigError(
            "checkpointing.deepspeed.cpu_checkpointing=true: remat plan does not count what DeepSpeed moves to the "
            "host; plan with checkpointing=offload, which moves the same"
        )
    net = strategy.meta_model(cfg)
    with ExitStack() as undo:
        applied = apply.apply(net, decisions, cfg.checkpointing, zero_stage=decided.zero_stage, device=META)
        undo.callback(applied.remove)
        recording = simulate.record(
            net,
            loss=loss.TokenLoss(
                net, cfg.train.loss, verify=False, cross_entropy=meta_kernels.cross_entropy if on_gpu else None
            ),
            scope=applied.scope,
            around=applied.micro_batch(),
            stage_3=decided.zero_stage == 3,
            micro_batch_size=cfg.train.micro_batch_size,
            seq_len=cfg.train.seq_len,
            given=packing.planned(decided.packed, cfg.model.attention, net),
            ignored=applied.offload.storages if applied.offload else tuple,
            workspaces=on_gpu,
            on_gpu=on_gpu,
        )
        return replace(recording, graphs=applied.graphs())
