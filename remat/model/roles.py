"""Parts of a decoder layer by what they do, whatever a model calls them. Works on meta tensors."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from remat.config.options import CheckpointingConfig, ConfigError, Policy

Found = list[tuple[str, nn.Module]]

CORE_ATTENTION = "core_attention"
ATTENTION_NAMES = {"self_attn", "attn", "attention", "self_attention", "linear_attn"}
MLP_NAMES = {"mlp", "feed_forward", "block_sparse_moe", "ffn", "moe"}
SHARED_EXPERTS_NAMES = {"shared_expert", "shared_experts", "shared_mlp"}
ROUTER_NAMES = {"gate", "router"}
ACTIVATION_NAMES = {"act", "act_fn", "activation", "activation_fn", "gelu_impl"}
ACTIVATION_FILES = {"transformers.activations", "torch.nn.modules.activation"}
NO_ACTIVATIONS = {"MultiheadAttention", "Softmax", "LogSoftmax", "Softmin", "Softmax2d"}

QKV = {"c_attn", "qkv_proj", "query_key_value", "qkv", "Wqkv", "att_proj"}  # one Linear for all three
MLA_KV = {"kv_a_proj_with_mqa", "kv_b_proj"}  # latent attention: down to the latent, and up again
ATTENTION_LINEARS = {
    "q": {"q_proj", "q_a_proj", "q_b_proj", "wq", "query", *QKV},
    "k": {"k_proj", "wk", "key", *MLA_KV, *QKV},
    "v": {"v_proj", "wv", "value", *MLA_KV, *QKV},
    "o": {"o_proj", "out_proj", "c_proj", "dense", "wo"},
}
MLP_LINEARS = {
    "gate": {"gate_proj", "gate_up_proj", "w1"},
    "up": {"up_proj", "gate_up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "w3"},
    "down": {"down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2"},
}
LINEARS = [*ATTENTION_LINEARS, *MLP_LINEARS]
ALL_BUT_DOWN = "all_but_down"  # no product runs twice: nothing needs the result of the layer's last one


def find(layer: nn.Module, role: str, option: str = "checkpointing.recompute_modules") -> Found:
    """(name inside the layer, module) of every module with `role`; for core_attention the modules that compute it.

    Raises ConfigError, naming `option`, when the layer has none or the role does not exist.
    """
    if role not in ROLES:
        raise ConfigError(f"{option}: {role} is no role; choose from {', '.join(ROLES)}")
    found = ROLES[role](layer)
    if not found:
        raise ConfigError(
            f"{option}: {type(layer).__name__} has no {role}; it has {_inventory(layer)}{LEAVE_OUT}"
        )
    if role == CORE_ATTENTION:
        reasons = [reason for _, module in found if (reason := core_attention_problem(module))]
        if reasons:
            raise ConfigError(f"{option}: core_attention is not possible here: {reasons[0]}; use attention")
    return found


def linears(layer: nn.Module, name: str, option: str = "checkpointing.selective_ops.save_linears") -> Found:
    """The Linear (or Conv1D) modules that are `name`: q k v o gate up down, all_but_down, a leaf name, or a path.

    A fused Linear is each of its parts. Under LoRA it is the frozen base that is meant. Raises ConfigError.
    """
    named = list(_linears(layer))
    if name == ALL_BUT_DOWN:
        found = [(path, module) for path, module in named if _linear_roles(path) != {"down"}]
    elif name in LINEARS:
        found = [(path, module) for path, module in named if name in _linear_roles(path)]
    else:
        found = [
            (path, module) for path, module in named if name in (_plain(path), _plain(path).rpartition(".")[2])
        ]
    if not found:
        there = ", ".join(_plain(path) for path, _ in named) or "none"
        have = [role for role in LINEARS if any(role in _linear_roles(path) for path, _ in named)]
        raise ConfigError(
            f"{option}: {type(layer).__name__} has no Linear {name}; its Linears are {there}"
            f"{' (' + ' '.join(have) + ')' if have else ''}{LEAVE_OUT}"
        )
    return found


def outermost(found: Found) -> Found:
    """Without modules inside another one of the list, and without doubles; in the layer's order of names."""
    names = {name for name, _ in found}
    inside = {name for name in names if any(name.startswith(other + ".") for other in names)}
    return list({name: (name, module) for name, module in found if name not in inside}.values())


def problems(layer: nn.Module, cfg: CheckpointingConfig, policies: set[Policy]) -> list[str]:
    """What `layer` lacks of what these policies ask for; no weight is read. Each names option and remedy."""
    asked: list[tuple[Callable[..., Found], str, str]] = []
    if Policy.selective_modules in policies:
        asked += [(find, role, "checkpointing.recompute_modules") for role in cfg.recompute_modules]
        if not cfg.recompute_modules:
            return ["checkpointing.recompute_modules=[]: name at least one role, or use checkpointing=none"]
    if Policy.discard_output in policies:
        asked += [(find, role, "checkpointing.discard_modules") for role in cfg.discard_modules]
    if Policy.selective_ops in policies:
        option = "checkpointing.selective_ops.save_linears"
        asked += [(linears, name, option) for name in cfg.selective_ops.save_linears]
    found = []
    for search, name, option in asked:
        try:
            search(layer, name, option)
        except ConfigError as error:
            found.append(str(error))
    return found


