"""Resolve a run before any weight is read: its size, its DeepSpeed config, and what each layer keeps or recomputes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.activation_checkpointing import dry_run, policy, validation
from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision, Setting
from remat.config import compose, ds_config
from remat.config.options import (
    Attention,
    Compilation,
    ConfigError,
    LossKind,
    ModelLoad,
    OptimName,
    Packing,
    PeftMethod,
    RunConfig,
    TrainConfig,
)
from remat.machine import allocator
from remat.machine.allocator import TORCH_DEFAULT, Allocators
from remat.model import (
    adapters,
    hf_model,
    layers,
    loss,
    meta_kernels,
    noise,
    optimizer,
    own_slices,
    packing,
    positions,
)
from remat.model.packing import Packed
from remat.parallel import pipeline_parallel, sequence_parallel, sequence_trial, tensor_parallel
from remat.parallel.pipeline_parallel import Stages
from remat.planning import model_states as states
from remat.planning.simulation import repeat
from remat.planning.simulation.repeat import Repeat


@dataclass(frozen=True)
class Strategy:
    """A run's options, resolved against its model.

    `facts` describes the whole model, `held` the part of it that one rank has before ZeRO shards it. `ds` is
    the complete DeepSpeed dict. `decisions` has one entry per decoder layer (none for a model without layers).
    `stacks` says which layers these are, and which are left alone; it is empty for a model that is one stack.
    """

    facts: hf_model.ModelFacts
    held: hf_model.ModelFacts
    fields: dict[str, Any]  # the transformers config as plain data
    ds: dict[str, Any]
    zero_stage: int
    decisions: list[LayerDecision]
    packed: Packed
    stacks: str = ""  # the stacks of layers in words, where there is more than one
    warnings: list[str] = field(default_factory=list)  # that call for no change
    decided_because: str = ""  # the reason, if the decisions are not the policy's usual ones
    optimizer: OptimName = OptimName.adamw
    allocators: Allocators = TORCH_DEFAULT
    router_coef: float = 0.0  # of the loss that balances a mixture of experts
    stages: Stages | None = None  # which layers each stage has, where there are several
    facts_of_stages: tuple[hf_model.ModelFacts, ...] = ()
    stage: int | None = None  # the stage of `decisions` and `held`; None: all stages

    def decisions_of(self, stage: int) -> list[LayerDecision]:
        """Return the decisions for the layers of one stage, counted from its first one."""
        if self.stages is None:
            return self.decisions
        own = self.stages.layers(stage)
        return [_moved(self.decisions[layer], -own.start) for layer in own]

    def with_stages(self, chosen: Sequence[list[LayerDecision]]) -> Strategy:
        """Return the strategy with the decisions `chosen` for the layers of each stage, counted from its first one."""
        assert self.stages is not None
        firsts = self.stages.borders
        every = [_moved(own, first) for first, part in zip(firsts, chosen, strict=False) for own in part]
        return replace(self, decisions=every)

    @property
    def num_saved_params(self) -> int:
        """Return the number of trained parameters in a saved state, of all ranks together."""
        if self.facts_of_stages:
            return sum(facts.num_trainable_params for facts in self.facts_of_stages)
        return self.held.num_trainable_params * ds_config.tensor_ranks(self.ds)

    def flat_bytes(self, width: int) -> int:
        """Return the bytes of the buffer into which ZeRO-1 and 2 copy a rank's trained weights, `width` bytes each."""
        return width * self.held.num_trainable_params * (self.zero_stage in (1, 2))

    def of_stage(self, stage: int) -> Strategy:
        """Return the strategy of the ranks of one stage, which hold only its layers."""
        own = self.decisions_of(stage)
        return replace(self, decisions=own, held=self.facts_of_stages[stage], stage=stage)

    def model_states(self, *, data_ranks: int, ranks_per_node: int, can_pin: bool) -> list[states.Item]:
        """Return the model states of one rank, sharded over `data_ranks` ranks."""
        return states.model_states(
            num_params=self.held.num_params,
            largest_param=self.held.largest_param,
            num_trainable_params=self.held.num_trainable_params,
            largest_trainable_param=self.held.largest_trainable_param,
            quantised_weights=self.held.quantised_weights,
            ds=self.ds,
            world_size=data_ranks,
            ranks_per_node=ranks_per_node,
            gas=self.ds["gradient_accumulation_steps"],
            can_pin=can_pin,
            optimizer=self.optimizer,
            trained_shapes=self.held.trained_shapes,
            allocators=self.allocators,
        )

    def saved_moments_bytes(self, items: Sequence[states.Item], data_ranks: int) -> int | None:
        """Return the bytes of the optimizer's state in a saved state of all ranks; None: those of AdamW."""
        if self.optimizer is OptimName.adamw:
            return None
        moments = sum(item.bytes_per_rank for item in items if item.name.endswith("moments"))
        return moments * (data_ranks if self.zero_stage else 1)


