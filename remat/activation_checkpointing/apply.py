"""Apply a policy: carry out the decision for each decoder layer on the model. Only this file changes the model.

The hook point is transformers' `GradientCheckpointingLayer`: two attributes per layer, no patch of a class. It
checkpoints `forward` inside the module's hooks, so ZeRO-3 gathers a layer's weights before its recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from remat.activation_checkpointing.compiled import CompiledLayers
from remat.activation_checkpointing.mechanisms import budget, tiles
from remat.activation_checkpointing.mechanisms.arguments import Replayable, find_tensors, refuse_what_is_lost
from remat.activation_checkpointing.mechanisms.counters import LayerCounters, PolicyNotApplied, Scope, one_run
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, LayerDecision, LayerForward, Setup, Site
from remat.activation_checkpointing.mechanisms.offload import HostOffload
from remat.activation_checkpointing.mechanisms.saved_tensors import SavedTensors
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.activation_checkpointing.replay import Recorder
from remat.config.options import CheckpointingConfig, ConfigError, StorageDtype
from remat.machine.allocator import TORCH_DEFAULT, Allocators
from remat.model.layers import Stacks, find_stacks


@dataclass
class Applied:
    """An applied policy, and what each layer has done since the last `reset`. `remove()` restores the model."""

    decisions: Sequence[LayerDecision] = ()
    model: nn.Module | None = None
    counts: list[LayerCounters] = field(default_factory=list)
    scope: Scope = field(default_factory=Scope)
    offload: HostOffload | None = None
    before_micro_batch: list[Callable[[], None]] = field(default_factory=list)
    recorder: Recorder | None = None  # of the first micro-batch
    stacks: Stacks = field(default_factory=lambda: Stacks([], []))
    shared: dict[Any, Any] = field(default_factory=dict)  # what mechanisms make once for several layers
    compiled: CompiledLayers | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)

    def reset(self) -> None:
        for counts in self.counts:
            counts.clear()

    @contextmanager
    def first_forward(self) -> Iterator[None]:
        """Wrap a forward that has no backward, in which layers under a table learn what they compute."""
        with self.micro_batch():
            yield
        self.reset()

    @property
    def learns(self) -> bool:
        """Return whether a layer under a table does not know yet what it computes."""
        known = self.graphs()
        return any(d.mechanism == budget.MECHANISM and i not in known for i, d in enumerate(self.decisions))

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Wrap one forward and its backward.

        Raises PolicyNotApplied when torch finds that a recomputation is not the forward that it repeats.
        """
        for reset in self.before_micro_batch:
            reset()
        for counts in self.counts:
            counts.abandoned = counts.expected - counts.recomputations
        try:
            with self.offload.micro_batch() if self.offload else nullcontext():
                yield
        except CheckpointError as error:
            raise PolicyNotApplied(
                "checkpointing: a layer did something else when it ran again (it has a state of its own, or draws "
                "random numbers outside of torch), so it cannot be recomputed; give such layers the policy none with "
                f"checkpointing.layers. torch says: {str(error).splitlines()[0]}"
            ) from error

    def watch(self, device: torch.device) -> OpTracer:
        """Return the context that traces bytes and FLOPs per layer."""
        return OpTracer(
            self.scope,
            device,
            weights=self.model.parameters if self.model else tuple,
            ignored=self.offload.storages if self.offload else tuple,
            layers=self.stacks.layers(),
            counts=self.counts,
            offload=self.offload,
        )

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Wrap one forward and its backward, and note what `Recorder.replay` needs."""
        assert self.model is not None or not self.decisions
        rounded = self.offload is not None and self.offload.cfg.dtype is not StorageDtype.same
        self.recorder = recorder = Recorder(
            self.model or nn.Module(), self.stacks.layers(), self.decisions, self.scope, rounded=rounded
        )
        self.scope.note_later_run = recorder.later_run
        try:
            yield recorder
        finally:
            self.recorder = self.scope.note_later_run = None

    def graphs(self) -> dict[int, Any]:
        """Return what the layers under a table compute and save, by index."""
        return dict(self.shared.get(budget.GRAPHS, {}))

    def remove(self) -> None:
        self.cleanup.close()


def apply(
    model: nn.Module,
    decisions: Sequence[LayerDecision],
    cfg: CheckpointingConfig,
    *,
    zero_stage: int = 0,
    device: torch.device | None = None,
    tensor_parallel: Any = None,
    compiled: CompiledLayers | None = None,
    allocators: Allocators = TORCH_DEFAULT,
    graphs: Mapping[int, Any] | None = None,
) -> Applied:
    """Apply `decisions` to `model`: one per decoder layer, or none at all, which changes nothing.

    `device` is where the model computes, `tensor_parallel` the group object that DeepSpeed's partitioning takes,
    `compiled` the compiler of layers, if that is asked for, `allocators` how torch rounds page-locked memory, `graphs`
    what layers under a table compute, if it is known (`Applied.graphs`).
    Raises ConfigError when the model lacks a part that the policy needs.
    """
    if not decisions:
        return Applied()
    stacks = find_stacks(model)
    layers = stacks.layers()
    if len(layers) != len(decisions):
        raise ValueError(f"the plan has {len(decisions)} layers, the model {len(layers)}")
    _refuse_shared_weights(model, layers, decisions)
    counts = [LayerCounters() for _ in decisions]
    applied = Applied(decisions, model, counts, stacks=stacks, compiled=compiled)
    if compiled is not None:
        applied.cleanup.callback(compiled.close)
    try:
        if any(decision.offload for decision in decisions):
            applied.offload = HostOffload(cfg.offload, device or torch.device("cpu"), len(layers), allocators)
        setup = Setup(
            model, decisions, applied.counts, applied.scope, cfg, zero_stage, tensor_parallel, applied.cleanup,
            compiled=compiled is not None,
        )  # fmt: skip
        setup.shared[budget.GRAPHS] = {
            index: graph
            for index, graph in (graphs or {}).items()
            if decisions[index].mechanism == budget.MECHANISM
        }
        for index, layer in enumerate(layers):
            run = _treat(applied, setup, index, layer)
            hook = mock.patch.multiple(
                layer, create=True, gradient_checkpointing=True, _gradient_checkpointing_func=run
            )
            applied.cleanup.enter_context(hook)
            tiles.slice_mlp(Site(index, layer, setup, offload=None))
        applied.before_micro_batch, applied.shared = setup.before_micro_batch, setup.shared
        if any(decision.reentrant for decision in decisions):
            _let_embeddings_carry_gradient(model, applied.cleanup)
    except BaseException:
        applied.remove()
        raise
    return applied


def _refuse_shared_weights(
    model: nn.Module, layers: Sequence[nn.Module], decisions: Sequence[LayerDecision]
) -> None:
    """Raise ConfigError for a trained weight that a reentrant region shares: its gradient would come in parts."""
    if not any(decision.reentrant for decision in decisions):
        return
    everywhere = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for first in {decision.first for decision in decisions if decision.reentrant}:
        region = layers[first : decisions[first].last + 1]
        named = [item for layer in region for item in layer.named_parameters(remove_duplicate=False)]
        inside = Counter(id(p) for _, p in named)
        for name, weight in named:
            if weight.requires_grad and everywhere[id(weight)] > inside[id(weight)]:
                raise ConfigError(
                    f"checkpointing: weight {name} of {type(region[0]).__name__} (layer {first}) is also used "
                    "elsewhere, and the reentrant variant would hand over its gradient in parts; use "
                    "checkpointing=full checkpointing.reentrant=false"
                )


def _treat(applied: Applied, setup: Setup, index: int, layer: nn.Module) -> LayerForward:
    """Return the callable that runs one layer: the policy's mechanism inside, the treatment of saved tensors around."""
    decision, counts, scope, host = setup.decisions[index], setup.counts[index], setup.scope, applied.offload
    offload = host.layer(index, counts) if host and decision.offload else None
    site = Site(index, layer, setup, offload)
    mechanism = decision.mechanism.treat(site)
    by_table = decision.mechanism == budget.MECHANISM
    runs_once = by_table or (decision.mechanism == KEEP and not decision.offload)
    saved = SavedTensors(
        layer,
        by_reference=setup.zero_stage == 3,
        offload=None if by_table else offload,
        discarded=site.discarded,
        model=setup.model,
    )
    applied.cleanup.callback(saved.close)

    @contextmanager
    def around(earlier: int, values: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Wrap one run of the layer, its first or a later one."""
        with ExitStack() as entered:
            if not earlier and applied.recorder is not None:
                entered.enter_context(applied.recorder.first_run(index))
            entered.enter_context(one_run(index, counts, scope, earlier))
            if not earlier and decision.mechanism.runs_layer_again:
                guard = refuse_what_is_lost(values(), site.name, reentrant=decision.reentrant)
                entered.enter_context(guard)
            yield

    def run(layer_forward: LayerForward, *args: Any) -> Any:
        if scope.keeping or not torch.is_grad_enabled():
            return layer_forward(*args)
        if decision.reentrant:
            refuse_second_call(counts, site.name)
        counts.forwards += 1
        layer_forward = applied.compiled.take(layer_forward) if applied.compiled else layer_forward
        recorder = applied.recorder
        if runs_once and recorder is None and args:  # the layer never runs again, so no call needs to be kept
            with scope.inside(index), saved.hooks():
                return follow(mechanism(layer_forward, *args))
        call, args = Replayable(layer_forward, around).put_state_first(args)
        if recorder is not None:
            recorder.before(index, layer, call, args)
        with scope.inside(index), saved.hooks():
            output = mechanism(call, *args)
        return follow(recorder.after(index, output) if recorder is not None else output)

    def follow(output: Any) -> Any:
        if host is not None:
            host.follow(index, output)
        counts.output_bytes = sum(tensor.nbytes for _, tensor in find_tensors(output))
        return output

    return run


def refuse_second_call(counts: LayerCounters, layer: str) -> None:
    """Raise ConfigError when the reentrant `layer` runs a second time before the backward of its first call.

    The backward of each call would hand over a part of the gradient of its weights. DeepSpeed would take the first part
    for the whole, or add the parts up in another order.
    """
    if counts.expected - counts.recomputations > counts.abandoned:
        raise ConfigError(
            f"checkpointing: {layer} runs several times in one forward, and the reentrant variant would hand over the "
            "gradient of its weights in parts; use checkpointing=full checkpointing.reentrant=false"
        )


def _let_embeddings_carry_gradient(model: nn.Module, cleanup: ExitStack) -> None:
    """Make a frozen embedding (LoRA) return a tensor that requires grad: the reentrant variant needs one."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]

    def mark(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            output.requires_grad_(True)

    cleanup.callback(embedding.register_forward_hook(mark).remove)
