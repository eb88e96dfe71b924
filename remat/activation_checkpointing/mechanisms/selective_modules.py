"""Recompute parts of a layer: modules by role, and the inner function of attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from remat.activation_checkpointing.mechanisms.arguments import Replayable, tell_of_gradient
from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied, Scope, one_run
from remat.activation_checkpointing.mechanisms.mechanism import (
    SLACK_BYTES,
    LayerForward,
    Listed,
    Mechanism,
    Need,
    Observed,
    Setting,
    Site,
    Treated,
    find_idle_entries,
    run_as_it_is,
    spans,
)
from remat.activation_checkpointing.mechanisms.recompute import Recompute, lift, skip_last_matmul
from remat.config.options import CheckpointingConfig
from remat.config.units import MIB
from remat.model import layers

OPTION = "checkpointing.recompute_modules"
Region = Callable[..., Any]


def _treat(site: Site) -> LayerForward:
    """Make each module with one of the roles run again in backward on its inputs; of nested modules the outer one.

    Raises ConfigError when a role is missing.
    """
    found = {role: layers.find_modules(site.layer, role) for role in site.setup.cfg.recompute_modules}
    core = found.get(layers.CORE_ATTENTION, [])
    whole = layers.outermost(
        [one for role, several in found.items() if role != layers.CORE_ATTENTION for one in several]
    )
    cleanup = site.setup.cleanup
    for name, module in whole:
        in_it = [role for role, several in found.items() if _any_inside(several, name)]
        cleanup.enter_context(wrap_forward(module, _region_of(site, module, name, in_it)))
    for name, module in core:
        if not any(_any_inside([(name, module)], outer) for outer, _ in whole):
            region = _region_of(site, nn.Module(), name, [layers.CORE_ATTENTION])  # no Linear inside
            cleanup.callback(_wrap_core_attention(module, region))
    return run_as_it_is


def _region_of(site: Site, module: nn.Module, name: str, in_it: list[str]) -> Callable[[Region, Any, Any], Any]:
    """Return a function that recomputes `module`. `in_it`: the roles that are recomputed with it."""
    recompute = skip_last_matmul(site, module, Recompute(site.setup.cfg))
    attends = bool({layers.CORE_ATTENTION, "attention"} & set(in_it))
    counts, scope = site.counts, site.setup.scope

    def region(fn: Region, args: Any, kwargs: Any) -> Any:
        expected = counts.expected
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        output = _run(site, recompute, _watched(fn, scope, attends), args, kwargs)
        if versions != [tensor._version for tensor in tensors]:
            raise PolicyNotApplied(
                f"checkpointing.recompute_modules: in layer {site.index} {name} edits its input in place (a sparse "
                "block with jitter does), so it cannot run again on what it was given; leave "
                f"{' and '.join(in_it)} off the list or use checkpointing=full"
            )
        for role in in_it if counts.expected > expected else ():
            counts.takes_effect(role)
        return output

    return region


def _any_inside(found: layers.Modules, outer: str) -> bool:
    return any(name == outer or name.startswith(f"{outer}.") for name, _ in found)


def _watched(fn: Region, scope: Scope, attends: bool) -> Region:
    """Make the first run of `fn` tell which of its results may be kept: all, but not the weights of attention."""
    if scope.handed_out is None:
        return fn
    first = True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if not first:
            return fn(*args, **kwargs)
        first = False
        with scope.inside_region():
            output = fn(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if scope.handed_out is not None:
            scope.handed_out(results[:1] if attends else results)
        return output

    return call


def _run(site: Site, recompute: Recompute, fn: Region, args: Any, kwargs: Any) -> Any:
    """Run `fn(*args, **kwargs)` as one recomputed region.

    Every tensor becomes a positional argument of the region: only those pass the saved-tensor hooks around the layer.
    """
    index, counts, scope = site.index, site.counts, site.setup.scope
    if scope.keeping or not torch.is_grad_enabled():
        return fn(*args, **kwargs)

    def around(earlier: int, _: Any) -> AbstractContextManager[None]:
        return one_run(index, counts, scope, earlier)

    run, tensors = lift(Replayable(partial(fn, **kwargs), around), args)
    output = recompute(run, *tensors)
    counts.expected += tell_of_gradient(output, counts.is_reached)
    return output


def wrap_forward(module: nn.Module, region: Callable[[Region, Any, Any], Any]) -> AbstractContextManager[Any]:
    """Return a context in which the instance's `forward` is wrapped: hooks stay outside, names and classes the same."""
    forward = module.forward
    return mock.patch.object(module, "forward", lambda *args, **kwargs: region(forward, args, kwargs))