def decide(cfg: RunConfig, *, world_size: int, can_pin: bool) -> Strategy:
    """Resolve the options of `cfg` against the shape of its model. Raises ConfigError.

    Needs no weight and no GPU, and no network where the recipe names the model's shape. `can_pin` says that the
    run will have CUDA; without it torch pins no host memory.
    """
    if cfg.model.attention is Attention.flash_attention_2 and not can_pin:
        raise ConfigError(
            f"model.attention={cfg.model.attention}: it needs a GPU, and there is none; set model.attention=sdpa"
        )
    config = hf_model.shape_config(cfg.model)
    shape = _shape_of(cfg, config)
    skeleton = shape.plain
    if problems := validation.skipped_layers(layers.skipped_at_random(skeleton), world_size=world_size):
        raise ConfigError("\n".join(problems))
    longer_than_made_for = positions.check_length(skeleton, config, cfg.train.seq_len, cfg.model)
    shared_by = cfg.train.tensor_parallel_size
    packed = packing.decide(cfg, config, skeleton)
    facts = shape.facts
    rendered = ds_config.render(
        ds_config.load(cfg.deepspeed.config, compose.DS_CONFIG_DIR),
        cfg.deepspeed.overrides,
        ds_config.values_of(
            cfg,
            world_size=world_size,
            hidden_size=hf_model.hidden_size(config),
            can_pin=can_pin,
            largest_param=facts.largest_param,
        ),
    )
    fields, zero_stage = config.to_dict(), ds_config.zero_stage(rendered)
    ds_config.check_second_shards(rendered, world_size=world_size, shared_by=shared_by)
    optimizer.check(cfg.optim, rendered, cfg.train.tensor_parallel_size)
    if cfg.peft.method is PeftMethod.lora:
        adapters.check_lora_offload(ds_config.param_offload_device(rendered))
        if cfg.compile is Compilation.layers:
            adapters.check_compiled(zero_stage)
    if cfg.peft.method is PeftMethod.qlora:
        adapters.check_quantised(rendered, config)
    if cfg.peft.dora:
        adapters.check_dora(zero_stage)
    devices = (ds_config.optimizer_offload_device(rendered), ds_config.param_offload_device(rendered))
    tensor_parallel.check(
        shared_by,
        skeleton,
        world_size=world_size,
        zero_stage=zero_stage,
        on_nvme="nvme" in devices,
    )
    sequence_trial.check(cfg.train, cfg.model, config, skeleton, packed)
    num_stages = cfg.train.pipeline_parallel_size
    pipeline_parallel.check(num_stages, skeleton, config, cfg.model, rendered)
    ds = tensor_parallel.rendered(pipeline_parallel.rendered(rendered, num_stages), shared_by)
    if max(num_stages, shared_by, cfg.train.sequence_parallel_size) > 1:
        del ds["train_batch_size"]  # DeepSpeed would check it against all ranks
    if cfg.model.load is ModelLoad.own_slices and (because := own_slices.refuse(cfg.model, ds)):
        raise ConfigError(own_slices.refusal(cfg.model, because))
    stages = None if num_stages == 1 else _divide(cfg, skeleton, num_stages)
    of_stages = () if stages is None else tuple(_facts_of(skeleton, stages, s) for s in range(stages.size))
    one_width = packed.form is not Packing.none
    decisions, stacks, because = _decisions(
        cfg, shape.adapted, zero_stage, has_gpu=can_pin, one_width=one_width, stages=stages
    )
    whole_head = tensor_parallel.describe_whole_head(shape.adapted, shared_by, cfg.train.loss)
    rounded_states = optimizer.describe_states(ds_config.optimizer_states(ds))
    return Strategy(
        facts=facts,
        held=max(of_stages, key=lambda facts: facts.num_params)
        if of_stages
        else _held(facts, shape.adapted, cfg.train, zero_stage),
        fields=fields,
        ds=ds,
        zero_stage=zero_stage,
        decisions=decisions,
        packed=packed,
        stacks=stacks,
        warnings=[text for text in (longer_than_made_for, whole_head, rounded_states) if text],
        decided_because=because,
        optimizer=cfg.optim.name,
        allocators=allocator.in_effect(cfg.allocator),
        router_coef=loss.decide_balance(cfg, skeleton),
        stages=stages,
        facts_of_stages=of_stages,
    )


