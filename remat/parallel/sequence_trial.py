"""Test before a run whether a model supports sequence parallelism; refuse it with the reason where it does not.

A small copy of the model runs on a CPU. Two threads stand for two ranks, and their logits must equal those of the whole
sequences. So no list of names is needed to find a layer that mixes tokens outside of the attention interface (state
spaces, convolutions, linear attention), a mask that is not passed on, or positions that count from a block's start.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from remat.config.options import Attention, ConfigError, ModelConfig, Packing, TrainConfig
from remat.data.batches import Part, own_part
from remat.data.blocks import Blocks
from remat.model import packing, small_copy
from remat.model.packing import Packed
from remat.parallel.sequence_parallel import SequenceParallel
from remat.parallel.ulysses import OPTION

RANKS = 2
SAME_WITHIN = 1e-4  # share of the largest logit: fewer heads at a time round differently
WAIT_S = 60.0
STREAM = Packed(Packing.stream, "")  # documents are not kept apart
KERNELS = (Attention.sdpa, Attention.eager, Attention.flash_attention_2)


def check(
    train: TrainConfig,
    model: ModelConfig,
    config: PretrainedConfig,
    skeleton: PreTrainedModel,
    packed: Packed,
) -> None:
    """Raise one ConfigError with every reason why ranks cannot share the sequences of this model.

    `skeleton` is the model of `config` on the meta device.
    """
    size = train.sequence_parallel_size
    if size == 1:
        return
    found = []
    # the first call of attention checks heads that differ between layers
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if type(heads) is int and heads % size:
        found.append(
            f"{OPTION}={size} does not divide num_attention_heads={heads} of {type(skeleton).__name__}: use a size "
            "that does"
        )
    if train.seq_len < size:
        found.append(f"{OPTION}={size} with train.seq_len={train.seq_len}: a rank has no token; use {OPTION}=1")
    if model.attention not in KERNELS:
        found.append(
            f"{OPTION}={size} with model.attention={model.attention}: its block mask is made for a rank's block alone; "
            "use model.attention=sdpa"
        )
    elif problem := small_copy.ask(
        _problem, config, skeleton, model, model.attention, packed if packed.apart else STREAM
    ):
        found.append(
            f"{OPTION}={size}: {type(skeleton).__name__} cannot share its sequences: {problem}; use {OPTION}=1"
        )
    if found:
        raise ConfigError("\n".join(found))


def _problem(net: Any, attention: Attention, packed: Packed) -> str:
    """Return why `net` cannot share its sequences; "" when it can."""
    try:
        with packing.kernel_of(net, attention):
            found = _difference(net, STREAM, attention)
            return _difference(net, packed, attention) if packed.apart and not found else found
    except ConfigError as error:
        return str(error).removeprefix(f"{OPTION}={RANKS}: ").removesuffix(f"; use {OPTION}=1")
    except Exception as error:  # a model that does not support it can raise any error too
        return small_copy.first_line(error)


def _difference(net: Any, packed: Packed, attention: Attention) -> str:
    """Return how the logits of ranks differ from those of whole sequences; "" when they do not."""
    batch = _batch(net, packed)
    beside = packing.ends(packed, attention, batch)
    expected = net(**packing.given(packed, batch, net), **beside, use_cache=False).logits
    pieces, calls = _in_threads(net, batch, packed, attention)
    if not calls:
        return "its attention does not go through transformers' AttentionInterface"
    found = torch.cat(pieces, dim=1)[:, : expected.shape[1]]
    differs = float((found - expected).abs().max() / expected.abs().max())
    if differs <= SAME_WITHIN:
        return ""
    what = "of packed documents " if packed.apart else ""
    return (
        f"the logits {what}are not those of whole sequences, but {differs:.1g} of the largest beside them: something "
        "in it looks along the sequence, or at positions, by itself"
    )


def _batch(net: Any, packed: Packed) -> dict[str, Tensor]:
    """Return two rows of two documents each. Their length is not a multiple of the number of ranks."""
    lengths = torch.tensor(packing.LENGTHS)
    shape = (len(lengths), int(lengths[0].sum()) - 1)
    vocabulary = net.get_input_embeddings().weight.shape[0]
    lowest = min(packing.LOWEST_ID, vocabulary // 2)
    tokens = torch.randint(lowest, vocabulary, shape, generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row])[:-1] for row in lengths.tolist()])
    return {"input_ids": tokens} | ({"position_ids": positions} if packed.apart else {})


def _blocks(batch: dict[str, Tensor]) -> Blocks:
    """Return the rows of `batch` as `Blocks`, from which ranks read their parts."""
    tokens = batch["input_ids"].numpy().astype(np.int32)
    if "position_ids" not in batch:
        return Blocks(tokens)
    starts = (batch["position_ids"] == 0).numpy()
    restarts = starts[:, 1:].sum(1, dtype=np.int32)
    return Blocks(tokens, starts=np.packbits(starts, axis=1), restarts=restarts).documents_apart()


class _ThreadGroup:
    """A `Group` whose ranks are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._here = threading.local()
        self._meeting = threading.Barrier(size)
        self._sent: list[Tensor | None] = [None] * size

    @property
    def rank(self) -> int:
        return int(self._here.rank)

    def enter(self, rank: int) -> None:
        self._here.rank = rank

    def leave(self) -> None:
        """Make the threads fail that wait for this one."""
        self._meeting.abort()

    def exchange(self, blocks: Tensor) -> Tensor:
        self._sent[self.rank] = blocks
        self._meeting.wait(WAIT_S)
        found = torch.stack([sent[self.rank] for sent in self._sent if sent is not None])
        self._meeting.wait(WAIT_S)
        return found

    def sum(self, value: Tensor) -> Tensor:
        return self.exchange(value.expand(self.size, *value.shape)).sum(0)


def _in_threads(
    net: Any, batch: dict[str, Tensor], packed: Packed, attention: Attention
) -> tuple[list[Tensor], int]:
    """Return the logits of each rank's block, and how often attention was called."""
    group, blocks = _ThreadGroup(RANKS), _blocks(batch)
    sequence = SequenceParallel(net, group, packed, attention)

    def run(rank: int) -> Tensor:
        group.enter(rank)
        try:
            with torch.no_grad():  # grad mode is per thread
                own = own_part(blocks, np.arange(len(blocks)), Part(rank, RANKS))
                inputs = sequence.inputs(own, torch.device("cpu"))
                del inputs["targets"]
                logits: Tensor = net(**inputs, use_cache=False).logits
                return logits
        except Exception:
            group.leave()
            raise

    try:
        with ThreadPoolExecutor(RANKS) as pool:
            ranks = [pool.submit(run, rank) for rank in range(RANKS)]
    finally:
        sequence.remove()
    errors = [error for rank in ranks if (error := rank.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [rank.result() for rank in ranks], sequence.calls
