"""Divide the decoder layers over stages: consecutive groups of ranks, between which hidden states travel.

The first stage has the embedding; the last one has the final norm, the output layer and the run's loss. Every stage
runs the forward of the transformers model itself. Modules of other stages are replaced by one that returns its input.
So no model code is repeated here, and weights keep their names. DeepSpeed's PipelineEngine sends hidden states,
schedules (one forward, one backward: 1F1B) and updates. Every rank reads the rows of its pipeline itself, so only
hidden states are sent.

Stage s runs forward for at most `stages - s` micro-batches before the backward of the first of them.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from remat.config import ds_config
from remat.config.options import ConfigError, LossKind, ModelConfig
from remat.config.units import format_count
from remat.machine.distributed import World
from remat.model import loss, small_copy
from remat.model.layers import find_stacks

OPTION = "train.pipeline_parallel_size"
SAME_WITHIN = 1e-5  # share of the largest logit; the operations are the same, so most machines give 0
SLOWER_WITHIN = 1.05  # times the fastest division; of those within it, the one with least memory is taken
TIED = "embedding"  # DeepSpeed's key for the weight that the first and the last stage share


@dataclass(frozen=True)
class Stages:
    """The layers of each stage: stage s has layers `borders[s]` up to, not including, `borders[s + 1]`."""

    borders: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.borders) - 1

    def layers(self, stage: int) -> range:
        return range(self.borders[stage], self.borders[stage + 1])

    @property
    def depths(self) -> list[int]:
        """Return how many layers each stage has."""
        return [len(self.layers(stage)) for stage in range(self.size)]

    def in_flight(self, stage: int, accumulation: int) -> int:
        """Return the number of micro-batches whose activations a stage keeps at once under 1F1B."""
        return min(self.size - stage, accumulation)

    def bubble(self, accumulation: int) -> float:
        """Return the share of a step in which a stage waits: Narayanan et al. 2021, section 2.2.1."""
        return (self.size - 1) / (accumulation + self.size - 1)

    def describe(self) -> str:
        """Describe the stages: `0: layers 0-7; 1: layers 8-13`."""
        spans = [self.layers(stage) for stage in range(self.size)]
        return "; ".join(f"{stage}: layers {span[0]}-{span[-1]}" for stage, span in enumerate(spans))


def check(
    size: int,
    skeleton: PreTrainedModel,
    config: PretrainedConfig,
    model: ModelConfig,
    ds: Mapping[str, Any],
) -> None:
    """Raise one ConfigError with every reason why `size` stages cannot train this model.

    `skeleton` is the model of `config` on the meta device, `ds` the rendered DeepSpeed dict. Tests a small copy of the
    model.
    """
    if size == 1:
        return
    found = [*_engine(size, ds), *_model(size, skeleton)]
    if not found and (problem := small_copy.ask(_problem, config, skeleton, model)):
        found.append(
            f"{OPTION}={size}: {type(skeleton).__name__} cannot be cut into stages: {problem}; use {OPTION}=1"
        )
    if found:
        raise ConfigError("\n".join(found))


def rendered(ds: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the DeepSpeed dict `ds` adapted to stages, with overlap_comm off.

    Gradients are reduced after the last backward, so overlap_comm could hide nothing, and it would reduce tied
    gradients before they are summed.
    """
    if size == 1:
        return dict(ds)
    zero = {**ds["zero_optimization"], "overlap_comm": False}
    pipeline = {"stages": size, "activation_checkpoint_interval": 0}
    return {**ds, "zero_optimization": zero, "pipeline": pipeline}


def join(world: World, size: int) -> World:
    """Return `world` divided into stages; ranks of one stage are consecutive, so that ZeRO stays within a node."""
    return replace(world, pipeline_parallel_size=size)