def _facts_of(skeleton: Any, stages: Stages, stage: int) -> hf_model.ModelFacts:
    net = copy.deepcopy(skeleton)
    pipeline_parallel.keep_stage(net, stages, stage)
    return hf_model.facts(net)


def find_like(cfg: RunConfig, decided: Strategy) -> list[int]:
    """Return for each stage the first one that computes the same."""
    assert decided.stages is not None
    likes = _shape_of(cfg, hf_model.shape_config(cfg.model)).likes
    size = decided.stages.size
    keys = [
        (
            stage == 0,
            stage == size - 1,
            decided.decisions_of(stage),
            [likes[i] for i in decided.stages.layers(stage)],
        )
        for stage in range(size)
    ]
    return [keys.index(key) for key in keys]


def _divide(cfg: RunConfig, skeleton: Any, size: int) -> Stages:
    """Divide the layers over stages by the FLOPs of forward, backward and recomputation, and by kept activations.

    A layer costs 3 forwards, or 4 if it is recomputed whole; the embedding costs nothing, the output layer the products
    with its matrix. A layer that keeps only its input counts 1 for kept activations, any other layer 16, which is about
    what a decoder layer of Llama keeps in units of its input (Korthikanti et al. 2022, equation 2, in 16 bits without
    dropout). A layer whose table is still to be chosen (checkpointing=budget) counts as one that keeps all: what it
    recomputes follows from the division, as a stage of fewer layers has more room for each. Of nearly equal divisions
    the one that holds least leaves most room for tables.
    """
    text = skeleton.config.get_text_config()
    hidden = hf_model.hidden_size(skeleton.config)
    every = layers.decoder_layers(skeleton)
    decisions = policy.decide_layers(cfg.checkpointing, len(every))
    attention = 2.0 * cfg.train.seq_len * hidden  # of a causal layer, per token: scores and their sums
    times = [
        (2.0 * sum(p.numel() for p in layer.parameters()) + attention)
        * (3 + decision.mechanism.keeps_only_input)
        for layer, decision in zip(every, decisions, strict=True)
    ]
    kept = [1.0 if decision.mechanism.keeps_only_input else 16.0 for decision in decisions]
    head = 2.0 * text.vocab_size * hidden * (4 if cfg.train.loss is LossKind.chunked else 3)
    return pipeline_parallel.divide(times, kept, (0.0, head), size)


def pack_again(cfg: RunConfig, decided: Strategy) -> Strategy:
    """Return `decided` with the packing that `cfg` asks for, once the data's format is known. Raises ConfigError."""
    config = hf_model.shape_config(cfg.model)
    plain = plain_model(cfg)
    packed = packing.decide(cfg, config, plain)
    sequence_trial.check(cfg.train, cfg.model, config, plain, packed)
    return replace(decided, packed=packed)


def plain_model(cfg: RunConfig) -> Any:
    """Return the model of `cfg` without storage and adapters. It is shared, so callers must not change it."""
    return _shape_of(cfg, hf_model.shape_config(cfg.model)).plain