def core_attention_problem(attention: nn.Module) -> str | None:
    """Why the inner function of this attention module cannot be wrapped; None when it can."""
    forward = inspect.unwrap(type(attention).forward)
    name = type(attention).__name__
    if "ALL_ATTENTION_FUNCTIONS" not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return f"{name} does not call its attention through transformers' AttentionInterface"
    family = [c for c in vars(inspect.getmodule(forward)).values() if isinstance(c, type)]
    models = [c for c in family if issubclass(c, PreTrainedModel) and c.__module__ == forward.__module__]
    if models and not any(model._supports_attention_backend for model in models):
        return f"{models[0].__name__} says _supports_attention_backend=False"
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", None)
    if implementation is None:
        return f"{name} has no config that names its attention"
    if implementation == "eager" and "eager_attention_forward" not in forward.__globals__:
        return f"the file of {name} has no eager_attention_forward"
    return None


def input_noise(module: nn.Module) -> str | None:
    """The attribute that makes `module` multiply noise into its first argument where it lies; None: nothing does.

    Read from its code (`if self.training and self.jitter_noise > 0: hidden_states *= ...`), because no interface tells.
    What hides from this is found in the first forward.
    """
    forward = inspect.unwrap(type(module).forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
        first = list(inspect.signature(forward).parameters)[1]
    except (OSError, TypeError, IndexError):
        return None
    for branch in (node for node in ast.walk(tree) if isinstance(node, ast.If)):
        edited = [node.target for node in ast.walk(branch) if isinstance(node, ast.AugAssign)]
        if not any(isinstance(target, ast.Name) and target.id == first for target in edited):
            continue
        named = [node.attr for node in ast.walk(branch.test) if isinstance(node, ast.Attribute)]
        values = {name: getattr(module, name, None) for name in named if name != "training"}
        if values and all(values.values()):
            return next(iter(values))
    return None


def is_linear(module: nn.Module) -> bool:
    """nn.Linear and kin (quantised, tensor-parallel, GPT-2's Conv1D), but no wrapper around one."""
    known = isinstance(module, (nn.Linear, Conv1D)) or "Linear" in type(module).__name__
    return known and next(module.children(), None) is None


LEAVE_OUT = "; leave it out, or give such layers another policy with checkpointing.layers"


def _children(names: set[str]) -> Callable[[nn.Module], Found]:
    return lambda layer: [(name, child) for name, child in layer.named_children() if name in names]


def _moe(layer: nn.Module) -> Found:
    return [(name, child) for name, child in layer.named_children() if hasattr(child, "experts")]


def _router(layer: nn.Module) -> Found:
    holders = {
        id(child) for module in layer.modules() if hasattr(module, "experts") for child in module.children()
    }
    return [
        (path, module)
        for path, module in layer.named_modules()
        if path.rpartition(".")[2] in ROUTER_NAMES and id(module) in holders
    ]


def _experts(layer: nn.Module) -> Found:
    """The fused experts; of a ModuleList, which is never called itself, each."""
    found: Found = []
    for path, module in layer.named_modules():
        if path.rpartition(".")[2] == "experts":
            is_list = isinstance(module, nn.ModuleList)
            found += [(f"{path}.{i}", e) for i, e in enumerate(module)] if is_list else [(path, module)]
    return found


def _named(names: set[str]) -> Callable[[nn.Module], Found]:
    return lambda layer: [(p, m) for p, m in layer.named_modules() if p.rpartition(".")[2] in names]


def _norm(layer: nn.Module) -> Found:
    """By the class's name, unless it holds a Linear or another norm: then it is a block of several things (DBRX)."""

    def is_norm(module: nn.Module) -> bool:
        inside = [part for part in module.modules() if part is not module]
        return _called_norm(module) and not any(is_linear(part) or _called_norm(part) for part in inside)

    return [(path, module) for path, module in layer.named_modules() if path and is_norm(module)]


def _called_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def _activation(layer: nn.Module) -> Found:
    def acts(path: str, module: nn.Module) -> bool:
        kind = type(module)
        by_class = kind.__module__ in ACTIVATION_FILES and kind.__name__ not in NO_ACTIVATIONS
        return by_class or path.rpartition(".")[2] in ACTIVATION_NAMES

    return [(path, module) for path, module in layer.named_modules() if acts(path, module)]


ROLES: dict[str, Callable[[nn.Module], Found]] = {
    "attention": _children(ATTENTION_NAMES),
    CORE_ATTENTION: _children(ATTENTION_NAMES),
    "mlp": _children(MLP_NAMES),
    "moe": _moe,
    "router": _router,
    "experts": _experts,
    "shared_experts": _named(SHARED_EXPERTS_NAMES),
    "norm": _norm,
    "activation": _activation,
}


def _inventory(layer: nn.Module) -> str:
    parts = []
    for role, search in ROLES.items():
        names = [name for name, _ in search(layer)]
        if names and role != CORE_ATTENTION:
            parts.append(f"{role} ({', '.join(names)})")
    return ", ".join(parts) or "no known role"


def _linears(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in layer.named_modules():
        if path and is_linear(module):
            yield path, module


def _plain(path: str) -> str:
    """LoRA moves a Linear to `<its name>.base_layer`."""
    return path.removesuffix(".base_layer")


def _linear_roles(path: str) -> set[str]:
    top, leaf = path.partition(".")[0], _plain(path).rpartition(".")[2]
    table = ATTENTION_LINEARS if top in ATTENTION_NAMES else MLP_LINEARS
    return {role for role, names in table.items() if leaf in names}
