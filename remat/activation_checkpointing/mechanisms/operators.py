"""Describe operators by name: which ones a selective policy lists, what they write to, which results can be kept."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

MATMULS = {
    "aten::mm",
    "aten::addmm",
    "aten::_addmm_activation",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_grouped_mm_v2",
    "transformers::grouped_mm_fallback",
    "bitsandbytes::gemm_4bit",
}
# flash_attn, flash_attn_3 and kernels of the hub, whose namespaces end in a hash, are known by their pattern
FUSED_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(?!.*(backward|_math))\w+"
    r"|torch_attn::_varlen_attn"
    r"|\w*flash_attn\w*::\w*(fwd|forward)"
    r"|flex_attention"
)
COLLECTIVES = re.compile(r"_c10d_functional(_autograd)?::(?!wait_tensor)\w+(?<!_)(?<!_out)")
# A router chooses experts by these: inputs that are rounded differently may choose other experts.
CHOICES = {"aten::topk", "aten::sort", "aten::argsort", "aten::argmax", "aten::argmin", "aten::multinomial"}
GROUPS: dict[str, Callable[[str], bool]] = {
    "attention": lambda name: FUSED_ATTENTION.fullmatch(name) is not None,
    "communication": lambda name: COLLECTIVES.fullmatch(name) is not None,
    "matmul": lambda name: name in MATMULS,
    "every_other_matmul": lambda name: name in MATMULS,
}


@dataclass(frozen=True)
class Operator:
    """`writes`: (position, name) of the arguments it changes. `random`: it may draw numbers."""

    name: str
    writes: tuple[tuple[int, str], ...]
    random: bool


@cache
def describe(func: Any) -> Operator:
    """Describe an operator overload, or a higher-order operator, which has no schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Operator(name=func.name(), writes=(), random=False)
    undeclared = schema.name.startswith("c10d::")  # an all-reduce in place, say; their schemas name no write
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (undeclared and "Tensor" in str(argument.type))
        or (argument.alias_info is not None and argument.alias_info.is_write)
    )
    aten = schema.name.startswith("aten::")
    return Operator(schema.name, writes, random=not aten or torch.Tag.nondeterministic_seeded in func.tags)


def name_problem(name: str) -> str | None:
    """Tell why `name` cannot be on the list of kept operators; None when it can."""
    if name in GROUPS:
        return None
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    if name not in known:
        space, colons, _ = name.partition("::")
        spaces = {other.partition("::")[0] for other in known}
        if colons and space not in spaces and not difflib.get_close_matches(space, spaces, cutoff=0.7):
            return None  # of a library that the model's code loads later
        close = difflib.get_close_matches(name, [*GROUPS, *known], n=3)
        close = close or difflib.get_close_matches(f"aten::{name}", known, n=3)
        return f"there is no operator {name}" + (f"; did you mean {', '.join(close)}?" if close else "")
    kinds = [_kind(schema) for schema in torch._C._jit_get_schemas_for_operator(name)]
    if "whole" in kinds or name in MATMULS:
        return None
    if "composite" in kinds:
        return f"{name} is made of other operators and never runs itself; name those, or attention or matmul"
    return f"{name} returns a view of its input or writes to it, so it has no result of its own to keep"


def _kind(schema: Any) -> str:
    """Classify one overload: `whole` if it runs itself and has a result of its own, `composite`, or `other`."""
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    try:
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    except RuntimeError:  # known to TorchScript only
        return "other"
    if any(value.alias_info is not None for value in schema.returns):
        return "other"
    return "composite" if composite else "whole"


def storage(tensor: torch.Tensor) -> int:
    """Return an identity of the tensor's memory while it lives; 0: it has none (a wrapper around other tensors)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def storages(tree: Any) -> set[int]:
    """Return the identities of the memory of all tensors in `tree` that have some."""
    return {storage(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)} - {0}


def written(operator: Operator, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for position, name in operator.writes:
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def device_of(given: Any) -> torch.device | None:
    return next((leaf.device for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)), None)


def random_state(given: Any) -> torch.Tensor | None:
    """Return the state of the generator of the operation's device. Reading a GPU's costs no synchronisation."""
    device = device_of(given)
    if device is None or device.type == "meta":
        return None
    return (
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    )


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Act as if the operation had run and drawn its numbers: dropout after it must not change."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class Version:
    """Detects later edits of a tensor in place. It holds none of its memory: an alias shares the version counter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias = tensor.detach()
        self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._version = tensor._version

    def changed(self) -> bool:
        return self._alias._version != self._version
