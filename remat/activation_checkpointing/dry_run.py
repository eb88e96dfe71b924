"""Try the decisions in one forward of the model without storage.

This shows what a mechanism cannot handle, and entries of an operation list that never run. The checks are those of the
run itself (`apply`). What depends on values (layers skipped at random) is left to the first micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.mechanisms import selective_ops, tiles
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision, Tiling
from remat.config.options import CheckpointingConfig, ConfigError

Around = Callable[[], AbstractContextManager[Any]]
TOKENS = 8
META = torch.device("meta")
# What is sliced in each layer: by model (which has no storage), then by the layers that are to be sliced. A search for
# settings asks hundreds of times.
LOOKED_AT: WeakKeyDictionary[Any, dict[tuple[int, ...], list[Tiling | None]]] = WeakKeyDictionary()
REMEDY = "use checkpointing=full checkpointing.reentrant=false"


def choose(
    model: Any,
    cfg: CheckpointingConfig,
    stacks: Sequence[int],
    *,
    zero_stage: int,
    around: Around = nullcontext,
    has_gpu: bool = True,
) -> tuple[list[LayerDecision], str]:
    """Decide for each layer of `model` (on the meta device). Returns also why the decisions are not the usual ones.

    `stacks`: how many layers each of its stacks has. `around` is entered around a forward, to answer questions of the
    model about values, which meta tensors lack. `has_gpu` false: check the operations that a CPU runs.

    Segments under ZeRO-3 are reentrant unless the options say otherwise or the reentrant variant cannot handle this
    model. Raises ConfigError when the model cannot run as asked.
    """
    decide = partial(policy.decide_layers, cfg, sum(stacks), zero_stage=zero_stage, stacks=stacks)
    decisions = decide()
    if any(decision.tiling is not None for decision in decisions):
        decisions = _find_tilings(model, decisions, around)
    if not has_gpu and selective_ops.lists_attention(cfg, decisions):
        problem, tried = _problem(model, decisions, cfg, around, selective_ops.find_missing_attention)
        if problem and tried:
            raise ConfigError(problem)
    if not any(d.reentrant or d.first != d.last for d in decisions):
        return decisions, ""
    problem, tried = _problem(model, decisions, cfg, around)
    if problem and cfg.reentrant is None and any(d.reentrant and d.first != d.last for d in decisions):
        others = decide(reentrant_segments=False)
        still, tried = _problem(model, others, cfg, around)
        if not (still and tried):
            return others, f"segments are not reentrant for this model: {problem}"
        problem = still
    if problem and tried:
        raise ConfigError(problem)
    return decisions, ""


def _find_tilings(model: Any, decisions: list[LayerDecision], around: Around) -> list[LayerDecision]:
    """Return `decisions` with the modules to slice in each layer, found once for each model. Raises ConfigError."""
    wanted = tuple(index for index, decision in enumerate(decisions) if decision.tiling is not None)
    known = LOOKED_AT.setdefault(model, {})
    if wanted not in known:
        known[wanted] = [decision.tiling for decision in _look_for_tilings(model, decisions, around)]
    return [
        replace(decision, tiling=replace(names, count=decision.tiling.count))
        if decision.tiling is not None and names is not None
        else decision
        for decision, names in zip(decisions, known[wanted], strict=True)
    ]


def _look_for_tilings(model: Any, decisions: list[LayerDecision], around: Around) -> list[LayerDecision]:
    tried = copy.deepcopy(model).to(torch.bfloat16).train()  # some kernels take nothing but 16 bits
    try:
        with torch.random.fork_rng(devices=[]), around(), torch.enable_grad():
            return tiles.find_tilings(tried, decisions, partial(_forward, tried))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{tiles.OPTION}: the model cannot be tried without its weights, to see what its MLPs are given "
            f"({type(error).__name__}: {str(error)[:200]}); {tiles.OFF}"
        ) from error


def _problem(
    model: Any,
    decisions: list[LayerDecision],
    cfg: CheckpointingConfig,
    around: Around,
    examine: Callable[[Sequence[LayerCounters]], str] = lambda _: "",
) -> tuple[str, bool]:
    """Try a forward. Returns why it is refused (empty: it is not), and whether it could be tried at all.

    `examine` tells what is wrong with the counts of a forward that went through.
    """
    was_training = model.training
    with ExitStack() as undo:
        undo.callback(model.train, was_training)
        undo.enter_context(torch.random.fork_rng(devices=[]))
        try:
            applied = apply.apply(model.train(), policy.without_engine(decisions), cfg, device=META)
            undo.callback(applied.remove)
            with around(), applied.micro_batch():
                _forward(model)
            return examine(applied.counts), True
        except ConfigError as error:
            return str(error), True
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:200]}"
            undo.close()
            if _runs(model.train(), around):
                return f"checkpointing: the model fails when its layers are treated so ({text}); {REMEDY}", True
            # A model that cannot run without values: the first micro-batch will tell.
            return f"it cannot be tried without weights ({text})", False


def _runs(model: Any, around: Around) -> bool:
    """Return whether the model runs without storage when no policy is applied."""
    try:
        with around():
            _forward(model)
    except Exception:
        return False
    return True


def _forward(model: Any) -> None:
    model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long, device=META), use_cache=False)
