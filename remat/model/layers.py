"""Find the decoder layers of a Hugging Face model, and the parts of a layer by their role. Works on meta tensors.

Checkpointing policies are applied to these layers. Parts have roles (attention, mlp, norm, q, down, ...) that do not
depend on the names in a model.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from remat.config.options import ConfigError

Modules = list[tuple[str, nn.Module]]
CORE_ATTENTION = "core_attention"
ATTENTION_NAMES = {"self_attn", "attn", "attention", "self_attention", "linear_attn"}
MLP_NAMES = {"mlp", "feed_forward", "block_sparse_moe", "ffn", "moe"}
SHARED_EXPERTS_NAMES = {"shared_expert", "shared_experts", "shared_mlp"}
ROUTER_NAMES = {"gate", "router"}
ACTIVATION_NAMES = {"act", "act_fn", "activation", "activation_fn", "gelu_impl"}
ACTIVATION_FILES = {"transformers.activations", "torch.nn.modules.activation"}
NO_ACTIVATIONS = {"MultiheadAttention", "Softmax", "LogSoftmax", "Softmin", "Softmax2d"}
QKV = {"c_attn", "qkv_proj", "query_key_value", "qkv", "Wqkv", "att_proj"}  # one Linear for all three
MLA_KV = {"kv_a_proj_with_mqa", "kv_b_proj"}  # latent attention: projections to the latent and back
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
ALL_BUT_DOWN = "all_but_down"  # then no product runs twice: nothing needs the result of the layer's last one

NUMBERS_OF_LAYERS = {"layer_idx", "layer_id", "layer_index", "layer_number"}  # attributes of a layer's modules

Path = list[tuple[str, nn.Module]]  # from the whole model to a module inside it


@dataclass(frozen=True)
class Stack:
    """Layers in one list of a model, first to last. `name` is the path of the list in the model."""

    name: str
    layers: list[GradientCheckpointingLayer]

    @property
    def kinds(self) -> str:
        """Return the class names of the layers: `JambaAttentionDecoderLayer and JambaMambaDecoderLayer`."""
        return " and ".join(sorted({type(layer).__name__ for layer in self.layers}))


@dataclass(frozen=True)
class Stacks:
    """The stacks of layers in a model.

    `treated` are those for text, in the order in which the model registers them; a layer's index counts over all of
    them. `left_alone` are those for images, audio and the like, to which no policy is applied.
    """

    treated: list[Stack]
    left_alone: list[Stack]

    @property
    def depths(self) -> list[int]:
        """Return how many layers each treated stack has."""
        return [len(stack.layers) for stack in self.treated]

    def layers(self) -> list[GradientCheckpointingLayer]:
        """Return the layers of all treated stacks, first to last."""
        return [layer for stack in self.treated for layer in stack.layers]

    def describe(self) -> str:
        """Describe the stacks for header and proof; "" for a model with a single stack."""
        texts, first = [], 0
        for stack in self.treated:
            texts.append(f"{first}-{first + len(stack.layers) - 1} are {stack.name}")
            first += len(stack.layers)
        found = [f"layers {', '.join(texts)}"] if len(texts) > 1 else []
        found += [f"not treated: {stack.name} ({len(stack.layers)} {stack.kinds})" for stack in self.left_alone]
        return "; ".join(found)


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers of all treated stacks of `model`. Raises ConfigError as `find_stacks` does."""
    return find_stacks(model).layers()


def find_stacks(model: nn.Module) -> Stacks:
    """Find all stacks of checkpointable layers. A layer that is listed twice, or inside another, counts once.

    Raises ConfigError when the model has no stack for text, or a stack with layers that cannot be checkpointed.
    """
    groups: dict[str, list[Path]] = {}
    for path in _outermost_layers(model):
        groups.setdefault(_list_name(path), []).append(path)
    root = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    found = Stacks([], [])
    for name, paths in groups.items():
        stack = Stack(name, [path[-1][1] for path in paths])  # type: ignore[misc]
        reads_text = root is None or _reads_text(paths[0], root)
        (found.treated if reads_text else found.left_alone).append(stack)
        if reads_text:
            _check_is_whole(stack, paths[0][-2][1])
    if not found.treated:
        raise ConfigError(
            f"{type(model).__name__} has no stack of layers that supports activation checkpointing: "
            "use checkpointing=none or another model"
        )
    return found