@dataclass(frozen=True)
class Shortened:
    """Some layers of a model. `config` describes a model of these alone; `repeats` say which stand for more layers."""

    config: Any
    layers: list[int]
    repeats: list[Repeat]

    def decisions(self, whole: Sequence[LayerDecision]) -> list[LayerDecision]:
        """Return the decisions for these layers, given those for all of them."""
        return [_moved(whole[layer], place - layer) for place, layer in enumerate(self.layers)]

    def known(self, whole: Mapping[int, Any]) -> dict[int, Any]:
        """Return what is known of these layers, given what is known of layers of the whole model, by their numbers."""
        return {place: whole[layer] for place, layer in enumerate(self.layers) if layer in whole}


def shorten(cfg: RunConfig, decisions: Sequence[LayerDecision], reach: int) -> Shortened | None:
    """Return a few layers of the model of `cfg` that stand for all of them; None if there are none.

    `reach` is how far layers may act on their neighbours, see planning/simulation/repeat.py.

    Layers are taken to do the same if they consist of the same modules and get the same decision.
    """
    config = hf_model.shape_config(cfg.model)
    text = config.get_text_config()
    depth = getattr(text, "num_hidden_layers", 0)
    if cfg.model.trust_remote_code or len(decisions) != depth:
        return None
    fields = [value for value in vars(text).values() if isinstance(value, list) and len(value) == depth]
    likes = _shape_of(cfg, config).likes
    if len(likes) != depth:
        return None
    keys = [
        (likes[i], _moved(decision, -i), tuple(repr(field[i]) for field in fields))
        for i, decision in enumerate(decisions)
    ]
    chosen, repeats = repeat.shorten(keys, reach)
    if not repeats:
        return None
    short = hf_model.with_layers(config, chosen)
    if _shape_of(cfg, short, _kept_short).likes != [likes[layer] for layer in chosen]:
        return None  # layers are built by their place in the model
    return Shortened(short, chosen, repeats)


def _moved(decision: LayerDecision, by: int) -> LayerDecision:
    return replace(decision, first=decision.first + by, last=decision.last + by)


@dataclass(frozen=True)
class _Shape:
    """The model without storage, cached because a search for settings needs it hundreds of times. It is never changed.

    Two shapes are equal if their `key` is, which holds all that the modules are made from.
    """

    key: tuple[str, ...]
    config: Any = field(compare=False)
    cfg: RunConfig = field(compare=False)

    @functools.cached_property
    def plain(self) -> Any:
        """Return the model as its library makes it."""
        return hf_model.skeleton(self.config, self.cfg.model)

    @functools.cached_property
    def adapted(self) -> Any:
        """Return the model with the run's adapters in it."""
        return self._adapted_and_facts[0]

    @functools.cached_property
    def facts(self) -> hf_model.ModelFacts:
        """Return the sizes of the model, adapters included."""
        return self._adapted_and_facts[1]

    @functools.cached_property
    def likes(self) -> list[str]:
        """Return a description of each layer's modules; layers that differ only in their number have equal ones."""
        try:
            return [
                layers.describe(layer, number)
                for number, layer in enumerate(layers.decoder_layers(self.adapted))
            ]
        except ConfigError:
            return []

    @functools.cached_property
    def _adapted_and_facts(self) -> tuple[Any, hf_model.ModelFacts]:
        method = self.cfg.peft.method
        net = self.plain if method is PeftMethod.none else hf_model.skeleton(self.config, self.cfg.model)
        quantised = method is PeftMethod.qlora
        sizes = adapters.find_quantised(layers.decoder_layers(net)) if quantised else ()
        facts = hf_model.facts(_with_adapters(self.cfg, net))  # `net` gets the adapters too
        return net, replace(facts, class_name=type(net).__name__, quantised_weights=sizes)


def _shape_of(cfg: RunConfig, config: Any, kept: Callable[[_Shape], _Shape] | None = None) -> _Shape:
    model = cfg.model
    key = (
        config.to_json_string(use_diff=False),
        str(model.attention),
        str(model.path),
        str(model.trust_remote_code),
    )
    return (kept or _kept)(_Shape((*key, repr(cfg.peft)), config, cfg))


@functools.lru_cache(maxsize=4)
def _kept(shape: _Shape) -> _Shape:
    return shape


@functools.lru_cache(maxsize=16)
def _kept_short(shape: _Shape) -> _Shape:
    return shape