def divide(layers: Sequence[float], kept: Sequence[float], ends: tuple[float, float], size: int) -> Stages:
    """Divide layers so that the slowest stage is as fast as possible.

    Of divisions at most SLOWER_WITHIN times as slow, takes the one whose fullest stage holds least memory.
    `layers` are the seconds of each layer. `ends` are the seconds before the first layer and after the last. `kept` are
    the bytes that each micro-batch in flight keeps of each layer.
    """
    time, memory = [0.0, *itertools.accumulate(layers)], [0.0, *itertools.accumulate(kept)]

    def seconds(stage: int, start: int, end: int) -> float:
        extra = ends[0] * (stage == 0) + ends[1] * (stage == size - 1)
        return time[end] - time[start] + extra

    def held(stage: int, start: int, end: int) -> float:
        return (memory[end] - memory[start]) * (size - stage)

    slowest, _ = _least(len(layers), size, seconds)

    def held_in_time(stage: int, start: int, end: int) -> float:
        late = seconds(stage, start, end) > SLOWER_WITHIN * slowest
        return float("inf") if late else held(stage, start, end)

    return Stages(_least(len(layers), size, held_in_time)[1])


def _least(count: int, size: int, cost: Callable[[int, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """Return the smallest possible cost of the most expensive stage, and the borders that give it."""
    # layers so far -> the largest cost, the sum of squares, borders
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(size):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, borders) in best.items():
            last = count if stage == size - 1 else start + 1
            for end in range(max(last, start + 1), count - (size - stage - 1) + 1):
                own = cost(stage, start, end)
                found = (max(largest, own), squares + own * own, (*borders, end))
                if end not in following or found[:2] < following[end][:2]:
                    following[end] = found
        best = following
    return best[count][0], best[count][2]


def keep_stage(net: Any, stages: Stages, stage: int) -> None:
    """Keep in `net` the modules of one stage. Replace the others by modules that return their input."""
    (stack,) = find_stacks(net).treated
    module: Any = net
    for part in stack.name.split("."):
        names = list(module._modules)
        at = names.index(part)
        gone = names[:at] * (stage > 0) + names[at + 1 :] * (stage < stages.size - 1)
        for name in gone:
            if next(module._modules[name].parameters(), None) is not None:
                module._modules[name] = _Elsewhere(module._modules[name])
        module = module._modules[part]
    for index, layer in enumerate(module):
        if index not in stages.layers(stage):
            module[index] = _Elsewhere(layer)


class _Elsewhere(nn.Module):
    """Stands for a module of another stage. Keeps its plain settings and its weight's dtype, which a model may read."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        plain = (bool, int, float, str, type(None))
        self.__dict__ |= {
            n: v for n, v in vars(part).items() if isinstance(v, plain) and n not in self.__dict__
        }
        self.weight = torch.empty(0, dtype=next(part.parameters()).dtype)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


def tied_names(net: Any) -> tuple[str, str] | None:
    """Return the names of the embedding's and the output layer's weights if they are tied. `net` is the whole model."""
    embedding, head = net.get_input_embeddings(), net.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is not embedding.weight:
        return None
    paths = {id(module): path for path, module in net.named_modules()}
    return f"{paths[id(embedding)]}.weight", f"{paths[id(head)]}.weight"


class PipelineParallel:
    """The stage of this rank: its part of the model as a module for DeepSpeed; on the last stage also the loss."""

    def __init__(self, net: Any, stages: Stages, world: World, kind: LossKind) -> None:
        """Reduce `net`, the whole model, to the stage of this rank. Collective."""
        self.stages, self.stage, self.net = stages, world.stage, net
        self.is_tied = tied_names(net) is not None
        keep_stage(net, stages, self.stage)
        self.token_loss = loss.TokenLoss(net, kind) if self.is_last else None
        self.losses: list[Tensor] = []  # on the last stage: of each micro-batch since `take_losses`
        self._weigh: Callable[[Tensor], Tensor] = lambda value: value
        self._batches: Iterator[dict[str, Any]] = iter(())
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints how the module is built
            self.module: Any = _make_module(self)

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages.size - 1

    @property
    def first_layer(self) -> int:
        """Return the index, in the whole model, of this stage's first layer."""
        return self.stages.borders[self.stage]

    @property
    def shared_weight(self) -> nn.Module | None:
        """Return the module whose tied weight another stage also holds: the embedding or the output layer."""
        if not self.is_tied or 0 < self.stage < self.stages.size - 1:
            return None
        found: nn.Module = self.net.get_output_embeddings() if self.stage else self.net.get_input_embeddings()
        return found

    def forward(self, received: Tensor) -> Tensor:
        """Return the hidden states of the next micro-batch; on the last stage its weighed loss."""
        inputs = next(self._batches)
        if self.stage > 0:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = received
        if self.token_loss is None:
            return hand_on(self.net, inputs)
        value = self.token_loss(self.net, inputs)
        self.losses.append(value.detach())
        return self._weigh(value)

    def train(
        self,
        engine: Any,
        batches: Iterator[dict[str, Any]],
        count: int,
        *,
        weigh: Callable[[Tensor], Tensor],
        around: Around,
        updates: bool = True,
        forward_done: Callable[[Tensor], object] = lambda output: None,
        before_update: Callable[[], object] = lambda: None,
    ) -> None:
        """Run forward and backward of `count` micro-batches through all stages by 1F1B. Collective.

        `batches` are inputs of the model. `weigh` turns the summed loss of a micro-batch into the loss for backward.
        With `updates` the gradients are reduced after the last backward, and the optimizer updates the weights.
        `forward_done` is called with the result of each forward, `before_update` once the gradients are reduced.
        """
        from deepspeed.runtime.pipe.schedule import TrainSchedule

        gas = engine.gradient_accumulation_steps()  # the engine divides the loss by it
        self._weigh = lambda value: gas * weigh(value)
        self._batches = batches
        schedule = TrainSchedule(count, self.stages.size, self.stage)
        _follow(engine, schedule, around, updates, forward_done, before_update)

    def evaluate(self, engine: Any, batches: Iterator[dict[str, Any]], count: int) -> None:
        """Run the forward of `count` micro-batches through all stages. Collective."""
        from deepspeed.runtime.pipe.schedule import InferenceSchedule

        self._weigh = lambda value: value
        self._batches = batches
        schedule = InferenceSchedule(count, self.stages.size, self.stage)
        _follow(engine, schedule, lambda phase: nullcontext(), False, lambda output: None, lambda: None)

    def take_losses(self, count: int, device: torch.device) -> Tensor:
        """Return and clear what `own_losses` returns."""
        found = self.own_losses(count, device)
        self.losses = []
        return found

    def own_losses(self, count: int, device: torch.device) -> Tensor:
        """Return the summed losses [count] of `count` micro-batches; zeros on all stages but the last."""
        return torch.stack(self.losses) if self.losses else torch.zeros(count, device=device)

    def let_states_hold_weights(self, engine: Any) -> None:
        """Make saved states keep a stage's weights in one file, as without stages, not in one file per layer."""
        from deepspeed import DeepSpeedEngine

        for name in ("module_state_dict", "load_module_state_dict"):
            setattr(engine, name, MethodType(getattr(DeepSpeedEngine, name), engine))


def _make_module(own: PipelineParallel) -> Any:
    """Return DeepSpeed's module for the stage of this rank. To DeepSpeed each stage is one layer. Collective."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    class Stage(PipelineModule):
        transformers_model = own.net

        def __init__(self) -> None:
            every: list[Any] = [_Elsewhere] * own.stages.size
            if own.is_tied:
                every[0] = every[-1] = TiedLayerSpec(TIED, nn.Embedding, tied_weight_attr="weight")
            super().__init__(every, num_stages=own.stages.size)

        def _partition_layers(self, method: str = "") -> None:
            self.parts = list(range(own.stages.size + 1))
            self._set_bounds(start=own.stage, stop=own.stage + 1)

        def _build(self) -> None:
            """Register this stage's modules. The gradient's norm counts a shared weight once, on the first stage."""
            del self.tied_modules  # type: ignore[has-type]  # registered by DeepSpeed: the weight would get a second name
            self.tied_modules = {}
            for name, module in own.net.named_children():
                self.add_module(name, module)
            for parameter in self.parameters():
                parameter.ds_pipe_replicated = False
                parameter.model_parallel = True
            if own.shared_weight is not None:
                own.shared_weight.weight.model_parallel = own.stage == 0  # type: ignore[union-attr]
                self.tied_modules[TIED] = own.shared_weight
                self.tied_weight_attrs[TIED] = ["weight"]

        def train(self, mode: bool = True) -> Any:
            own.net.training = mode
            return super().train(mode)

        def forward(self, received: Tensor) -> Tensor:
            return own.forward(received)

    return Stage()


def hand_on(net: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the hidden states after the last layer of a stage that is not the last, [batch, seq, hidden]."""
    own = {name: value for name, value in inputs.items() if name != "labels"}
    hidden: Tensor = net.base_model(**own, use_cache=False).last_hidden_state
    return hidden


def planned(
    net: Any, stages: Stages, stage: int, token_loss: Callable[[Any, dict[str, Any]], Tensor] | None
) -> Callable[[Any, dict[str, Any]], Tensor]:
    """Return a function that runs one micro-batch through a stage on meta tensors, given the model and its inputs.

    `net` was reduced by `keep_stage`. `token_loss` is given for the last stage only. Like the engine, the function
    keeps the received hidden states and passes a copy to the model.
    """
    width, dtype = net.config.get_text_config().hidden_size, net.dtype

    def compute(module: Any, inputs: dict[str, Any]) -> Tensor:
        own = dict(inputs)
        if stage > 0:
            ids = own.pop("input_ids")
            received = torch.empty(*ids.shape, width, dtype=dtype, device=ids.device, requires_grad=True)
            own["inputs_embeds"] = received.clone()
        return hand_on(module, own) if token_loss is None else token_loss(module, own)

    return compute


# returns the context for an instruction, given its phase of the step
Around = Callable[[str], AbstractContextManager[Any]]
# phase of each DeepSpeed instruction; waiting for another stage counts to the phase that waits
PHASES = {
    "LoadMicroBatch": "forward",
    "RecvActivation": "forward",
    "ForwardPass": "forward",
    "SendActivation": "forward",
    "RecvGrad": "backward",
    "BackwardPass": "backward",
    "SendGrad": "backward",
    "ReduceTiedGrads": "optimizer",
    "ReduceGrads": "optimizer",
    "OptimizerStep": "optimizer",
}


def _follow(
    engine: Any,
    schedule: Any,
    around: Around,
    updates: bool,
    forward_done: Callable[[Tensor], object],
    before_update: Callable[[], object],
) -> None:
    """Execute a schedule as DeepSpeed's `_exec_schedule` does, with a context around each instruction."""
    # placeholders: each stage reads its rows itself
    engine.set_dataiterator(itertools.repeat((torch.empty(0), torch.empty(0))))
    engine._reserve_pipe_buffers(schedule.num_pipe_buffers())
    engine.fwd_outputs, engine.total_loss, engine._compute_loss = [], None, True
    for instructions in schedule:
        for instruction in instructions:
            phase = PHASES[instruction.name]
            if phase == "optimizer" and not updates:
                continue
            with around(phase):
                if instruction.name == "OptimizerStep":
                    before_update()
                engine._INSTRUCTION_MAP[type(instruction)](engine, **instruction.kwargs)
            if instruction.name == "ForwardPass":
                forward_done(engine.pipe_buffers["outputs"][instruction.kwargs["buffer_id"]])


def _engine(size: int, ds: Mapping[str, Any]) -> list[str]:
    """Return a problem for each option that DeepSpeed's PipelineEngine does not support."""
    stage, found = ds_config.zero_stage(ds), []
    if stage > 1:
        found.append(
            f"{OPTION}={size} with ZeRO stage {stage}: DeepSpeed's pipeline engine sums gradients once after the last "
            "micro-batch, which stages 2 and 3 cannot wait for; use deepspeed.config=zero1"
        )
    for name, device in (
        ("optimizer", ds_config.optimizer_offload_device(ds)),
        ("parameters", ds_config.param_offload_device(ds)),
    ):
        if device:
            found.append(
                f"{OPTION}={size} with {name} on {device}: what is on the host has not been proven with stages; "
                "use deepspeed.config=zero1"
            )
    accumulated = str((ds.get("data_types") or {}).get("grad_accum_dtype"))
    low = (ds.get("bf16") or {}).get("enabled")
    if stage == 0 and low:
        found.append(
            f"{OPTION}={size} with train.precision=bf16 at ZeRO stage 0: saved states would have no names for the fp32 "
            "weights; use deepspeed.config=zero1"
        )
    if stage == 1 and low and accumulated == "fp32":
        found.append(
            f"{OPTION}={size} with data_types.grad_accum_dtype=fp32: not proven with stages; delete it"
        )
    accumulation = ds["gradient_accumulation_steps"]
    if isinstance(accumulation, int) and accumulation < size:
        found.append(
            f"{OPTION}={size} with {accumulation} micro-batches per step: stages would wait most of the time; raise "
            f"train.global_batch_size so that each pipeline has at least {size}, or lower train.micro_batch_size"
        )
    return found


def _model(size: int, skeleton: Any) -> list[str]:
    """Return why this model cannot be divided into `size` stages, judged by its modules."""
    name = type(skeleton).__name__
    try:
        stacks = find_stacks(skeleton)
    except ConfigError as error:
        return [f"{OPTION}={size}: {error}"]
    if len(stacks.treated) > 1 or stacks.left_alone:
        return [f"{OPTION}={size}: {name} has more than one stack of layers; use {OPTION}=1"]
    count = len(stacks.treated[0].layers)
    if count < size:
        return [f"{OPTION}={size}: {name} has {format_count(count, 'layer')}; give at most {count}"]
    if len(skeleton.get_submodule(stacks.treated[0].name)) != count:
        return [f"{OPTION}={size}: {name} lists layers of several kinds together; use {OPTION}=1"]
    ties = tied_names(skeleton)
    every = dict(skeleton.named_parameters(remove_duplicate=False))
    shared = [n for n in every.keys() - dict(skeleton.named_parameters()).keys() if n not in (ties or ())]
    if shared:
        return [f"{OPTION}={size}: {name} uses one weight in several places ({min(shared)}); use {OPTION}=1"]
    return []


def _problem(net: Any) -> str:
    """Return why `net` cannot be divided into stages; "" when it can."""
    try:
        return _difference(net)
    except Exception as error:  # a model that does not support it can raise any error too
        return small_copy.first_line(error)


def _difference(net: Any) -> str:
    """Return how the logits of stages differ from those of the whole model; "" when they do not."""
    vocabulary = net.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary // 2, vocabulary, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = net(input_ids=ids, use_cache=False).logits
    count = len(find_stacks(net).layers())
    stages = Stages((0, max(1, count // 2), count))
    parts = [copy.deepcopy(net) for _ in range(2)]
    for stage, part in enumerate(parts):
        keep_stage(part, stages, stage)
    held = [dict(part.named_parameters(remove_duplicate=False)).keys() for part in parts]
    if lost := dict(net.named_parameters(remove_duplicate=False)).keys() - (held[0] | held[1]):
        return f"no stage would have {min(lost)}"
    found = parts[1](inputs_embeds=hand_on(parts[0], {"input_ids": ids}), use_cache=False).logits
    differs = float((found - expected).abs().max() / expected.abs().max())
    if differs <= SAME_WITHIN:
        return ""
    return (
        f"the logits of its stages are not those of the whole, but {differs:.1g} of the largest beside them: something "
        "in it is done before the first layer, between layers, or after the last one that stages do not know of"
    )
