"""Record one micro-batch of a real model on `meta` tensors: forward, loss and backward, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from remat.model.meta_kernels import as_in_a_run, explained
from remat.planning.simulation import peaks, reserved, zero3
from remat.planning.simulation.repeat import Lengthening, Owners, Repeat, sources
from remat.planning.simulation.timeline import Part, Place, Record, Scope, Snapshot, Timeline
from remat.planning.simulation.types import Phase, Simulation, ZeroSettings
from remat.planning.simulation.zero3 import Event, Gathers, Parameters

Loss = Callable[[nn.Module, dict[str, Any]], Tensor]
Given = Callable[[dict[str, Tensor]], dict[str, Any]]


@dataclass(frozen=True)
class Recording:
    """One recorded micro-batch. It does not depend on ZeRO's sizes: `under` applies them to it."""

    timeline: Record
    parameters: Parameters
    assumptions: list[str]
    # what the layers under a table compute and save
    graphs: Mapping[int, Any] = field(default_factory=dict)
    places: Sequence[Place] = ()  # where the parts of the timeline begin
    # the most bytes in the first forward of each layer, without those that earlier layers keep; {}: not recorded
    first_bytes: Mapping[int, int] = field(default_factory=dict)
    # what ZeRO-3 gathers, once for each setting
    _gathers: dict[ZeroSettings, Gathers] = field(default_factory=dict)

    def under(self, zero: ZeroSettings) -> Simulation:
        """Return the simulation under `zero`.

        `zero` may differ from the recorded settings in everything except whether the stage is 3.
        """
        timeline, found = self.timeline, self._peaks(zero)
        return Simulation(
            forward_peak=found.forward,
            backward_peak=found.backward,
            kept_bytes=[timeline.kept_bytes.get(layer, 0) for layer in range(timeline.num_layers)],
            host_bytes=timeline.host_bytes,
            flops={phase: timeline.flops.get(phase, 0) for phase in Phase},
            ops=timeline.ops,
            gathered_bytes=self._gathers_under(zero).gathered_bytes,
            assumptions=self.assumptions,
            peaks=found.by_part,
            forward_end_bytes=timeline.parts[timeline.backward_begins_at].at_cut.total,
            moved_bytes=timeline.moved_bytes,
        )

    def curve(self, zero: ZeroSettings) -> list[peaks.Instant]:
        """Return the bytes from the start of the micro-batch to its end, on the rank that has the highest peak."""
        return self._peaks(zero).curve

    def reserved_bytes(
        self, zero: ZeroSettings, around: reserved.Around, *, expandable: bool
    ) -> reserved.Replayed:
        """Return what torch's allocator reserves on a GPU, see `reserved.replay`."""
        gathers = self._gathers_under(zero)
        return reserved.replay(self.timeline, self.parameters, zero, gathers, around, expandable=expandable)

    def _peaks(self, zero: ZeroSettings) -> peaks.Peaks:
        return peaks.find(self.timeline, self.parameters, zero, self._gathers_under(zero))

    def _gathers_under(self, zero: ZeroSettings) -> Gathers:
        if zero not in self._gathers:
            settings = zero
            if zero.stage < 3:  # the threshold has no meaning there
                settings = replace(zero, param_persistence_threshold=-1)
            events = [part.cut for part in self.timeline.parts if isinstance(part.cut, Event)]
            self._gathers[zero] = zero3.find_gathers(self.parameters, events, settings)
        return self._gathers[zero]