def _decisions(
    cfg: RunConfig,
    skeleton: Any,
    zero_stage: int,
    *,
    has_gpu: bool,
    one_width: bool,
    stages: Stages | None,
) -> tuple[list[LayerDecision], str, str]:
    """Return the decision for each layer, the stacks in words, and why decisions are not the policy's usual ones.

    Raises ConfigError with everything that cannot work.
    """
    try:
        found = layers.find_stacks(skeleton)
    except ConfigError:
        if policy.needs_layers(cfg.checkpointing) or cfg.compile is Compilation.layers:
            raise
        return [], "", ""
    depths = found.depths if stages is None else stages.depths  # a segment of layers lies within one of them
    setting = Setting(
        zero_stage=zero_stage,
        tensor_parallel_size=cfg.train.tensor_parallel_size,
        has_gpu=has_gpu,
        attention=cfg.model.attention,
        lora_dropout=cfg.peft.dropout if cfg.peft.method is not PeftMethod.none else 0.0,
        fields=skeleton.config.to_dict(),
        activation_elements=sequence_parallel.tokens_of_rank(cfg.train) * hf_model.hidden_size(skeleton.config),
        element_bytes=hf_model.DTYPES[cfg.train.precision].itemsize,
        stacks=depths,
        layerdrop=layers.skipped_at_random(skeleton),
        one_width=one_width,
    )
    problems = validation.problems(cfg.checkpointing, list(found.layers()), setting)
    if problems:
        raise ConfigError("\n".join(problems))
    decisions, because = dry_run.choose(
        skeleton,
        cfg.checkpointing,
        depths,
        zero_stage=zero_stage,
        around=lambda: meta_kernels.as_in_a_run(0, on_gpu=has_gpu),
        has_gpu=has_gpu,
    )
    return decisions, found.describe(), because


def meta_model(cfg: RunConfig, zero_stage: int, config: Any = None) -> Any:
    """Build the model on the meta device as it will be trained, with adapters, precision and quantisation.

    `config` is its transformers config; None: that of `cfg`.
    """
    dtype = hf_model.DTYPES[cfg.train.precision]
    net: Any = hf_model.skeleton(config or hf_model.shape_config(cfg.model), cfg.model)
    net = net.to(dtype).train()
    if cfg.peft.method is PeftMethod.qlora:
        flat = zero_stage == 3
        adapters.quantise(net, layers.decoder_layers(net), dtype, torch.device("meta"), flat=flat)
    trained = _with_adapters(cfg, net).to(dtype).train()
    tensor_parallel.share_on_meta(trained, cfg.train.tensor_parallel_size, cfg.train.loss)
    noise.add(trained, cfg.train.neftune_alpha, blocks=cfg.train.sequence_parallel_size)
    return trained


def _with_adapters(cfg: RunConfig, skeleton: Any) -> Any:
    if cfg.peft.method is PeftMethod.none:
        return skeleton
    with torch.device("meta"):
        return adapters.wrap(skeleton, cfg.peft, layers.decoder_layers(skeleton))


def _held(
    facts: hf_model.ModelFacts, skeleton: Any, train: TrainConfig, zero_stage: int
) -> hf_model.ModelFacts:
    """Return the sizes of the part of the model that ZeRO shards over the ranks that hold the same part.

    ZeRO-3 shards weights before AutoTP cuts them, so weights that AutoTP leaves whole are sharded over all ranks: only
    a part of them counts here.
    """
    shared_by = train.tensor_parallel_size
    if shared_by == 1:
        return facts
    sizes = tensor_parallel.sizes_per_rank(skeleton, shared_by, train.loss)
    if zero_stage == 3:
        sizes = [-(-p.numel() // shared_by) for p in skeleton.parameters()]
    trained = [size for size, p in zip(sizes, skeleton.parameters(), strict=True) if p.requires_grad]
    return replace(
        facts,
        num_params=sum(sizes),
        largest_param=max(sizes),
        num_trainable_params=sum(trained),
        largest_trainable_param=max(trained),
    )


def counted_model(cfg: RunConfig) -> Any:
    """Build the model whose FLOPs are counted: with its adapters, 4-bit weights in their unquantised shapes."""
    plain = replace(cfg.model, attention=Attention.eager)
    return _with_adapters(cfg, hf_model.skeleton(hf_model.shape_config(cfg.model), plain))
