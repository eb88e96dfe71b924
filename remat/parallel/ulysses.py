"""Attention over a sequence whose blocks lie on the ranks of a group (Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Before attention the ranks exchange blocks of the sequence for heads: [batch, heads, seq / n, width] becomes
[batch, heads / n, seq, width]. Each rank computes attention with its heads over the whole sequence, by the kernel of
the run. Then the exchange is reversed. All other parts of a model work on each token alone.

`Installed` puts this between the modules of one model and transformers' attention interface. Other models in the
process are not affected.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed._functional_collectives  # registers the collectives as operations
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from remat.config.options import ConfigError
from remat.model.layers import KernelName, with_kernel

OPTION = "train.sequence_parallel_size"
OF_THE_SEQUENCE = ("position_ids", "cache_position")  # dropped: the mask or the documents' ends tell the kernel
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")  # the documents' ends in the whole sequence
SINKS = "s_aux"  # attention sinks: a weight for each head of queries, which takes a share of every row
collectives = torch.ops._c10d_functional


class Group(Protocol):
    """The `size` ranks that share a sequence. `rank` is the number of this one."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def exchange(self, blocks: Tensor) -> Tensor:
        """Send `blocks[i]` to rank i; return what each rank sent here, in the order of ranks. Collective."""

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of the ranks' values. Collective."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a process group, given by its name. On meta tensors nothing is sent, and the name may be empty."""

    size: int
    rank: int = 0
    name: str = ""

    def exchange(self, blocks: Tensor) -> Tensor:
        each = [1] * self.size
        found: Tensor = collectives.wait_tensor(collectives.all_to_all_single(blocks, each, each, self.name))
        return found

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of the ranks' values. Collective."""
        found: Tensor = collectives.wait_tensor(collectives.all_reduce(value, "sum", self.name))
        return found


class _Exchange(torch.autograd.Function):
    """All-to-all exchange. Its backward is the same exchange: what came from rank i goes back to rank i."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.exchange(blocks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.exchange(gradient.contiguous()), None


def redistribute(states: Tensor, group: Group) -> Tensor:
    """Turn [batch, a, b / n, width] into [batch, a / n, b, width], over the n ranks of the group. Collective.

    Before attention a is heads and b the sequence. Its result has the sequence first, so after it they are the reverse.
    """
    parts = states.unflatten(1, (group.size, -1)).movedim(1, 0).contiguous()
    return _Exchange.apply(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


class Installed:
    """Replaces the attention in the modules of a model by attention over the group, until `remove` is called.

    While `whole` is true, each rank computes whole sequences by itself, as the model does without a group.
    """

    def __init__(self, net: nn.Module, group: Group) -> None:
        self.group, self.whole = group, False
        self.calls = 0
        self._configs: list[tuple[nn.Module, PretrainedConfig]] = [
            (module, config)
            for module in net.modules()
            if isinstance(config := vars(module).get("config"), PretrainedConfig)
        ]
        self._names: dict[str, KernelName] = {}
        copies = {id(config): self._renamed(config) for _, config in self._configs}
        for renamed in copies.values():
            parts = vars(renamed)
            parts.update({key: copies[id(part)] for key, part in parts.items() if id(part) in copies})
        for module, config in self._configs:
            module.config = copies[id(config)]  # type: ignore[assignment]

    def remove(self) -> None:
        for module, config in self._configs:
            module.config = config  # type: ignore[assignment]
        for name in self._names.values():
            del ALL_ATTENTION_FUNCTIONS[name]

    def _renamed(self, config: PretrainedConfig) -> PretrainedConfig:
        """Return a copy of `config` in which attention over the group replaces the named kernel."""
        kernel = config._attn_implementation
        if kernel is None:
            return copy.copy(config)
        if kernel not in self._names:
            self._names[kernel] = name = KernelName(kernel)
            ALL_ATTENTION_FUNCTIONS[name] = functools.partial(self._attend, str(kernel))
        renamed: PretrainedConfig = with_kernel(config, self._names[kernel])
        return renamed

    def _attend(
        self,
        kernel: str,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention with `kernel` from `query`, `key`, `value`, each [batch, heads, seq / n, width].

        The mask is of whole sequences. Returns [batch, seq / n, heads, width] and no attention weights.
        """
        self.calls += 1
        attention = interface(type(module), kernel)
        if self.whole:
            found: tuple[Tensor, Tensor | None] = attention(module, query, key, value, attention_mask, **given)
            return found
        group = self.group
        _check(module, query, attention_mask, given, group.size)
        seen: dict[str, Any] = {}  # the module's attributes that differ for a rank with some of the heads
        shared = math.lcm(key.shape[1], group.size) // key.shape[1]
        if shared > 1:  # fewer key heads than ranks: each rank that shares one gets a copy
            key, value = (states.repeat_interleave(shared, dim=1) for states in (key, value))
            seen["num_key_value_groups"] = query.shape[1] // key.shape[1]
        for name in OF_THE_SEQUENCE:
            given.pop(name, None)
        if (sinks := given.get(SINKS)) is not None:  # eager attention reads the module's attribute instead
            own = given[SINKS] = sinks.chunk(group.size)[group.rank]
            seen |= {name: own for name, weight in module.named_parameters(recurse=False) if weight is sinks}
        if seen:
            module = _SomeHeads(module, seen)
        states = (redistribute(part, group) for part in (query, key, value))
        result, _ = attention(module, *states, attention_mask, **given)
        return redistribute(result, group), None


def interface(module: type[nn.Module], kernel: str) -> Callable[..., Any]:
    """Return the function that modules of this class call for `kernel`. Eager attention is in the class's own file."""
    own_file = inspect.unwrap(module.forward).__globals__
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
        kernel, own_file.get("eager_attention_forward")
    )
    return found


def _check(module: nn.Module, query: Tensor, mask: Tensor | None, given: dict[str, Any], size: int) -> None:
    """Raise ConfigError for what a rank with some of the heads would compute wrongly."""
    named = type(module).__name__
    if query.shape[1] % size:
        raise ConfigError(
            f"{OPTION}={size} does not divide the {query.shape[1]} attention heads of {named}: use a size that does"
        )
    length = query.shape[2] * size
    if mask is not None and tuple(mask.shape[1:]) != (1, length, length):
        raise ConfigError(
            f"{OPTION}={size}: {named} makes an attention mask of its own ({list(mask.shape)}), which does not cover "
            f"the {length} tokens of the whole sequence for every head; use {OPTION}=1"
        )
    known = (*OF_THE_SEQUENCE, *ENDS)
    unknown = [
        name
        for name, value in given.items()
        if isinstance(value, Tensor) and name not in known and (name, value.shape) != (SINKS, query.shape[1:2])
    ]
    if unknown:
        raise ConfigError(
            f"{OPTION}={size}: {named} gives its attention {', '.join(unknown)}, whose part for some of the heads is "
            f"not known; use {OPTION}=1"
        )


class _SomeHeads:
    """An attention module as a rank with some of the heads sees it: the attributes `seen` replace the module's."""

    def __init__(self, module: nn.Module, seen: dict[str, Any]) -> None:
        self._module = module
        vars(self).update(seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
