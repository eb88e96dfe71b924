"""Compare one layer of each kind with a pass that keeps everything, bit for bit, in the first micro-batch of a run.

A `Recorder` notes the inputs and outputs of such a layer (or segment of layers) under the run's policy, and the
gradients of both. When the backward is over, `Recorder.replay` runs the layer once more, with everything kept, on the
same inputs, random state and output gradients, and compares. It knows nothing of how a policy works, so it finds errors
that no list of cases foresees. It costs one forward and backward of those layers, once; where a layer communicates
with other ranks, or differs, one more.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from remat.activation_checkpointing.mechanisms.arguments import (
    Alias,
    Replayable,
    carry_gradient,
    copy_containers,
    find_changes,
    find_tensors,
    has_containers,
    name_arguments,
    rebuild,
    replace_changes,
    tell_of_gradient,
)
from remat.activation_checkpointing.mechanisms.counters import Scope
from remat.activation_checkpointing.mechanisms.discard_output import autocast_of_now
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, LayerDecision, spans
from remat.config.units import MIB
from remat.machine import rng
from remat.model.flops import Mode

DRAWS_AFTER_SAVE = {torch.ops.aten.rrelu_with_noise, torch.ops.aten.rrelu_with_noise_}
LARGEST_COPY_BYTES = 16 << 20  # of an argument without gradient; a larger one (a mask) is not copied
LARGEST_BUFFER_BYTES = MIB  # of a module's buffers that are compared
MOST_NODES = 100_000  # of the autograd graph that one walk visits
MOST_NOISE = 4.0  # times the difference of two passes that keep everything, on a nondeterministic device
MOST_NOISE_EPS = 8  # largest difference of two such passes that counts, in epsilons of the layer's dtype
ROUNDED = 0.3  # largest relative gradient error that the rounding of 8-bit storage explains
TINY = 1e-12
NEXT = "in the next run, by what this one left in attributes,"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Digest(NamedTuple):
    """A summary of a weight's gradient, which is too large to hold: its norm, and a sum and a hash of its bits."""

    norm: float
    bits: tuple[int, int]


class CannotRunAgain(RuntimeError):
    """A layer's forward failed on the arguments of its first run."""


Quantities = dict[str, "torch.Tensor | Digest | None"]


@dataclass
class Replayed:
    """The result of a replay. `differences` stop the run; `notes` say what could not be compared."""

    compared: list[dict[str, Any]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self) -> str:
        """Return `layers 0, 5 (one of each kind) run again with everything kept: equal bit for bit, 0.41 s`."""
        if not self.compared:
            return "no layer is treated, so none was run again"
        where = ", ".join(one["layers"] for one in self.compared)
        what = "layer" if where.isdigit() else "layers"
        error = max(one["largest_error"] for one in self.compared)
        equal = f"gradients within {error:.2g}" if error else "equal bit for bit"
        return (
            f"{what} {where} (one of each kind) run again with everything kept: {equal}, {self.seconds:.2f} s"
        )


class Draws(Mode):
    """Records every draw of a layer from generators of its own, with the generator's state before the draw.

    A generator comes in a new wrapper at every draw, so equal generators cannot be recognised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generators: list[torch.Generator] = []
        self.first: list[torch.Tensor] = []  # states
        self.after_save = ""  # an operation whose random numbers autograd saves before they are drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and not _is_torchs(value):
                self.generators.append(value)
                self.first.append(value.get_state())
        packet = getattr(func, "overloadpacket", None)  # None: a higher-order operator
        if packet in DRAWS_AFTER_SAVE:
            self.after_save = packet.__name__
        return func(*args, **kwargs)

    def now(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]

    def set(self, states: list[torch.Tensor]) -> None:
        """Set the states in reverse order, so that each generator ends with the first of its states."""
        for generator, state in reversed(list(zip(self.generators, states, strict=True))):
            generator.set_state(state)


class _Communication(Mode):
    """Sees whether operations exchange data with other ranks."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= "c10d" in getattr(func, "namespace", "")
        return func(*args, **(kwargs or {}))