def skipped_at_random(model: nn.Module) -> str:
    """Return the field by which `model` skips layers at random in training, `layerdrop=0.1`; "" if it skips none."""
    for module in model.modules():
        share = getattr(module, "layerdrop", None)
        if isinstance(share, (int, float)) and share > 0:
            fields = module.config.to_dict() if isinstance(module, PreTrainedModel) else {}
            names = [n for n, value in fields.items() if n.endswith("layerdrop") and value == share]
            return f"{' and '.join(names) or 'layerdrop'}={share}"
    return ""


def _outermost_layers(model: nn.Module) -> Iterator[Path]:
    seen: set[nn.Module] = set()

    def walk(path: Path) -> Iterator[Path]:
        module = path[-1][1]
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, GradientCheckpointingLayer) and len(path) > 1:
            yield path
            return
        for name, child in module.named_children():
            yield from walk([*path, (name, child)])

    return walk([("", model)])


def _list_name(path: Path) -> str:
    """Return the path of the list that holds the layer; a pattern if each member of the list holds one layer."""
    *parents, last = [name for name, _ in path[1:]]
    if last.isdigit():
        return ".".join(parents)
    return ".".join(["*" if name.isdigit() else name for name in parents] + [last])


def _reads_text(path: Path, root: PreTrainedModel) -> bool:
    """Return whether the model around a layer is one for text, judged by transformers' classes and configs."""
    inside = [module for _, module in path[:-1]]
    models = [module for module in inside if isinstance(module, PreTrainedModel)]
    # a name or a list of names
    if any("text" not in module.input_modalities for module in models if module is not root):
        return False
    text = root.config.get_text_config()
    if text is root.config or not models or models[-1].config in (text, root.config):
        return True
    decoder: Any = root.get_decoder()
    return decoder not in (root, root.base_model) and decoder in inside


def _check_is_whole(stack: Stack, parent: nn.Module) -> None:
    if not isinstance(parent, nn.ModuleList):
        return
    others = [
        index
        for index, module in enumerate(parent)
        if not isinstance(module, GradientCheckpointingLayer) and next(module.parameters(), None) is not None
    ]
    if others:
        raise ConfigError(
            f"members {', '.join(map(str, others))} of {stack.name} ({type(parent[others[0]]).__name__}) do not "
            f"support activation checkpointing, the others ({stack.kinds}) do: use checkpointing=none or another model"
        )


class KernelName(str):
    """Equals the name of an attention kernel, which models compare with, but is a key of its own in the registry."""

    def __hash__(self) -> int:
        return id(self)


def with_kernel(config: Any, name: str) -> Any:
    """Return a copy of `config` whose attention is what is registered under `name`."""
    own = copy.copy(config)
    # the property would also rename sub-configs, which are shared
    own.__dict__["_attn_implementation_internal"] = name
    return own


