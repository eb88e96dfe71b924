"""Compute the MLP of a recomputed layer, and the norms around it, in slices of the tokens.

Each slice is a checkpoint of its own inside the layer's. The layer's recomputation ends when it has the MLP's input,
because nothing after that is needed; backward then recomputes one slice at a time. So the MLP runs twice, as it does
without slices, and only the intermediate values of one slice exist at a time. Autograd adds up the gradient of a weight
over the slices and passes it on once.

ZeRO-3 gathers the MLP whole, once for all its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from remat.activation_checkpointing.mechanisms import operators
from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision, Observed, Site, Tiling, spans
from remat.activation_checkpointing.mechanisms.recompute import Recompute, skip_last_matmul
from remat.activation_checkpointing.mechanisms.selective_modules import wrap_forward
from remat.config.options import ConfigError
from remat.model import layers
from remat.model.flops import Mode, operands

OPTION = "checkpointing.tiles"
OFF = "set checkpointing.tiles=1, or give such layers the policy none with checkpointing.layers"
Compute = Callable[[Tensor], Tensor]


def slice_mlp(site: Site) -> None:
    """Make the MLP of the layer at `site` run in slices until the policy is removed, if its decision says so."""
    setup, tiling = site.setup, site.decision.tiling
    if tiling is None or tiling.count < 2:
        return
    mlp = site.layer.get_submodule(tiling.mlp)
    norms = [site.layer.get_submodule(name) if name else None for name in (tiling.before, tiling.after)]
    sliced = _SlicedMlp(site, mlp, tiling.count, *(norm and norm.forward for norm in norms))
    for norm in norms:
        if norm is not None:  # in the layer it returns its input: the sliced MLP does its work
            setup.cleanup.enter_context(wrap_forward(norm, sliced.pass_on))
    setup.cleanup.enter_context(wrap_forward(mlp, sliced.run))
    if setup.zero_stage == 3:
        setup.cleanup.callback(_gather_together(mlp, [norm for norm in norms if norm is not None]))


class _SlicedMlp:
    def __init__(
        self, site: Site, mlp: nn.Module, count: int, before: Compute | None, after: Compute | None
    ) -> None:
        self._site, self._scope, self._count = site, site.setup.scope, count
        self._mlp, self._before, self._after = mlp.forward, before, after
        # What draws random numbers is refused, so there is no state to restore.
        recompute = Recompute(replace(site.setup.cfg, preserve_rng_state=False))
        self._recompute = skip_last_matmul(site, mlp, recompute)

    def pass_on(self, forward: Compute, args: Any, kwargs: Any) -> Any:
        """Run in place of a norm: return its input, which the sliced MLP normalises."""
        return forward(*args, **kwargs) if self._scope.whole else args[0]

    def run(self, forward: Compute, args: Any, kwargs: Any) -> Any:
        """Run in place of the MLP, from [batch, seq, hidden] to the same shape."""
        if self._scope.whole:
            return forward(*args, **kwargs)
        hidden: Tensor
        (hidden,) = args
        self._scope.in_mlp = 0
        tokens = hidden.reshape(1, -1, hidden.shape[-1])
        length = -(-tokens.shape[1] // self._count)
        if self._scope.keeping or not torch.is_grad_enabled():
            return torch.cat([self.compute(part) for part in tokens.split(length, 1)], 1).view_as(hidden)
        kept = _Kept(tokens, length)  # the last thing that a recomputation of the layer makes
        parts, site = tokens.split(length, 1), self._site
        site.counts.slices += len(parts)
        site.counts.slices_thrice += len(parts) * self._scope.recomputing
        results = [self._recompute(_Slice(self, kept, number, part)) for number, part in enumerate(parts)]
        del parts
        return _Open.apply(torch.cat(results, 1), kept).view_as(hidden)

    def compute(self, part: Tensor) -> Tensor:
        """Return what the layer adds to its residual stream for `part` [1, tokens, hidden]."""
        part = self._before(part) if self._before else part
        with self._scope.inside_slice():
            part = self._mlp(part)
        return self._after(part) if self._after else part

    def compute_again(self, part: Tensor) -> Tensor:
        """Compute a slice again, for its backward."""
        self._site.counts.slices_again += 1
        with self._scope.inside(self._site.index, recomputing=True):
            return self.compute(part)


class _Slice:
    """One slice: its first call computes the given `part`, the second takes the same tokens from `kept`."""

    def __init__(self, mlp: _SlicedMlp, kept: _Kept, number: int, part: Tensor) -> None:
        self._mlp, self._kept, self._number = mlp, kept, number
        self._part: Tensor | None = part
        self._requires_grad = part.requires_grad

    def __call__(self) -> Tensor:
        part, self._part = self._part, None
        if part is not None:
            return self._mlp.compute(part)
        return self._mlp.compute_again(self._kept.take(self._number).requires_grad_(self._requires_grad))


class _Kept:
    """The MLP's input [1, tokens, hidden], saved for backward under the hooks of the layer's own recomputation."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        carrier = torch.empty(0, device=tokens.device, requires_grad=True)
        self._node = _Save.apply(tokens, carrier).grad_fn
        self._length, self._left = length, -(-tokens.shape[1] // length)
        self._tokens: Tensor | None = None

    def open(self) -> None:
        """Read the saved input, which makes the layer run again now, up to its MLP."""
        (self._tokens,), self._node = self._node.saved_tensors, None

    def take(self, number: int) -> Tensor:
        """Return the tokens of a slice; taking the last slice frees all tokens."""
        assert self._tokens is not None, "backward comes to the result before it comes to the slices"
        start = number * self._length
        part = self._tokens.detach().narrow(1, start, min(self._length, self._tokens.shape[1] - start))
        self._left -= 1
        if not self._left:
            self._tokens = None
        return part


class _Save(torch.autograd.Function):
    """Saves its first argument for backward, which never reaches this node."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, carrier: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return carrier.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing is computed from what this returns")


class _Open(torch.autograd.Function):
    """Returns its argument; its backward comes before that of any slice."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, kept: _Kept) -> Tensor:
        ctx.kept = kept
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.kept.open()
        return gradients[0], None


def _gather_together(mlp: nn.Module, norms: list[nn.Module]) -> Callable[[], None]:
    """Have ZeRO-3 gather all weights of `mlp` and of `norms` when the MLP is called. Returns the undo."""
    from deepspeed.runtime.zero.partition_parameters import (
        register_external_parameter,
        unregister_external_parameter,
    )
    from deepspeed.utils import set_z3_leaf_module

    set_z3_leaf_module(mlp, True)
    external = [weight for norm in norms for weight in norm.parameters()]
    for weight in external:
        register_external_parameter(mlp, weight)
    marking = mlp.register_forward_pre_hook(_mark)

    def undo() -> None:
        marking.remove()
        set_z3_leaf_module(mlp, False)
        for weight in external:
            unregister_external_parameter(mlp, weight)

    return undo


def _mark(module: nn.Module, args: Any) -> Any:
    """Make the MLP's input require a gradient: only when it comes does DeepSpeed take the gradients of the weights."""
    if not torch.is_grad_enabled() or args[0].requires_grad:
        return args
    return (args[0].detach().requires_grad_(), *args[1:])


def unmet(observed: Observed) -> list[str]:
    """Tell where the first step did not slice an MLP as promised, or ran it more often than without slices."""
    sliced = {
        i: layer for i, layer in observed.items() if layer.decision.tiling and layer.decision.tiling.count > 1
    }
    found = []
    if idle := [i for i, layer in sliced.items() if not layer.counts.slices]:
        found.append(
            f"{OPTION} is not in effect in layers {spans(idle)}: their MLPs did not run in slices; {OFF}"
        )
    if thrice := [i for i, layer in sliced.items() if layer.counts.slices_thrice]:
        found.append(
            f"{OPTION}: the recomputation of layers {spans(thrice)} ran their MLPs too, so slices ran a third time; "
            f"{OFF}"
        )
    if other := [
        i
        for i, layer in sliced.items()
        if layer.counts.recomputations == layer.counts.forwards
        and layer.counts.slices_again != layer.counts.slices
    ]:
        counts = sliced[other[0]].counts
        found.append(
            f"{OPTION}: of {counts.slices} slices of layer {other[0]} {counts.slices_again} ran again; {OFF}"
        )
    return found


# Finding what can be sliced in a layer


def find_tilings(
    model: nn.Module, decisions: Sequence[LayerDecision], run: Callable[[], Any]
) -> list[LayerDecision]:
    """Return `decisions` with the names of the modules to slice in each layer, found by one forward of `model`.

    `run` is a forward of `model` in training mode, also on meta tensors. Raises ConfigError, with everything that is
    wrong, where the MLP of a layer cannot be sliced.
    """
    found = layers.decoder_layers(model)
    wanted = {index: found[index] for index, decision in enumerate(decisions) if decision.tiling is not None}
    if not wanted:
        return list(decisions)
    problems: dict[str, list[int]] = {}
    for index, layer in wanted.items():
        if text := _problem(layer):
            problems.setdefault(text, []).append(index)
    looks = {} if problems else {index: _Look(layer) for index, layer in wanted.items()}
    with ExitStack() as stack:
        for look in looks.values():
            stack.enter_context(look.watching())
        if looks:
            run()
    for index, look in looks.items():
        if text := look.problem():
            problems.setdefault(text, []).append(index)
    if problems:
        raise ConfigError(
            "\n".join(f"{OPTION}: {text} (layers {spans(at)}); {OFF}" for text, at in problems.items())
        )
    return [
        replace(decision, tiling=Tiling(decision.tiling.count, *looks[index].names()))
        if decision.tiling
        else decision
        for index, decision in enumerate(decisions)
    ]


def _problem(layer: nn.Module) -> str:
    """Tell why the MLP of `layer` cannot be sliced, by its modules; empty: they allow it."""
    kind, mlps = type(layer).__name__, layers.ROLES["mlp"](layer)
    if len(mlps) != 1:
        return f"{kind} has {len(mlps) or 'no'} MLP{'s' * (len(mlps) > 1)} that it calls by a known name"
    for name, module in mlps[0][1].named_modules(prefix=mlps[0][0]):
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return (
                f"{name} of {kind} drops values at random (p={module.p:g}), in slices others than in the whole (set "
                "that to 0; of adapters it is peft.dropout)"
            )
        if noise := layers.input_noise(module):
            return f"{name} of {kind} multiplies its input with noise ({noise})"
        if isinstance(module, nn.modules.conv._ConvNd):
            return f"{name} of {kind} mixes neighbouring tokens"
        if hasattr(module, "expert_capacity"):
            return f"the experts in {name} of {kind} take so many tokens at most, and in slices others"
    return ""


class _Look(Mode):
    """Watches one forward of a layer: what its MLP is given, who else uses that, and what comes after."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer, self._kind = layer, type(layer).__name__
        self._name, self._mlp = layers.ROLES["mlp"](layer)[0]
        self._norms = {name: norm for name, norm in layers.ROLES["norm"](layer) if "." not in name}
        self._inside: list[str] = []  # the watched modules that run
        self._given: dict[str, int] = {}  # by module, the memory of its input
        self._made: dict[str, int] = {}  # by module, the memory of its output
        self._readers: dict[int, set[str]] = {}  # by memory, the modules that read it
        self._alive: list[Tensor] = []  # keeps an address from being used again
        self._saved_last = ""  # where autograd saved a tensor last
        self._calls, self._wrong = 0, ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in [(self._name, self._mlp), *self._norms.items()]:
                enter = module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
                stack.callback(enter.remove)
                stack.callback(module.register_forward_hook(partial(self._leave, name)).remove)
            stack.enter_context(wrap_forward(self._layer, self._run))
            yield

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            with saved_tensors_hooks(self._save, lambda tensor: tensor), self:
                return forward(*args, **kwargs)
        finally:
            self._alive.clear()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        plain = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        if name == self._name:
            self._calls += 1
            if not plain or args[0].dim() != 3:
                self._wrong = f"the MLP of {self._kind} takes more than the hidden state [batch, seq, hidden]"
        if plain:
            self._given[name] = operators.storage(args[0])
        self._inside.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()
        if isinstance(output, Tensor):
            self._made[name] = operators.storage(output)
            self._readers[self._made[name]] = set()  # from now on
            self._alive.append(output)
        elif name == self._name:
            self._wrong = f"the MLP of {self._kind} returns a {type(output).__name__}"

    def _save(self, tensor: Tensor) -> Tensor:
        self._saved_last = self._inside[-1] if self._inside else "the layer"
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not getattr(func, "is_view", False):
            reader = self._inside[-1] if self._inside else "the layer"
            for tensor in operands((args, kwargs)):
                self._readers.setdefault(operators.storage(tensor), set()).add(reader)
        if self._name in self._inside and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self._wrong = (
                f"the MLP of {self._kind} draws random numbers ({func}), in slices others than in the whole"
            )
        return func(*args, **(kwargs or {}))

    def problem(self) -> str:
        if self._calls != 1:
            return f"{self._kind} runs its MLP {self._calls} times in a forward"
        if not self._wrong and self._saved_last not in (self._name, self.names()[2]):
            return (
                f"backward needs what {self._kind} makes of its MLP's result (in {self._saved_last}), so a "
                "recomputation of the layer would run the MLP too, and each slice a third time"
            )
        return self._wrong

    def names(self) -> tuple[str, str, str]:
        """Return the names of the MLP and of the norms around it, if nothing else reads what passes between them."""
        given, made = self._given.get(self._name, 0), self._made.get(self._name, 0)
        before = [n for n in self._norms if self._made.get(n) == given and self._readers[given] <= {self._name}]
        after = [n for n in self._norms if self._given.get(n) == made and self._readers[made] <= {n}]
        return self._name, before[0] if before else "", after[0] if after else ""
