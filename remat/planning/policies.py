"""Compare all policies on one model (`remat compare policies`), counted op by op on meta tensors, without weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from remat.activation_checkpointing import apply
from remat.activation_checkpointing.policy import without_engine
from remat.config import compose, validation
from remat.config.command_line import without_policy
from remat.config.options import CheckpointingConfig, ConfigError, PeftMethod, RunConfig
from remat.config.units import MIB
from remat.model import hf_model, layers, meta_kernels
from remat.parallel import sequence_parallel
from remat.planning import budget, strategy
from remat.planning.simulation import simulate, zero3
from remat.planning.simulation.zero3 import Event, Parameters

META = torch.device("meta")


@dataclass(frozen=True)
class PolicyRow:
    """The counts of one policy on one micro-batch.

    Bytes are means per layer; FLOPs are matrix products and attention. `hidden_states` is kept bytes in units
    of one hidden state [micro batch, seq, hidden]. `zero3_gathers` is the volume that ZeRO-3 gathers, in units
    of the model's size, without reuse (0: not known, with adapters). A policy that cannot work here has only
    `refused`.
    """

    name: str
    kept_bytes: float = 0.0
    hidden_states: float = 0.0
    moved_bytes: float = 0.0
    discarded_bytes: float = 0.0
    recomputed_of_forward: float = 0.0
    zero3_gathers: float = 0.0
    refused: str = ""


def rows(overrides: list[str]) -> Iterator[PolicyRow]:
    """Yield one row per choice of `conf/checkpointing`, for the run that `overrides` ask for. Raises ConfigError."""
    compose.compose_run(without_policy(overrides))  # a bad override is one message, not one per policy
    for name in compose.group_choices()["checkpointing"]:
        try:
            chosen = compose.compose_run(
                [*without_policy(overrides), f"checkpointing={name}"]
            ).run.checkpointing
            own = [word for word in overrides if _belongs(word, chosen)]
            cfg = compose.compose_run([*without_policy(overrides), f"checkpointing={name}", *own]).run
            yield count(cfg, name)
        except ConfigError as error:
            yield PolicyRow(name, refused=" ".join(str(error).split()))


def _belongs(word: str, chosen: CheckpointingConfig) -> bool:
    owners = {
        owner for name, owner in validation.OPTIONS_OF.items() if word.startswith(f"checkpointing.{name}")
    }
    return bool(owners & {chosen.policy, *chosen.layers.values()})


def on_gpu(cfg: RunConfig) -> bool:
    """Return whether the figures are for a GPU, which the options name or this machine has; else for a CPU."""
    return cfg.hardware.gpu is not None or torch.cuda.is_available()


def count(cfg: RunConfig, name: str) -> PolicyRow:
    """Apply the policy of `cfg` to a model of meta tensors and count. Raises ConfigError when it cannot work."""
    adapted = cfg.peft.method is not PeftMethod.none
    decided = strategy.decide(cfg, world_size=cfg.hardware.ranks, can_pin=True)
    net = strategy.meta_model(cfg, decided.zero_stage)
    if not decided.decisions:
        raise ConfigError(f"{type(net).__name__} has no repeated layers")
    if budget.is_open(decided.decisions):
        raise ConfigError("it keeps what there is room for; see remat plan with checkpointing.budget_gib=GIB")
    with ExitStack() as undo:
        given = undo.enter_context(sequence_parallel.planned(cfg.train, cfg.model, decided.packed, net))
        applied = apply.apply(
            net,
            without_engine(decided.decisions),
            cfg.checkpointing,
            zero_stage=decided.zero_stage,
            device=META,
            allocators=decided.allocators,
        )
        undo.callback(applied.remove)
        watch, events = applied.watch(META), list[Event]()
        with (
            meta_kernels.explained(net),
            meta_kernels.as_in_a_run(decided.zero_stage, on_gpu=on_gpu(cfg), packed=decided.packed.apart),
            zero3.recorded(net, events.append),
            applied.micro_batch(),
            watch,
        ):
            simulate.step(
                net,
                micro_batch_size=cfg.train.micro_batch_size,
                seq_len=cfg.train.seq_len,
                forward_done=watch.forward_done,
                given=given,
            )
    gathered = zero3.elements_without_reuse(Parameters.of(net), events)
    depth = len(layers.decoder_layers(net))
    width = hf_model.hidden_size(hf_model.shape_config(cfg.model))
    hidden = sequence_parallel.tokens_of_rank(cfg.train) * width
    kept = sum(watch.kept_bytes.get(index, 0) for index in range(depth)) / depth
    return PolicyRow(
        name,
        kept_bytes=kept,
        hidden_states=kept / (hidden * hf_model.DTYPES[cfg.train.precision].itemsize),
        moved_bytes=sum(c.moved_bytes for c in applied.counts) / depth,
        discarded_bytes=sum(c.discarded_bytes for c in applied.counts) / depth,
        recomputed_of_forward=watch.total_flops("recompute") / watch.total_flops("forward"),
        zero3_gathers=0.0 if adapted else gathered / sum(p.numel() for p in net.parameters()),
    )


HEADINGS = [
    "policy",
    "kept MiB/layer",
    "kept h",
    "host MiB/layer",
    "discarded MiB/layer",
    "recomputed",
    "gathers",
]
NAME_WIDTH = 20


def cells(row: PolicyRow) -> list[str]:
    """Return the figures of a row under HEADINGS; for a refused policy, its name and the reason."""
    if row.refused:
        return [row.name, f"refused: {row.refused}"]
    return [
        row.name,
        f"{row.kept_bytes / MIB:.4g}",
        f"{row.hidden_states:.2f}",
        f"{row.moved_bytes / MIB:.4g}" if row.moved_bytes else "-",
        f"{row.discarded_bytes / MIB:.4g}" if row.discarded_bytes else "-",
        f"{row.recomputed_of_forward:.1%}",
        f"{row.zero3_gathers:.2f}" if row.zero3_gathers else "-",
    ]


def lines(found: Iterator[PolicyRow]) -> Iterator[str]:
    """Yield the lines of the table, each as soon as its policy is counted."""
    first, *headings = HEADINGS
    yield "  ".join([first.ljust(NAME_WIDTH), *headings])
    for row in found:
        name, *figures = cells(row)
        if not row.refused:
            figures = [f.rjust(len(heading)) for f, heading in zip(figures, headings, strict=True)]
        yield "  ".join([name.ljust(NAME_WIDTH), *figures])


def caption(cfg: RunConfig) -> str:
    """Return the caption of the table: model, batch, precision and machine that the figures belong to."""
    decided = strategy.decide(cfg, world_size=cfg.hardware.ranks, can_pin=True)
    train = cfg.train
    adapters = {PeftMethod.none: "", PeftMethod.lora: ", LoRA", PeftMethod.qlora: ", QLoRA"}[cfg.peft.method]
    return (
        f"{decided.facts.class_name}{adapters}, {train.micro_batch_size} x {train.seq_len} tokens, {train.precision}, "
        f"{cfg.model.attention}, ZeRO-{decided.zero_stage}, as on a {'GPU' if on_gpu(cfg) else 'CPU'}. Means per "
        "layer, counted on the model's own operations, nothing measured.\n"
        "h = one hidden state; recomputed = matrix products and attention that run again, of those of the forward;\n"
        "gathers = volume that ZeRO-3 gathers per micro-batch in model sizes, without reuse."
    )