class Recorder:
    """Records one micro-batch. `before` and `after` surround every call of a layer, `first_run` its real run."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        decisions: Sequence[LayerDecision],
        scope: Scope,
        *,
        rounded: bool,
    ) -> None:
        """`rounded`: what is kept is stored in 8 bits, so gradients are not exact."""
        self._model, self._layers, self._decisions = model, layers, decisions
        self._scope, self._rounded = scope, rounded
        self._samples: dict[int, Sample] = {}  # by the first layer of the region
        self._open: set[int] = set()
        self._kinds: set[Any] = set()
        self._entries: list[_Entry] = []  # of reentrant regions
        self._shared_states: list[_Entry] = []
        self._deferred = _Deferred()
        self._called: Counter[int] = Counter()
        self._ran: Counter[int] = Counter()

    def before(self, index: int, layer: nn.Module, call: Replayable, args: tuple[Any, ...]) -> None:
        self._called[index] += 1
        decision = self._decisions[index]
        if decision.mechanism == KEEP and not decision.offload:
            return
        if decision.reentrant and index == decision.first and isinstance(args[0], torch.Tensor):
            self._entries.append(_Entry(decision, args[0].grad_fn, args[0].output_nr))
            tell_of_gradient(args[0], partial(setattr, self._entries[-1], "handed", True))
        self._deferred.note(decision, index)
        with _disable_current_modes():
            if index == decision.first and decision.first not in self._samples:
                region = self._layers[decision.first : decision.last + 1]
                kind = _kind(decision, region, name_arguments(call, args))
                if kind not in self._kinds:
                    self._kinds.add(kind)
                    self._samples[decision.first] = Sample(decision)
                    self._open.add(decision.first)
            if decision.first in self._open:
                self._samples[decision.first].add(layer, call, args, is_last=index == decision.last)

    def first_run(self, index: int) -> AbstractContextManager[None]:
        """Return the context for the first, real run of layer `index`."""
        self._ran[index] += 1
        first = self._decisions[index].first
        return self._samples[first].draws if first in self._open else nullcontext()

    def later_run(self, index: int) -> AbstractContextManager[None]:
        """Return the context for a recomputation of layer `index`, or of a part of it."""
        sample = self._samples.get(self._decisions[index].first)
        return sample.later_run() if sample else nullcontext()

    def after(self, index: int, output: Any) -> Any:
        """Record the end of a call, and return the output that the model must use."""
        decision = self._decisions[index]
        self._deferred.end(decision, index)
        if decision.reentrant and index == decision.last and self._entries:
            entry = self._entries[-1]
            tell_of_gradient(output, partial(setattr, entry, "reached", True))
            entry.inside = _reach([tensor for _, tensor in find_tensors(output)], {id(entry.node)})
        if index == decision.last and decision.first in self._open:
            self._open.discard(decision.first)
            with _disable_current_modes():
                return self._samples[decision.first].end(output)
        return output

    def forward_done(self, loss: torch.Tensor) -> None:
        """Find the inputs that only their region uses: all of their gradient comes from the region."""
        users: dict[tuple[int, int], set[int]] = {}
        nodes = _reach([loss], set())
        if len(nodes) < MOST_NODES:
            for key, node in nodes.items():
                for following, number in node.next_functions:
                    users.setdefault((id(following), number), set()).add(key)
            for sample in self._samples.values():
                sample.note_users(users)
            self._shared_states = [entry for entry in self._entries if entry.is_shared(users)]
            self._deferred.look(nodes, users)

    def ready(self) -> list[int]:
        """Return the regions that can be replayed, each by its first layer."""
        return [first for first, sample in self._samples.items() if sample.complete]

    def replay(self, regions: Sequence[int]) -> Replayed:
        """Run each of `regions` again and compare. Every rank must give the same list: ZeRO-3 gathers the weights."""
        started, result = time.perf_counter(), Replayed(differences=self._lost() + self._shared() + self._cut())
        result.differences += self._deferred.problems()
        for first in regions:
            sample = self._samples[first]
            layers = range(sample.decision.first, sample.decision.last + 1)
            once = all(self._called[index] == 1 for index in layers)
            sample.compare(
                result,
                self._scope,
                own_weights=self._own_weights(sample) if once else set(),
                once=once,
                rounded=self._rounded and sample.decision.offload,
            )
        for sample in self._samples.values():
            sample.close()
        self._samples.clear()
        result.seconds = time.perf_counter() - started
        return result

    def _lost(self) -> list[str]:
        found = [index for index in sorted(self._called) if self._called[index] != self._ran[index]]
        if not found:
            return []
        one = found[0]
        return [
            f"layers {spans(found)}: layer {one} was called {self._called[one]} times and ran {self._ran[one]} times; "
            "use checkpointing=full"
        ]

    def _shared(self) -> list[str]:
        layers = [entry.decision.first for entry in self._shared_states]
        if not layers:
            return []
        return [
            f"layers {spans(layers)}: the hidden state that they are given is also used elsewhere, and the "
            "reentrant variant would add its gradient up in another order; use checkpointing=full "
            "checkpointing.reentrant=false"
        ]

    def _cut(self) -> list[str]:
        """Find reentrant regions that gradients enter and none leaves: regions below would get zeros instead.

        The first has no layer below it to get zeros.
        """
        cut = [entry for entry in self._entries[1:] if entry.reached and not entry.handed]
        layers = [entry.decision.first for entry in cut if entry.node is not None]
        if not layers:
            return []
        return [
            f"layers {spans(layers)}: no gradient comes back to the hidden state that they are given, and the "
            "reentrant variant would give the layers below gradients of zeros, where there should be none; use "
            "checkpointing=full checkpointing.reentrant=false"
        ]

    def _own_weights(self, sample: Sample) -> set[int]:
        """Return the ids of the weights that only the sample uses: all of their gradient comes from it."""
        inside = Counter(
            id(p) for layer in sample.layers for _, p in layer.named_parameters(remove_duplicate=False)
        )
        everywhere = Counter(id(p) for _, p in self._model.named_parameters(remove_duplicate=False))
        return {key for key, times in inside.items() if everywhere[key] == times}


class _Deferred:
    """Finds tensors whose gradient a segment would add up in another order, which rounds differently.

    A segment runs all its layers when the last is called, so what the model does between two of them comes first.
    Autograd numbers its nodes as they are made, and adds up in the reverse of that order.
    """

    def __init__(self) -> None:
        # by first layer: autograd's next node number at its call and at the last layer's
        self._open: dict[int, list[int]] = {}
        self._segments: list[tuple[LayerDecision, int, int, int]] = []
        self._reordered: list[int] = []

    def note(self, decision: LayerDecision, index: int) -> None:
        """Note that layer `index` is called."""
        if decision.first < decision.last and index in (decision.first, decision.last):
            self._open.setdefault(decision.first, []).append(torch._C._autograd._get_sequence_nr())

    def end(self, decision: LayerDecision, index: int) -> None:
        if index == decision.last and len(calls := self._open.pop(decision.first, [])) == 2:
            self._segments.append((decision, *calls, torch._C._autograd._get_sequence_nr()))  # type: ignore[arg-type]

    def look(self, nodes: dict[int, Any], users: dict[tuple[int, int], set[int]]) -> None:
        """Find reordered segments in the graph's `nodes` and the `users` of each output.

        The sum of two gradients is the same in either order, so only outputs with more users count.
        """
        for numbers in (
            [nodes[key]._sequence_nr() for key in keys] for keys in users.values() if len(keys) > 2
        ):
            for decision, called, ran, ended in self._segments:
                between = any(called <= number < ran for number in numbers)
                if between and any(ran <= number < ended for number in numbers):
                    self._reordered.append(decision.first)

    def problems(self) -> list[str]:
        if not self._reordered:
            return []
        return [
            f"layers {spans(sorted(set(self._reordered)))} begin segments, between whose layers the model uses tensors "
            "that the layers use too, so their gradients would be added up in another order; use checkpointing=full"
        ]


@dataclass
class _Entry:
    """Where the hidden state enters a reentrant region: output `number` of `node`, and the nodes inside."""

    decision: LayerDecision
    node: Any
    number: int
    inside: dict[int, Any] = field(default_factory=dict)
    reached: bool = False  # whether the region's output got a gradient
    handed: bool = False  # whether the hidden state got a gradient

    def is_shared(self, users: dict[tuple[int, int], set[int]]) -> bool:
        return self.node is not None and bool(
            users.get((id(self.node), self.number), set()) - self.inside.keys()
        )


@dataclass
class _Input:
    """A tensor that carries a gradient into the region. It is output `number` of `node` of the autograd graph."""

    held: int
    node: Any
    number: int
    gradient: torch.Tensor | None = None
    alone: bool = False  # whether all of the gradient comes from this region


@dataclass
class _Output:
    value: torch.Tensor
    carries: bool
    gradient: torch.Tensor | None = None


class Sample:
    """One call of a region: its inputs, its outputs, and the gradients of both."""

    def __init__(self, decision: LayerDecision) -> None:
        self.decision = decision
        self.layers: list[nn.Module] = []
        self.complete = False
        self._calls: list[tuple[Replayable, tuple[Any, ...], dict[str, Any]]] = []
        self._held: list[torch.Tensor] = []  # the values of every input tensor
        self._requires: list[bool] = []
        self._place: dict[int, int] = {}  # id of the model's tensor: its index in `_held`
        self._alive: list[Any] = []  # the tensors of these ids: while they live, ids are unique
        self._versions: list[int] = []
        self._copies: dict[int, Any] = {}
        self._containers: list[tuple[str, Any, Any]] = []
        self._inputs: dict[str, _Input] = {}
        self._outputs: dict[str, _Output] = {}
        self._nodes: dict[int, Any] = {}  # of the region's graph, down to its inputs
        self._weights: dict[str, list[Digest]] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}  # what the buffers were before the first run
        self._after: dict[str, torch.Tensor] = {}  # and after the real pass
        self._attributes: list[dict[str, Any]] = []  # of each module, before the first run
        self._hooks = ExitStack()
        self.draws = Draws()  # of the first run
        self._drawn_anew: set[str] = set()  # sources from which a recomputation drew new random numbers
        self._left: list[dict[str, Any]] = []  # attributes after the real pass
        self._random: Any = None
        self._autocast: list[Any] = []

    # while the model runs

    def add(self, layer: nn.Module, call: Replayable, args: tuple[Any, ...], *, is_last: bool) -> None:
        """Record one layer's call."""
        given = name_arguments(call, args)
        within = bool(self._calls)  # inside a segment: the hidden state is not computed yet
        names = list(given)
        held = {
            name: rebuild(value, self._hold, self._copies)
            for name, value in given.items()
            if not within or name != names[0]
        }
        positional = tuple(held[name] for name in names[within : len(args)])
        plain = Replayable(partial(call.function, *call.bound), call.around)
        self._calls.append((plain, positional, {name: held[name] for name in call.keywords}))
        self.layers.append(layer)
        for name, value in given.items():
            if name in held:
                self._listen(
                    f"{name} of layer {self.decision.first + len(self.layers) - 1}" if within else name, value
                )
            if has_containers(value):
                self._containers.append((name, copy_containers(value), value))
        if is_last:
            self._start()

    @contextmanager
    def later_run(self) -> Iterator[None]:
        """Note the sources from which a recomputation draws new random numbers.

        torch's own random state is restored for it, except for what `discard_output` recomputes.
        """
        draws, before = Draws(), rng.get()
        try:
            with draws:
                yield
        finally:
            after = rng.get()
            torchs = [(before[kind], after[kind]) for kind in ("torch", "cuda") if before[kind] is not None]
            moved = {
                "torch": not self.decision.mechanism.restores_random_state
                and not all(torch.equal(one, other) for one, other in torchs),
                "python's random": before["python"] != after["python"],
                "numpy": before["numpy"] != after["numpy"],
                "a torch.Generator of its own": bool(draws.generators),
            }
            self._drawn_anew |= {name for name, is_moved in moved.items() if is_moved}

    def end(self, output: Any) -> Any:
        """Record the outputs of the region. Return aliases of them, whose gradients are those of later operations."""
        made = self._made(output)
        if any(tensor is given for _, tensor in made for given in self._alive):
            self.close()  # it returns an input as it is: there is nothing to compare
            return output
        if any(tensor._version != version for tensor, version in zip(self._alive, self._versions, strict=True)):
            self._inputs = {}  # it edits an input in place: the gradient cannot be attributed
        self._nodes = _reach([tensor for _, tensor in made], {id(one.node) for one in self._inputs.values()})
        aliases: dict[int, torch.Tensor] = {}

        def alias(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in aliases:
                aliases[id(tensor)] = Alias.apply(tensor)
            return aliases[id(tensor)]

        for _, before, now in self._containers:
            replace_changes(before, now, alias)
        output = rebuild(output, alias, {})
        for path, tensor in self._made(output):
            noted = self._outputs[path] = _Output(tensor.detach().clone(), tensor.requires_grad)
            if tensor.requires_grad:
                tensor.register_hook(partial(_note_gradient, noted))
        self._containers, self._alive = [], []
        self.complete = True
        return output

    def note_users(self, users: dict[tuple[int, int], set[int]]) -> None:
        """Note which inputs only this region uses. `users`: the nodes that give a gradient to (node, output number)."""
        ends = {id(one.node) for one in self._inputs.values()}
        inside = self._nodes.keys() - ends
        for one in self._inputs.values():
            one.alone = users.get((id(one.node), one.number), set()) <= inside
        self._nodes = {key: node for key, node in self._nodes.items() if key in ends}

    def _made(self, output: Any) -> list[tuple[str, torch.Tensor]]:
        """Return (path, tensor) of all that the region returned or wrote into its arguments."""
        found = list(find_tensors(output, "output"))
        for name, before, now in self._containers:
            for path, new in find_changes(before, now, name):
                found += find_tensors(new, path)
        return found

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._place:
            small = tensor.requires_grad or tensor.nbytes <= LARGEST_COPY_BYTES
            self._place[id(tensor)] = len(self._held)
            self._held.append(_copy(tensor.detach()) if small else tensor.detach())
            self._requires.append(tensor.requires_grad)
            self._alive.append(tensor)
            self._versions.append(tensor._version)
        return self._held[self._place[id(tensor)]]

    def _listen(self, name: str, value: Any) -> None:
        """Record the gradient of each tensor in `value` by a hook on the model's own tensor: sums keep their order."""
        for path, tensor in find_tensors(value, name):
            known = any(one.held == self._place[id(tensor)] for one in self._inputs.values())
            if tensor.requires_grad and tensor.grad_fn is not None and not known:
                noted = self._inputs[path] = _Input(self._place[id(tensor)], tensor.grad_fn, tensor.output_nr)
                self._hooks.callback(tensor.register_hook(partial(_note_gradient, noted)).remove)

    def _start(self) -> None:
        self._random = rng.get()
        self._autocast = [autocast_of_now(kind) for kind in {"cpu", self._device().type}]
        self._attributes = [_attributes(module) for module in self._modules()]
        for name, buffer in self._states():
            if buffer.nbytes <= LARGEST_BUFFER_BYTES and not torch._debug_has_internal_overlap(buffer):
                self._buffers[name], self._before[name] = buffer, buffer.detach().clone()
        for name, weight in self._named_weights().items():
            digests = self._weights[name] = []
            hook = weight.register_hook(partial(_note_digest, digests))
            self._hooks.callback(hook.remove)

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of what a forward may edit: buffers, and tensors in attributes of modules."""
        for layer in self.layers:
            yield from layer.named_buffers()
        modules = [named for layer in self.layers for named in layer.named_modules()]
        for (name, _), attributes in zip(modules, self._attributes, strict=True):
            for path, tensor in find_tensors(attributes, name):
                if not tensor.requires_grad:
                    yield path, tensor

    def _named_weights(self) -> dict[str, nn.Parameter]:
        return {
            f"{place}.{name}" if len(self.layers) > 1 else name: weight
            for place, layer in enumerate(self.layers)
            for name, weight in layer.named_parameters()
            if weight.requires_grad
        }

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    # when the backward is over

    def compare(
        self, result: Replayed, scope: Scope, *, own_weights: set[int], once: bool, rounded: bool
    ) -> None:
        """Run the region with everything kept, and add what differs from the run to `result`."""
        self.close()
        name = self._name()
        again = self.decision.mechanism.runs_layer_again
        own = {key for key, weight in self._named_weights().items() if id(weight) in own_weights}
        self._left = [_attributes(module) for module in self._modules()]
        self._after = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}
        real = self._real(own, once=once)
        try:
            with self._everything_kept(scope), _Communication() as communication:
                truth = self._truth(own, once=once)
                if any(key.startswith(NEXT) for key in truth):
                    real |= self._next(self._left)
                errors = _errors(real, truth)
                # ranks that share a layer must run it equally often, whichever of them finds errors
                if not rounded and (errors or communication.seen):
                    noise = _errors(self._truth(own, once=once), truth)
                    errors = _beyond_noise(errors, noise, MOST_NOISE_EPS * self._eps())
                if self.decision.tiling is not None:
                    errors |= self._against_whole(scope, truth)
        except CannotRunAgain as error:
            text = f"{name} cannot run again: {type(error.__cause__).__name__}: {error.__cause__}"
            (result.differences if again else result.notes).append(text + (self._remedy() if again else ""))
            return
        except Exception as error:
            result.notes.append(f"the gradients of {name} cannot be compared: {type(error).__name__}: {error}")
            return
        handed = [key for key, digests in self._weights.items() if len(digests) > 1]
        if not again and any(key.startswith("output") for key in errors):
            result.notes.append(f"{name} returns something else each time it runs: nothing could be compared")
            return
        wrong = {
            key: size
            for key, size in errors.items()
            if not (rounded and key.startswith("gradient") and size <= ROUNDED)
        }
        result.differences += [f"{name}: {_in_words(key, size)}{self._remedy()}" for key, size in wrong.items()]
        seen = self._seen(name, handed, again)
        result.differences += seen
        result.compared.append(
            {
                "layers": spans(list(range(self.decision.first, self.decision.last + 1))),
                "class": type(self.layers[0]).__name__,
                "policy": str(self.decision.policy),
                "compared": sorted(truth),
                "largest_error": max(errors.values(), default=0.0),
                "equal": not wrong and not seen,
            }
        )

    def _against_whole(self, scope: Scope, sliced: Quantities) -> dict[str, float]:
        """Return the relative errors, beyond rounding, of outputs with sliced MLPs against those with whole MLPs."""
        self._set_buffers(self._before)
        scope.whole = True
        try:
            outputs, _ = self._run(self._attributes)
        finally:
            scope.whole = False
        errors = _errors(sliced, {path: tensor.detach() for path, tensor in outputs.items()})
        return {
            f"{path}, of an MLP in slices,": size
            for path, size in errors.items()
            if size > MOST_NOISE_EPS * self._eps()
        }

    def _seen(self, name: str, handed: list[str], again: bool) -> list[str]:
        """Return the differences that the run itself showed, whatever the values are."""
        found = []
        if self._drawn_anew:
            found.append(
                f"{name} draws random numbers from {' and '.join(sorted(self._drawn_anew))}, and others when it runs "
                f"again{self._remedy()}"
            )
        if self.decision.offload and not again and self.draws.after_save:
            found.append(
                f"{name}: {self.draws.after_save} draws into memory that autograd has saved before, so offload would "
                "bring back what was there then; use another activation, or checkpointing.offload.enabled=false"
            )
        if handed:
            found.append(
                f"{name}: the gradient of weight {handed[0]} was handed over in {len(self._weights[handed[0]])} parts "
                f"in one micro-batch, where the pass that keeps everything hands it over once{self._remedy()}"
            )
        return found

    def _eps(self) -> float:
        dtypes = {one.value.dtype for one in self._outputs.values() if one.value.is_floating_point()}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def _device(self) -> torch.device:
        return self._held[0].device if self._held else torch.device("cpu")

    def _name(self) -> str:
        first, last = self.decision.first, self.decision.last
        which = f"layer {first}" if first == last else f"layers {first}-{last}"
        return f"{which} ({type(self.layers[0]).__name__})"

    def _remedy(self) -> str:
        if self.decision.reentrant:
            return "; use checkpointing=full checkpointing.reentrant=false"
        return self.decision.mechanism.remedy

    def _real(self, own: set[str], *, once: bool) -> Quantities:
        """Return the outputs, gradients and buffers of the run, under its policy."""
        found: Quantities = {path: output.value for path, output in self._outputs.items()}
        for path, one in self._inputs.items():
            if one.alone:
                found[f"gradient of {path}"] = one.gradient
            found[f"way of the gradient to {path}"] = _flag(id(one.node) in self._nodes)
        for path, output in self._outputs.items():
            found[f"way of the gradient from {path}"] = _flag(output.carries)
        for name in own:
            digests = self._weights[name]
            found[f"gradient of weight {name}"] = digests[0] if digests else None
        if once:
            found |= {f"buffer {name}": value for name, value in self._after.items()}
        return found

    def _truth(self, own: set[str], *, once: bool) -> Quantities:
        """Return the same quantities of a pass that keeps everything, on the same inputs."""
        self._set_buffers(self._before)
        try:
            outputs, leaves = self._run(self._attributes)
        except Exception as error:
            raise CannotRunAgain from error
        left = [_attributes(module) for module in self._modules()]
        carried = [
            (tensor, noted.gradient)
            for path, noted in self._outputs.items()
            if (tensor := outputs.get(path)) is not None and tensor.requires_grad and noted.gradient is not None
        ]
        weights = self._named_weights()
        wanted = [leaves[one.held] for one in self._inputs.values()] + [weights[name] for name in sorted(own)]
        gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if carried and wanted:
            gradients = torch.autograd.grad(
                [tensor for tensor, _ in carried],
                wanted,
                [gradient for _, gradient in carried],
                allow_unused=True,
            )
        found: Quantities = {path: tensor.detach() for path, tensor in outputs.items()}
        for (path, one), gradient in zip(self._inputs.items(), gradients, strict=False):
            if one.alone:
                found[f"gradient of {path}"] = gradient
            found[f"way of the gradient to {path}"] = _flag(gradient is not None and bool(gradient.any()))
        for path, tensor in outputs.items():
            found[f"way of the gradient from {path}"] = _flag(tensor.requires_grad)
        for name, gradient in zip(sorted(own), gradients[len(self._inputs) :], strict=True):
            found[f"gradient of weight {name}"] = None if gradient is None else _digest(gradient)
        if once:
            found |= {f"buffer {name}": buffer.detach().clone() for name, buffer in self._buffers.items()}
        if once and _plain(left) != _plain(self._left):
            found |= self._next(left)
        return found

    def _next(self, attributes: list[dict[str, Any]]) -> Quantities:
        """Return what the region would return next, after a pass that left `attributes` in its modules."""
        self._set_buffers(self._after)
        outputs, _ = self._run(attributes)
        return {f"{NEXT} {path}": tensor.detach() for path, tensor in outputs.items()}

    def _set_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in self._buffers.items():
            buffer.data.copy_(values[name])

    def _modules(self) -> list[nn.Module]:
        return [module for layer in self.layers for module in layer.modules()]

    def _run(self, attributes: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Run the region. Return its outputs and what it wrote, by path, and the leaves that are its inputs."""
        leaves = [
            value.detach().requires_grad_(requires)
            for value, requires in zip(self._held, self._requires, strict=True)
        ]
        places = {id(value): place for place, value in enumerate(self._held)}
        copies: dict[int, Any] = {}

        inputs = [_copy(value) for value in leaves]  # a leaf cannot be edited in place, an input can

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            return inputs[places[id(tensor)]]

        self.draws.set(self.draws.first)
        rng.put(self._random)
        for module, own in zip(self._modules(), attributes, strict=True):
            _set_attributes(module, copy_containers(own))
        state: Any = None
        given: list[tuple[str, Any, Any]] = []
        for place, (call, args, keywords) in enumerate(self._calls):
            positional = rebuild(args, leaf, copies)
            named = {name: rebuild(value, leaf, copies) for name, value in keywords.items()}
            if place:
                positional = (state, *positional)
            values = name_arguments(call, positional) | named
            given += [
                (n, copy_containers(value), value) for n, value in values.items() if has_containers(value)
            ]
            state = call.function(*call.bound, *positional, **named)
        outputs = dict(find_tensors(state, "output"))
        for name, before, now in given:
            for path, new in find_changes(before, now, name):
                outputs |= dict(find_tensors(new, path))
        return outputs, leaves

    @contextmanager
    def _everything_kept(self, scope: Scope) -> Iterator[None]:
        """Gather weights, remove hooks of ZeRO-3 and policies, restore random state and autocast; undo all."""
        modules = self._modules()
        drawn = self.draws.now()
        hooks = [(module, name, getattr(module, name)) for module in modules for name in HOOKS]
        before = rng.get()
        attributes = [{k: v for k, v in vars(module).items() if _is_state(k, v)} for module in modules]
        with ExitStack() as stack:
            stack.enter_context(_gathered([p for layer in self.layers for p in layer.parameters()]))
            stack.enter_context(scope.keep_everything())
            for autocast in self._autocast:
                stack.enter_context(autocast())
            try:
                for module, name, own in hooks:
                    kept = ((key, hook) for key, hook in own.items() if not _is_machinery(hook))
                    setattr(module, name, OrderedDict(kept))
                for module in modules:
                    _pass_gradients_as_zero3(module)
                stack.enter_context(torch.enable_grad())
                yield
            finally:
                for module, name, own in hooks:
                    setattr(module, name, own)
                for module, own_attributes in zip(modules, attributes, strict=True):
                    _set_attributes(module, own_attributes)
                self._set_buffers(self._after)
                self.draws.set(drawn)
                rng.put(before)


def _kind(decision: LayerDecision, layers: Sequence[nn.Module], given: Mapping[str, Any]) -> Any:
    """Return the key of a region's kind.

    Regions of one kind have equal modules, policies, tables and types of arguments.
    """
    modules = [
        (name, type(module), sorted((k, v) for k, v in vars(module).items() if isinstance(v, (bool, str))))
        for layer in layers
        for name, module in layer.named_modules()
    ]
    weights = [
        (name, tuple(getattr(p, "ds_shape", p.shape)), p.requires_grad)
        for layer in layers
        for name, p in layer.named_parameters()
    ]
    arguments = [(name, type(value), carry_gradient(value)) for name, value in given.items()]
    how = (decision.policy, decision.mechanism, decision.reentrant, decision.offload, decision.tiling)
    return decision.table, repr((how, modules, weights, arguments))


def _errors(found: Quantities, truth: Quantities) -> dict[str, float]:
    """Return how far each quantity is off, relative to its largest value; inf: it is lost. Equal bits: no entry."""
    sizes = {}
    for name, right in truth.items():
        left = found.get(name)
        if left is not None and right is None and name.startswith("way"):
            continue  # the gradient that comes this way may be zero
        size = _error(left, right)
        if size:
            sizes[name] = size
    return sizes


def _error(left: torch.Tensor | Digest | None, right: torch.Tensor | Digest | None) -> float:
    if left is None or right is None:
        one = right if left is None else left
        return 0.0 if one is None or _is_zero(one) else math.inf
    if isinstance(left, Digest) or isinstance(right, Digest):
        assert isinstance(left, Digest) and isinstance(right, Digest)
        if left.bits == right.bits:
            return 0.0
        return max(abs(left.norm - right.norm) / max(right.norm, TINY), TINY)
    if left.shape != right.shape or left.dtype != right.dtype:
        return math.inf
    if _bits(left).equal(_bits(right)):
        return 0.0
    largest = right.double().abs().max().item()
    size = (left.double() - right.double()).abs().max().item() / max(largest, TINY)
    return max(size, TINY) if math.isfinite(size) else math.inf


def _beyond_noise(errors: dict[str, float], noise: dict[str, float], most: float) -> dict[str, float]:
    """Return the errors that the noise of a nondeterministic device does not explain; noise counts up to `most`."""
    return {name: size for name, size in errors.items() if size > MOST_NOISE * min(noise.get(name, 0.0), most)}


def _in_words(name: str, size: float) -> str:
    if size == math.inf:
        return f"{name} is lost, which the pass that keeps everything has"
    return (
        f"{name} differs from that of the pass that keeps everything by up to {size:.2g} of its largest value"
    )


def _flag(there: bool) -> torch.Tensor | None:
    return torch.ones(()) if there else None


def _is_zero(value: torch.Tensor | Digest) -> bool:
    return value.norm == 0 if isinstance(value, Digest) else not bool(value.any())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor` with its strides, by which kernels are chosen: an expanded mask stays expanded."""
    slim = tensor[tuple(slice(None) if stride else slice(0, 1) for stride in tensor.stride())]
    if not torch._debug_has_internal_overlap(slim):
        strided = torch.empty_strided(slim.size(), slim.stride(), dtype=slim.dtype, device=slim.device)
        return strided.copy_(slim).expand(tensor.shape)
    return tensor.clone()


def _digest(gradient: torch.Tensor) -> Digest:
    flat = gradient.detach().contiguous().reshape(-1)
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    norm = torch.linalg.vector_norm(flat, dtype=torch.float32).item()
    return Digest(norm, (int(words.sum(dtype=torch.int64)), int(torch.hash_tensor(flat).view(torch.int64))))


def _note_gradient(noted: _Input | _Output, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        return
    with _disable_current_modes():
        noted.gradient = _copy(gradient.detach()) if noted.gradient is None else noted.gradient + gradient


def _note_digest(digests: list[Digest], gradient: torch.Tensor) -> None:
    with _disable_current_modes():
        digests.append(_digest(gradient))


def _reach(outputs: Sequence[torch.Tensor], ends: set[int]) -> dict[int, Any]:
    """Return, by id, the autograd nodes that backward reaches from `outputs`, without going beyond those in `ends`."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: dict[int, Any] = {}  # holds each node: while it lives, its id is unique
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            if id(node) not in ends:
                waiting += [following for following, _ in node.next_functions if following is not None]
    return seen


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _is_machinery(hook: Any) -> bool:
    """Return whether ZeRO-3 or a policy added this hook; the model's own hooks are part of what it computes."""
    while isinstance(hook, partial):
        hook = hook.func
    module = str(getattr(hook, "__module__", ""))
    return module.partition(".")[0] in ("deepspeed", "remat") and not module.startswith("remat.model.")


def _pass_gradients_as_zero3(module: nn.Module) -> None:
    """Put an autograd node at each input and output of a module, as ZeRO-3 does: gradients are added up there.

    Without these nodes they would be added in another order, which rounds differently.
    """
    if "post_bwd_fn" not in vars(module):
        return
    from deepspeed.runtime.zero.utils import apply_to_tensors_only

    module.register_forward_pre_hook(lambda _, args: apply_to_tensors_only(_Same.apply, args))
    module.register_forward_hook(lambda _, args, output: apply_to_tensors_only(_Same.apply, output))


def _gathered(weights: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """All-gather ZeRO-3's shards of `weights`, which is a collective: all ranks must call it alike."""
    sharded = [
        weight for weight in weights if hasattr(weight, "ds_status") and weight.ds_status.name != "AVAILABLE"
    ]
    if not sharded:
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(sharded)
    return gathered


def _is_torchs(generator: torch.Generator) -> bool:
    """Return whether `generator` is torch's own of its device: it is if their states are equal."""
    own = torch.default_generator
    if generator.device.type == "cuda":
        own = torch.cuda.default_generators[generator.device.index or 0]
    return torch.equal(own.get_state(), generator.get_state())


def _plain(attributes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the attributes that are single values, which `==` compares; tensors and containers are left out."""
    return [{k: v for k, v in own.items() if isinstance(v, (bool, int, float, str))} for own in attributes]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of `module` itself that a forward may change, with containers copied."""
    return {name: copy_containers(value) for name, value in vars(module).items() if _is_state(name, value)}


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    own = vars(module)
    for name in [name for name, value in own.items() if _is_state(name, value) and name not in attributes]:
        del own[name]
    own.update(attributes)


def _is_state(name: str, value: Any) -> bool:
    kinds = (bool, int, float, str, tuple, list, dict, set, torch.Tensor, type(None))
    return type(value) in kinds and name not in ("_parameters", "_buffers", "_modules") and "hooks" not in name
