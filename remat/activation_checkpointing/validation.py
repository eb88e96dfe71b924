"""What cannot work, known before a weight is read: one problem per entry, with option, value and remedy."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from remat.activation_checkpointing import policy
from remat.activation_checkpointing.mechanisms import (
    deepspeed,
    discard_output,
    selective_ops,
)
from remat.config.options import Attention, CheckpointingConfig, ConfigError, Policy, StorageDtype
from remat.model import layers as layers_
from remat.model.layers import Modules, find_linears, find_modules

NEEDS_NON_REENTRANT = {Policy.selective_ops, Policy.selective_modules, Policy.discard_output}
EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")
KEEP_INPUTS_ONLY = {Policy.full, Policy.uniform, Policy.sqrt}
NO_ATTENTION_OPERATION = {
    Attention.eager: "has no fused attention operation",
    Attention.flex_attention: "is compiled by transformers into a kernel that is no operation",
}
NO_LAYERDROP = "set it to 0 (model.architecture, or config.json in the model's folder)"
RANDOM_FIELDS = (
    "drop",
    "jitter_noise",
)  # of a transformers config: what draws random numbers in a layer


@dataclass(frozen=True)
class Setting:
    """What a policy has to live with. `fields` is the transformers config as plain data."""

    zero_stage: int
    tensor_parallel_size: int
    has_gpu: bool
    attention: Attention
    lora_dropout: float
    fields: Mapping[str, Any]
    activation_elements: int  # of one layer's input: micro-batch x sequence x hidden
    element_bytes: int
    stacks: Sequence[int] = ()  # layers of each stack of the model, where there are several
    layerdrop: str = ""  # the field by which the model skips layers at random, with its value


def problems(cfg: CheckpointingConfig, layers: list[nn.Module], setting: Setting) -> list[str]:
    """Why `cfg` cannot work on a model with these decoder layers (of any device, also meta)."""
    found = policy.range_problems(cfg, len(layers))
    asked = policy.policies(cfg)
    found += _variants(cfg, asked, setting)
    found += _offload(cfg, asked, len(layers), setting)
    found += _sizes(cfg, asked, len(layers), max(setting.stacks, default=len(layers)))
    if asked & {Policy.uniform, Policy.sqrt} and _returns_tuple(layers[0]):
        found.append(
            f"checkpointing={cfg.policy}: {type(layers[0]).__name__} returns a tuple, so its layers cannot be "
            "recomputed in segments; use checkpointing=full, interval or block"
        )
    if asked & {Policy.uniform, Policy.sqrt} and setting.layerdrop:
        found.append(
            f"checkpointing={cfg.policy}: {_skips(setting.layerdrop)}, and a segment runs all its layers or none; "
            f"{NO_LAYERDROP}, or use checkpointing=full"
        )
    if Policy.selective_ops in asked:
        found += selective_ops.problems(cfg.selective_ops)
        if setting.attention in NO_ATTENTION_OPERATION and "attention" in cfg.selective_ops.save:
            found.append(
                f"checkpointing.selective_ops.save keeps attention, but model.attention={setting.attention} "
                f"{NO_ATTENTION_OPERATION[setting.attention]}: use model.attention=sdpa, or leave attention off the "
                "list and add matmul or save_linears"
            )
    if Policy.deepspeed in asked:
        found += deepspeed.problems(
            cfg,
            zero_stage=setting.zero_stage,
            tensor_parallel_size=setting.tensor_parallel_size,
            has_gpu=setting.has_gpu,
            num_calls=_deepspeed_calls(cfg, len(layers)),
            activation_elements=setting.activation_elements,
        )
    if Policy.discard_output in asked:
        found += discard_output.problems(cfg.discard_modules)
        if "norm" in cfg.discard_modules:
            found += _jitter(
                setting,
                [module for layer in layers for module in layer.modules()],
                f"checkpointing.discard_modules={cfg.discard_modules}",
                "edits the norm's output in place, which then cannot be made again",
                "leave norm off the list",
            )
    return found or _roles(cfg, layers) or _edited_inputs(cfg, asked, layers, setting)


def skipped_layers(layerdrop: str, *, world_size: int) -> list[str]:
    """Why layers that are skipped at random cannot be trained on several ranks, whatever the policy."""
    if not layerdrop or world_size == 1:
        return []
    return [
        f"{_skips(layerdrop)}, each of the {world_size} ranks others: their gradients and gathers would not match, and "
        f"the run would hang or abort; {NO_LAYERDROP}, or train on one rank"
    ]


def _skips(layerdrop: str) -> str:
    return f"{layerdrop} of the model's configuration skips layers at random"


def _roles(cfg: CheckpointingConfig, layers: list[nn.Module]) -> list[str]:
    """Layers of one model may differ (dense and sparse ones): each is asked for what its own policy needs."""
    decisions = policy.plan(cfg, len(layers))
    texts = [missing_parts(layer, cfg, {d.policy}) for layer, d in zip(layers, decisions, strict=True)]
    by_text: dict[str, list[int]] = {}
    for index, several in enumerate(texts):
        for text in several:
            by_text.setdefault(text, []).append(index)
    return [f"{text} (layers {policy.spans(indices)})" for text, indices in by_text.items()]


def _edited_inputs(
    cfg: CheckpointingConfig, asked: set[Policy], layers: list[nn.Module], setting: Setting
) -> list[str]:
    if Policy.selective_modules not in asked:
        return []
    decisions = policy.plan(cfg, len(layers))
    found = []
    for role in cfg.recompute_modules:
        modules = [
            module
            for layer, decision in zip(layers, decisions, strict=True)
            if decision.policy is Policy.selective_modules
            for _, module in layers_.find_modules(layer, role)
        ]
        found += _jitter(
            setting,
            modules,
            f"checkpointing.recompute_modules={cfg.recompute_modules}",
            f"edits the input of {role} in place, so it cannot run again on what it was given",
            f"leave {role} off the list",
        )
    return found


def _jitter(setting: Setting, modules: list[nn.Module], option: str, effect: str, remedy: str) -> list[str]:
    """Sparse blocks multiply their input with noise where it lies, if a field of the config says so."""
    found = next(((type(m).__name__, noise) for m in modules if (noise := layers_.input_noise(m))), None)
    if found is None:
        return []
    name, noise = found
    field = next((field for field in setting.fields if field.endswith(noise)), noise)
    return [
        f"{option}: {field}={setting.fields.get(field)} {effect} ({name}); set model.architecture.{field}=0, {remedy}, "
        "or use checkpointing=full"
    ]


def _deepspeed_calls(cfg: CheckpointingConfig, num_layers: int) -> int:
    if policy.range_problems(cfg, num_layers):
        return num_layers
    return sum(d.policy is Policy.deepspeed for d in policy.plan(cfg, num_layers))


def _sizes(cfg: CheckpointingConfig, asked: set[Policy], num_layers: int, largest_stack: int) -> list[str]:
    where = "the model has" if largest_stack == num_layers else "its longest stack of layers has"
    given = {
        Policy.interval: ("interval", cfg.interval, f"the model has {num_layers}", num_layers),
        Policy.uniform: ("segment_layers", cfg.segment_layers, f"{where} {largest_stack}", largest_stack),
        Policy.block: ("block_layers", cfg.block_layers, f"the model has {num_layers}", num_layers),
    }
    return [
        f"checkpointing.{name}={value}: {has} layers; give at most that"
        for kind, (name, value, has, most) in given.items()
        if kind in asked and value > most
    ]


def _variants(cfg: CheckpointingConfig, asked: set[Policy], setting: Setting) -> list[str]:
    found = []
    if cfg.reentrant and asked & NEEDS_NON_REENTRANT:
        names = ", ".join(sorted(asked & NEEDS_NON_REENTRANT))
        found.append(f"checkpointing.reentrant=true: {names} needs the non-reentrant variant; leave it out")
    stops_early = bool(asked - {Policy.none, Policy.deepspeed, Policy.discard_output}) and not cfg.reentrant
    if not cfg.early_stop and stops_early and setting.zero_stage == 3:
        found.append(
            "checkpointing.early_stop=false under ZeRO-3: the recomputation would release weights that backward "
            "is about to use; leave it true"
        )
    random = _random_fields(setting)
    if not cfg.preserve_rng_state and random and asked != {Policy.none}:
        found.append(
            f"checkpointing.preserve_rng_state=false with {', '.join(random)}: a recomputation would draw other random "
            "numbers than the forward and give wrong gradients; leave it true"
        )
    return found


def _random_fields(setting: Setting) -> list[str]:
    drawn = [
        f"{name}={value}"
        for name, value in sorted(setting.fields.items())
        if any(part in name for part in RANDOM_FIELDS) and isinstance(value, (int, float)) and value > 0
    ]
    return drawn + ([f"peft.dropout={setting.lora_dropout}"] if setting.lora_dropout else [])


def _offload(cfg: CheckpointingConfig, asked: set[Policy], num_layers: int, setting: Setting) -> list[str]:
    if not cfg.offload.enabled:
        if cfg.offload.dtype is StorageDtype.same:
            return []
        return [
            f"checkpointing.offload.dtype={cfg.offload.dtype} has no effect without checkpointing.offload.enabled=true"
        ]
    found = []
    if Policy.deepspeed in asked:
        found.append(
            "checkpointing.offload.enabled=true with checkpointing=deepspeed: it has its own, "
            "checkpointing.deepspeed.cpu_checkpointing; use one of the two"
        )
    if cfg.offload.dtype is not StorageDtype.same and Policy.selective_ops in asked:
        found.append(
            f"checkpointing.offload.dtype={cfg.offload.dtype} with checkpointing=selective_ops: kept results stay "
            "exact, so it would only touch the layer's input; set it to same"
        )
    if cfg.offload.keep_last_layers >= num_layers:
        found.append(
            f"checkpointing.offload.keep_last_layers={cfg.offload.keep_last_layers} keeps all {num_layers} layers "
            "on the device: lower it"
        )
    experts = [name for name in EXPERT_FIELDS if setting.fields.get(name)]
    if experts and cfg.offload.dtype is not StorageDtype.same:
        found.append(
            f"checkpointing.offload.dtype={cfg.offload.dtype} with {experts[0]}={setting.fields[experts[0]]}: a router "
            "that runs again on rounded inputs may choose other experts than in forward; leave dtype=same"
        )
    size = setting.activation_elements * setting.element_bytes
    if asked <= KEEP_INPUTS_ONLY and size < cfg.offload.min_bytes:
        found.append(
            f"checkpointing.offload.min_bytes={cfg.offload.min_bytes}: all that checkpointing={cfg.policy} keeps of a "
            f"layer is its input of {size} bytes, so nothing would be moved; give at most {size}"
        )
    return found


def _returns_tuple(layer: nn.Module) -> bool:
    """Read from the source; what hides from it is found in the first forward."""
    try:
        source = inspect.getsource(inspect.unwrap(type(layer).forward))
    except (OSError, TypeError):
        return False
    returned = [n.value for n in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(n, ast.Return)]
    return any(isinstance(value, ast.Tuple) for value in returned)


def missing_parts(layer: nn.Module, cfg: CheckpointingConfig, policies: set[Policy]) -> list[str]:
    """What `layer` lacks of what these policies ask for; no weight is read. Each names option and remedy."""
    asked: list[tuple[Callable[..., Modules], str, str]] = []
    if Policy.selective_modules in policies:
        asked += [(find_modules, role, "checkpointing.recompute_modules") for role in cfg.recompute_modules]
        if not cfg.recompute_modules:
            return ["checkpointing.recompute_modules=[]: name at least one role, or use checkpointing=none"]
    if Policy.discard_output in policies:
        asked += [(find_modules, role, "checkpointing.discard_modules") for role in cfg.discard_modules]
    if Policy.selective_ops in policies:
        option = "checkpointing.selective_ops.save_linears"
        asked += [(find_linears, name, option) for name in cfg.selective_ops.save_linears]
    found = []
    for search, name, option in asked:
        try:
            search(layer, name, option)
        except ConfigError as error:
            found.append(str(error))
    return found
