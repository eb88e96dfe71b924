"""Recompute whole layers by torch's checkpoint, in both variants: each by itself, or several together as one segment.

The reentrant variant runs the region outside autograd, which sees only the tensors that are passed in and out one by
one. `arguments` refuses layers with other inputs or side effects that this would lose.

Of a segment only the first layer's input is kept. A model calls its layers one by one, so all but the last of a segment
put themselves on a list and return a stand-in for their output; the last one runs the list. The stand-in refuses every
use except as input of the next layer.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from remat.activation_checkpointing.mechanisms.arguments import Replayable, find_tensors
from remat.activation_checkpointing.mechanisms.lazy_matmul import SkipLastMatmul
from remat.activation_checkpointing.mechanisms.mechanism import LayerForward, Mechanism, Setting, Site, Treated
from remat.config.options import CheckpointingConfig, ConfigError, Policy

WITHOUT_SEGMENTS = "use checkpointing=full"
SEGMENTED = {Policy.uniform, Policy.sqrt}
NO_LAYERDROP = "set it to 0 (model.architecture, or config.json in the model's folder)"
ContextPair = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Recompute:
    """`recompute(fn, *args)` keeps the tensors in `args`, runs `fn` now, and runs it again in backward.

    `context_fn` returns what is entered in forward and in the recomputation (torch's meaning). Tensors that carry a
    gradient must be positional in the reentrant variant.
    """

    cfg: CheckpointingConfig
    reentrant: bool = False
    context_fn: ContextPair | None = None

    def layer(self, call: Replayable, *args: Any) -> Any:
        """Run call(*args), whose keyword arguments are bound; in the reentrant variant they must carry no gradient."""
        if self.reentrant:
            state_of(args)
        elif args and isinstance(args[0], tuple):  # the hooks around the layer see only positional tensors
            run, tensors = lift(call, args)
            return self(run, *tensors)
        return self(call, *args)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        if self.reentrant:
            if isinstance(args[0], torch.Tensor) and not args[0].requires_grad:
                args = (args[0].detach().requires_grad_(), *args[1:])  # or the region's weights would get none
            region = FlatRegion(fn)
            keep_rng = self.cfg.preserve_rng_state
            return region.rebuild(checkpoint(region, *args, use_reentrant=True, preserve_rng_state=keep_rng))
        more: dict[str, Any] = {"context_fn": self.context_fn} if self.context_fn else {}
        return checkpoint(
            fn,
            *args,
            use_reentrant=False,
            preserve_rng_state=self.cfg.preserve_rng_state,
            determinism_check=str(self.cfg.determinism_check),
            early_stop=self.cfg.early_stop,
            **more,
        )


class Segment:
    """Layers `first` to `last`, run by `recompute` as one region."""

    def __init__(self, first: int, last: int, recompute: Recompute) -> None:
        self.first, self.last = first, last
        self._recompute = recompute
        self._waiting: list[tuple[Replayable, tuple[Any, ...]]] = []
        self._input: torch.Tensor | None = None
        self._random_state: torch.Tensor | None = None

    def __call__(self, index: int, call: Replayable, *args: Any) -> Any:
        """Take layer `index` of the segment; the hidden state [batch, seq, hidden] is its first argument.

        Raises ConfigError when the layers do not run one after the other, each once, on nothing but the hidden state.
        """
        hidden = state_of(args)
        if index == self.first:
            self._waiting, self._input = [], hidden  # an interrupted forward may have left some behind
        else:
            self._check_order(index, hidden)
        self._waiting.append((call, args[1:]))
        if index < self.last:
            self._random_state = torch.random.get_rng_state()
            return StandIn.of(hidden, self, index)
        return self._run()

    def _check_order(self, index: int, hidden: torch.Tensor) -> None:
        follows = isinstance(hidden, StandIn) and hidden.segment is self and hidden.after == index - 1
        if not follows or len(self._waiting) != index - self.first:
            raise ConfigError(
                f"checkpointing: layers {self.first} to {self.last} are one segment, but the model did not hand layer "
                f"{index - 1}'s output to layer {index}: it skips layers, or edits the hidden state between them; "
                f"{WITHOUT_SEGMENTS}"
            )
        if self._random_state is not None and not torch.equal(self._random_state, torch.random.get_rng_state()):
            raise ConfigError(
                f"checkpointing: the model draws random numbers between layers {index - 1} and {index} (as layerdrop "
                f"does), and a segment would draw its layers' own in another order; {WITHOUT_SEGMENTS}"
            )

    def _run(self) -> Any:
        layers, self._waiting = self._waiting, []
        hidden, self._input = self._input, None

        def run(state: torch.Tensor) -> torch.Tensor:
            for call, rest in layers:
                output = call(state, *rest)
                if not isinstance(output, torch.Tensor):
                    raise ConfigError(
                        f"checkpointing: this model's layers return a {type(output).__name__}, so they cannot be "
                        f"recomputed in segments; {WITHOUT_SEGMENTS}"
                    )
                state = output
            return state

        return self._recompute(run, hidden)


class StandIn(torch.Tensor):
    """Stands for the hidden state after layer `after`, which is not computed yet. It has a shape, and no values."""

    segment: Segment
    after: int

    @staticmethod
    def of(hidden: torch.Tensor, segment: Segment, index: int) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            StandIn,
            hidden.size(),
            strides=hidden.stride(),
            dtype=hidden.dtype,
            device=hidden.device,
            requires_grad=hidden.requires_grad,
        )
        made.segment, made.after = segment, index
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the hidden state after layer {self.after}, not computed yet>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # what ZeRO-3's hooks do
            return cls.of(args[0], args[0].segment, args[0].after)
        standing_in = next(t for _, t in find_tensors((args, kwargs)) if isinstance(t, StandIn))
        return standing_in.refuse(f"the model uses it in {func}")

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(
            f"checkpointing: layers {self.segment.first} to {self.segment.last} are recomputed in one segment, so the "
            f"hidden state after layer {self.after} is not there before the last of them ran, but {why}; "
            f"{WITHOUT_SEGMENTS}"
        )


class FlatRegion:
    """`fn` as a reentrant function wants it: tensors in, a tuple of tensors out, whatever structure `fn` returns.

    Its first pass runs with gradients switched on, and keeps nothing for them: a kernel that looks at the grad mode, or
    at what its inputs require, is then the same in both passes. torch's and DeepSpeed's own first pass has them off.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._spec: TreeSpec | None = None
        self._others: list[Any] = []  # the leaves of the output, None in the place of each tensor
        self._carries: list[bool] = []  # of each tensor, whether it has a gradient
        self._places: list[int] = []

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        if self._spec is not None:  # backward's pass
            leaves = tree_flatten(self._fn(*args))[0]
            return tuple(leaves[place] for place in self._places)
        reentrant = not torch.is_grad_enabled()
        if reentrant:
            with torch.enable_grad(), saved_tensors_hooks(lambda _: None, _never):
                leaves, self._spec = tree_flatten(self._fn(*(_fresh(value) for value in args)))
        else:
            leaves, self._spec = tree_flatten(self._fn(*args))
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._others = [None if i in self._places else leaf for i, leaf in enumerate(leaves)]
        for leaf in self._others:
            if any(tensor.requires_grad for _, tensor in find_tensors(leaf)):
                raise ConfigError(
                    f"checkpointing: a layer returns a {type(leaf).__name__}, in which the reentrant variant cannot "
                    "find the tensors that carry a gradient; use checkpointing=full checkpointing.reentrant=false"
                )
        self._carries = [leaves[i].requires_grad for i in self._places]
        return tuple(leaves[i].detach() if reentrant else leaves[i] for i in self._places)

    def rebuild(self, outputs: Any) -> Any:
        """Return the structure that `fn` returned, with the tensors that the reentrant function returned."""
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        leaves = list(self._others)
        for place, tensor, carries in zip(self._places, tensors, self._carries, strict=True):
            leaves[place] = tensor if carries else tensor.detach()
        assert self._spec is not None
        return tree_unflatten(leaves, self._spec)


def lift(call: Replayable, args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return a function and tensors: it does `call(*args)` when it is given them one by one, and holds none of them.

    The keyword arguments leave `call`. Tensors and tuples of tensors are lifted. Containers are not, because the call
    could write to them; Parameters are not, because ZeRO-3 may have partitioned them by the recomputation.
    """
    names, given = list(call.keywords), (args, tuple(call.keywords.values()))
    call.keywords = {}
    leaves, spec = tree_flatten(given, is_leaf=lambda part: not isinstance(part, tuple))
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)
    ]
    lifted = [leaves[place] for place in places]
    others = [None if place in places else leaf for place, leaf in enumerate(leaves)]

    def run(*tensors: torch.Tensor) -> Any:
        again = list(others)
        for place, tensor in zip(places, tensors, strict=True):
            again[place] = tensor
        positional, named = tree_unflatten(again, spec)
        return call(*positional, **dict(zip(names, named, strict=True)))

    return run, lifted


def state_of(args: tuple[Any, ...]) -> torch.Tensor:
    """Return the hidden state, the first of a layer's arguments. Raises ConfigError where that is no tensor."""
    if not args or not isinstance(args[0], torch.Tensor):
        raise ConfigError(
            "checkpointing: a layer of this model does not take the hidden state as its first argument, so it can be "
            "neither in a segment nor reentrant; use checkpointing=full checkpointing.reentrant=false"
        )
    return args[0]


def _fresh(value: Any) -> Any:
    """Return a leaf in the place of a tensor argument: what runs on it is not part of the outer graph."""
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _never(packed: Any) -> torch.Tensor:
    raise ConfigError(
        "checkpointing: backward came to a tensor that a layer left behind beside its result (in an attribute), or "
        "a layer runs a backward of its own; the reentrant variant carries neither: use checkpointing=full "
        "checkpointing.reentrant=false"
    )


def skip_last_matmul(site: Site, region: nn.Module, recompute: Recompute) -> Recompute:
    """Skip the last matrix product of a recomputation under ZeRO-3; at lower stages torch stops before it.

    Nothing needs that product. A compiled layer runs to its end.
    """
    if site.setup.zero_stage < 3 or recompute.reentrant or site.setup.compiled:
        return recompute
    skipping = SkipLastMatmul(region)
    site.setup.cleanup.callback(skipping.close)
    return replace(recompute, context_fn=skipping.contexts)


def describe_layerdrop(layerdrop: str) -> str:
    return f"{layerdrop} of the model's configuration skips layers at random"


def _treat(site: Site) -> LayerForward:
    decision = site.decision
    recompute = Recompute(site.setup.cfg, reentrant=decision.reentrant)
    if decision.first == decision.last:
        return site.expect_recomputation(skip_last_matmul(site, site.layer, recompute).layer)
    segment = site.setup.shared.setdefault(
        ("segment", decision.first), Segment(decision.first, decision.last, recompute)
    )
    part = partial(segment, site.index)
    return site.expect_recomputation(part) if site.index == decision.last else part


def _is_reentrant(cfg: CheckpointingConfig, layers: int, segments: bool) -> bool:
    """Choose it for segments under ZeRO-3, where the other variant holds the weights of all layers in backward."""
    return (segments and layers > 1) if cfg.reentrant is None else cfg.reentrant


def _refuse(cfg: CheckpointingConfig, treated: Treated, setting: Setting) -> list[str]:
    in_segments = [layer for decision, layer in treated if decision.policy in SEGMENTED]
    found = []
    if in_segments and _returns_tuple(in_segments[0]):
        found.append(
            f"checkpointing={cfg.policy}: {type(in_segments[0]).__name__} returns a tuple, so its layers cannot be "
            "recomputed in segments; use checkpointing=full, interval or block"
        )
    if in_segments and setting.layerdrop:
        found.append(
            f"checkpointing={cfg.policy}: {describe_layerdrop(setting.layerdrop)}, and a segment runs all its layers "
            f"or none; {NO_LAYERDROP}, or use checkpointing=full"
        )
    return found


def _returns_tuple(layer: nn.Module) -> bool:
    """Return whether the source of the layer's forward returns a tuple; the first forward finds what this misses."""
    try:
        source = inspect.getsource(inspect.unwrap(type(layer).forward))
    except (OSError, TypeError):
        return False
    returned = [n.value for n in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(n, ast.Return)]
    return any(isinstance(value, ast.Tuple) for value in returned)


MECHANISM = Mechanism(
    "recompute",
    _treat,
    is_reentrant=_is_reentrant,
    refuse=_refuse,
    runs_layer_again=True,
    keeps_only_input=True,
    stops_early=True,
)