def _wrap_core_attention(attention: Any, region: Callable[[Region, Any, Any], Any]) -> Callable[[], None]:
    """Give this one module a copy of its config whose attention is a registered wrapper around the real one.

    Masks are made from the model's config, which is not touched. What the module itself asks of the name (eager or
    not, flash or not) must get the true answer, and so must the real function: it runs with the original config.
    """
    config = attention.config
    name = layers.KernelName(config._attn_implementation)
    own_file = inspect.unwrap(type(attention).forward).__globals__
    registry = own_file["ALL_ATTENTION_FUNCTIONS"]  # some models have one of their own
    interface = registry.get_interface(config._attn_implementation, own_file.get("eager_attention_forward"))

    def original(module: Any, *args: Any, **kwargs: Any) -> Any:
        copied, module.config = module.config, config
        try:
            return interface(module, *args, **kwargs)
        finally:
            module.config = copied

    def wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
        return region(partial(original, module), args, kwargs)

    registry[name] = wrapped
    attention.config = layers.with_kernel(config, name)

    def undo() -> None:
        attention.config = config
        del registry[name]

    return undo


def refuse_input_noise(
    setting: Setting, modules: list[nn.Module], option: str, effect: str, remedy: str
) -> list[str]:
    """Refuse sparse blocks that multiply their input by noise in place, as a field of the config says."""
    found = next(((type(m).__name__, noise) for m in modules if (noise := layers.input_noise(m))), None)
    if found is None:
        return []
    name, noise = found
    field = next((field for field in setting.fields if field.endswith(noise)), noise)
    return [
        f"{option}: {field}={setting.fields.get(field)} {effect} ({name}); set model.architecture.{field}=0, {remedy}, "
        "or use checkpointing=full"
    ]


def _refuse(cfg: CheckpointingConfig, treated: Treated, setting: Setting) -> list[str]:
    if not cfg.recompute_modules:
        return [f"{OPTION}=[]: name at least one role, or use checkpointing=none"]
    found = []
    for role in cfg.recompute_modules:
        search = layers.ROLES.get(role, lambda _: [])
        found += refuse_input_noise(
            setting,
            [module for _, layer in treated for _, module in search(layer)],
            f"{OPTION}={cfg.recompute_modules}",
            f"edits the input of {role} in place, so it cannot run again on what it was given",
            f"leave {role} off the list",
        )
    return found


def _needs(cfg: CheckpointingConfig) -> list[Need]:
    return [partial(layers.find_modules, role=role) for role in cfg.recompute_modules]


def _unmet(cfg: CheckpointingConfig, observed: Observed) -> list[str]:
    otherwise = "no module with this role ran with a gradient, so nothing of it is recomputed"
    return find_idle_entries([Listed(OPTION, cfg.recompute_modules, otherwise)], observed) + _find_kept_inside(
        observed
    )


def _find_kept_inside(observed: Observed) -> list[str]:
    """Find layers that keep intermediate values of a recomputed module, attention weights included."""
    wrong = [
        index
        for index, layer in observed.items()
        if layer.region_kept_bytes > min(SLACK_BYTES, layer.region_bytes // 64)
    ]
    if not wrong:
        return []
    kept = observed[wrong[0]].region_kept_bytes
    return [
        f"{OPTION} is not in effect in layers {spans(wrong)}: layer {wrong[0]} keeps {kept / MIB:.4g} MiB that its "
        "recomputed modules made and should let go of; something else holds them (output_attentions, "
        "output_hidden_states, a hook)"
    ]


MECHANISM = Mechanism("selective_modules", _treat, refuse=_refuse, needs=_needs, unmet=_unmet, stops_early=True)