def record(
    model: nn.Module,
    *,
    loss: Loss,
    scope: Scope,
    around: AbstractContextManager[Any],
    stage_3: bool,
    micro_batch_size: int,
    seq_len: int,
    given: Given | None = None,
    packed: bool = False,
    ignored: Callable[[], Iterable[torch.UntypedStorage]] = tuple,
    workspaces: bool = True,
    on_gpu: bool = True,
    marked: Sequence[nn.Module] = (),
    first: AbstractContextManager[Any] | None = None,
) -> Recording:
    """Record forward, loss and backward of one micro-batch [micro_batch_size, seq_len] on a model of meta tensors.

    `loss(model, {"input_ids", "labels"})` is what is trained on; if it is no scalar, it is given a gradient. `around`
    is the context that surrounds a micro-batch of the run. `scope` says where the computation is. `ignored` names host
    memory. `workspaces`: see Timeline; False to compare. `given` makes the model's inputs from a batch with
    "position_ids", which restart where it is `packed`; None: the batch itself. `on_gpu` false: the kernels of a CPU.
    `marked` are layers that stand for more equal ones: such a recording must be `lengthened`. If there is a `first`, a
    forward inside it comes first, of which only `first_bytes` are recorded.

    Bytes come on top of the model states. Below ZeRO-3 gradients and buckets are not part of the model states:
    `Recording.under` counts them, as they come and go.
    """
    timeline = Timeline(scope, model, ignored=ignored, workspaces=workspaces)
    assumptions: list[str] = []
    first_bytes: dict[int, int] = {}
    batch: dict[str, Any] = _batch(micro_batch_size, seq_len, given)
    with ExitStack() as stack:
        stack.enter_context(explained(model))
        stack.enter_context(as_in_a_run(3 if stage_3 else 0, assumptions, on_gpu=on_gpu, packed=packed))
        if first:
            hooks = zero3.recorded(model, lambda _: None) if stage_3 else nullcontext()
            once = Timeline(scope, model, ignored=ignored, workspaces=workspaces)
            with first, hooks, once:
                loss(model, given(batch) if given else batch)
            start = min(once.begin_bytes.values(), default=0)
            first_bytes = {n: start + most - once.begin_bytes[n] for n, most in once.most_bytes.items()}
        if marked:
            stack.enter_context(timeline.layers_marked(marked))  # before ZeRO's own hooks
        if stage_3:
            stack.enter_context(zero3.recorded(model, timeline.cut))
        stack.enter_context(timeline.gradients_taken())
        stack.enter_context(around)
        stack.enter_context(timeline)
        inputs = given(batch) if given else batch
        value = loss(model, inputs)
        timeline.forward_done()
        value.backward(torch.empty_like(value) if value.dim() else None)
        timeline.cut(None)
    return Recording(
        timeline.record(),
        Parameters.of(model),
        sorted(set(assumptions)),
        places=timeline.places if marked else (),
        first_bytes=first_bytes,
    )


def lengthened(recording: Recording, owners: Owners, repeats: Sequence[Repeat]) -> Recording:
    """Return the recording of the whole model, in which layers of the recorded one repeat.

    Raises NotRepeated if the layers that repeat do not all do the same.
    """
    lengthening = Lengthening(recording.timeline, recording.places, recording.parameters, owners, repeats)
    record, parameters = lengthening.run()
    graphs = {
        layer: recording.graphs[like]
        for layer, like in enumerate(sources(repeats, owners.num_layers))
        if like in recording.graphs
    }
    return Recording(record, parameters, recording.assumptions, graphs)


def with_first_calls(recording: Recording, first_bytes: Mapping[int, int]) -> Recording:
    """Return the recording of micro-batches, the first of which needs `first_bytes` in the forward of some layers.

    Where ZeRO-3 cuts a layer into parts, each of them is taken to need as much as the one that needs the most.
    """
    record = recording.timeline
    kept = [record.kept_bytes.get(layer, 0) for layer in range(record.num_layers)]
    forward = record.parts[: record.backward_begins_at]
    is_cut = any(part.at_cut.layer is not None for part in forward)
    most = {layer: sum(kept[:layer]) + size for layer, size in first_bytes.items()}

    def add(snapshot: Snapshot) -> Snapshot:
        if snapshot.layer is None or snapshot.total < 0:
            return snapshot
        needed = (size for layer, size in most.items() if layer == snapshot.layer or not is_cut)
        more = max(0, max(needed, default=0) - snapshot.total)
        activations, recomputed, loss = snapshot.by_kind
        return snapshot._replace(total=snapshot.total + more, by_kind=(activations + more, recomputed, loss))

    parts = [
        Part(part.cut, add(part.at_cut), add(part.peak), {k: add(v) for k, v in part.of_place.items()})
        for part in forward
    ]
    parts += record.parts[record.backward_begins_at :]
    return replace(recording, timeline=replace(record, parts=parts))


def step(
    model: nn.Module,
    *,
    micro_batch_size: int,
    seq_len: int,
    forward_done: Callable[[], None],
    given: Given | None = None,
) -> None:
    """Run forward and backward of one micro-batch [micro_batch_size, seq_len] on a model of meta tensors.

    The logits are built and receive a gradient; the loss itself is not part of it. `given`: see `record`.
    """
    batch: dict[str, Any] = _batch(micro_batch_size, seq_len, given)
    del batch["labels"]
    logits = model(**(given(batch) if given else batch), use_cache=False).logits
    forward_done()
    logits.backward(torch.empty_like(logits))


def _batch(micro_batch_size: int, seq_len: int, given: Given | None) -> dict[str, Tensor]:
    names = ("input_ids", "labels", *(("position_ids",) if given else ()))
    return {name: torch.zeros(micro_batch_size, seq_len, dtype=torch.long, device="meta") for name in names}