def find_modules(layer: nn.Module, role: str, option: str = "checkpointing.recompute_modules") -> Modules:
    """Find (name inside the layer, module) of every module with `role`; core_attention: modules that compute it.

    Raises ConfigError, naming `option`, when the layer has no such module or the role does not exist.
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


def find_linears(
    layer: nn.Module, name: str, option: str = "checkpointing.selective_ops.save_linears"
) -> Modules:
    """Find the Linear (or Conv1D) modules for `name`: q k v o gate up down, all_but_down, a module's name, or a path.

    A fused Linear is found by the name of each of its parts. Under LoRA the frozen base is found. Raises ConfigError.
    """
    named = [(path, module) for path, module in layer.named_modules() if path and is_linear(module)]
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


def outermost(found: Modules) -> Modules:
    """Remove modules inside another module of the list, and duplicates. Keep the order."""
    names = {name for name, _ in found}
    inside = {name for name in names if any(name.startswith(other + ".") for other in names)}
    return list({name: (name, module) for name, module in found if name not in inside}.values())


def core_attention_problem(attention: nn.Module) -> str | None:
    """Return why the attention function that this module calls cannot be wrapped; None when it can."""
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
    """Return the attribute that makes `module` multiply its first argument by noise in place, or None.

    It is read from the code (`if self.training and self.jitter_noise > 0: hidden_states *= ...`), because no interface
    has it. Cases that the code does not show are found in the first forward.
    """
    for named in _edits_of_its_input(inspect.unwrap(type(module).forward)):
        values = {name: getattr(module, name, None) for name in named}
        if all(values.values()):
            return next(iter(values))
    return None


@functools.cache
def _edits_of_its_input(forward: Callable[..., Any]) -> list[list[str]]:
    """Return the attributes that the condition reads, for each branch of `forward` that edits its argument in place."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
        first = list(inspect.signature(forward).parameters)[1]
    except (OSError, TypeError, IndexError):
        return []
    found = []
    for branch in (node for node in ast.walk(tree) if isinstance(node, ast.If)):
        edited = [node.target for node in ast.walk(branch) if isinstance(node, ast.AugAssign)]
        if any(isinstance(target, ast.Name) and target.id == first for target in edited):
            attributes = [node.attr for node in ast.walk(branch.test) if isinstance(node, ast.Attribute)]
            found.append([name for name in attributes if name != "training"])
    return [named for named in found if named]


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is nn.Linear or similar (quantised, tensor-parallel, Conv1D), but no wrapper of one."""
    known = isinstance(module, (nn.Linear, Conv1D)) or "Linear" in type(module).__name__
    return known and next(module.children(), None) is None


LEAVE_OUT = "; leave it out, or give such layers another policy with checkpointing.layers"


def _children(names: set[str]) -> Callable[[nn.Module], Modules]:
    return lambda layer: [(name, child) for name, child in layer.named_children() if name in names]


def _moe(layer: nn.Module) -> Modules:
    return [(name, child) for name, child in layer.named_children() if hasattr(child, "experts")]


def _router(layer: nn.Module) -> Modules:
    holders = {
        id(child) for module in layer.modules() if hasattr(module, "experts") for child in module.children()
    }
    return [
        (path, module)
        for path, module in layer.named_modules()
        if path.rpartition(".")[2] in ROUTER_NAMES and id(module) in holders
    ]


def _experts(layer: nn.Module) -> Modules:
    """Find the fused experts module, or each expert of a ModuleList, which is never called itself."""
    found: Modules = []
    for path, module in layer.named_modules():
        if path.rpartition(".")[2] == "experts":
            is_list = isinstance(module, nn.ModuleList)
            found += [(f"{path}.{i}", e) for i, e in enumerate(module)] if is_list else [(path, module)]
    return found


def _named(names: set[str]) -> Callable[[nn.Module], Modules]:
    return lambda layer: [(p, m) for p, m in layer.named_modules() if p.rpartition(".")[2] in names]


def _norm(layer: nn.Module) -> Modules:
    """Find norms by class name. A module that contains a Linear or another norm is no norm, but a block (DBRX)."""

    def is_norm(module: nn.Module) -> bool:
        inside = [part for part in module.modules() if part is not module]
        return _called_norm(module) and not any(is_linear(part) or _called_norm(part) for part in inside)

    return [(path, module) for path, module in layer.named_modules() if path and is_norm(module)]


def _called_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def _activation(layer: nn.Module) -> Modules:
    def acts(path: str, module: nn.Module) -> bool:
        kind = type(module)
        by_class = kind.__module__ in ACTIVATION_FILES and kind.__name__ not in NO_ACTIVATIONS
        return by_class or path.rpartition(".")[2] in ACTIVATION_NAMES

    return [(path, module) for path, module in layer.named_modules() if acts(path, module)]


ROLES: dict[str, Callable[[nn.Module], Modules]] = {
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


def _plain(path: str) -> str:
    """Undo LoRA's renaming: it moves a Linear to `<its name>.base_layer`."""
    return path.removesuffix(".base_layer")


def _linear_roles(path: str) -> set[str]:
    top, leaf = path.partition(".")[0], _plain(path).rpartition(".")[2]
    table = ATTENTION_LINEARS if top in ATTENTION_NAMES else MLP_LINEARS
    return {role for role, names in table.items() if leaf in names}


def describe(layer: nn.Module, number: int) -> str:
    """Return the modules of a layer with their plain attributes, and its parameters with their shapes.

    Layers with equal descriptions do the same, unless their code reads their number or something that is no plain
    attribute. `number` is left out of attributes that hold a module's path, and so is what DeepSpeed adds.
    """
    words = [
        f"{name}: {type(module).__qualname__} {_plain_attributes(module).replace(f'.{number}.', '.N.')}"
        for name, module in layer.named_modules()
    ]
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    words += [
        f"{name}: {tuple(getattr(t, 'ds_shape', t.shape))} {t.dtype} {t.requires_grad}" for name, t in tensors
    ]
    return "\n".join(words)


def _plain_attributes(module: Any) -> str:
    found = {
        name: value
        for name, value in vars(module).items()
        if name not in NUMBERS_OF_LAYERS
        and isinstance(value, (bool, int, float, str, tuple, list, dict, type(None)))
        and not name.startswith(("_", "ds_"))
    }
    return repr(sorted(found.items()))
