"""Compute the next-token cross entropy, summed over trained tokens, in two forms of the same value.

`full` builds the logits of all tokens. With the fp32 copy, log-softmax and gradient, it takes 12 bytes x tokens x
vocabulary at the peak. `chunked` never has more than one chunk of logits: the output layer itself loops over chunks of
tokens. Each chunk runs under activation checkpointing (torch) and through DeepSpeed's fp32 cross entropy, which keeps
one number per token (Triton on CUDA). It costs one more forward of the output layer.

The loop over chunks runs inside the output layer's own call, so that ZeRO-3 gathers its weight once in forward and
once in backward. torch's `linear_cross_entropy` is not used: in bf16 it returns the loss itself in bf16 (3 % off at a
vocabulary of 5000).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat.config.options import ConfigError, LossKind
from remat.machine import distributed

IGNORED = -100
CrossEntropy = Callable[[Tensor, Tensor], Tensor]  # logits [rows, vocab], targets [rows] -> the sum over rows
CHUNK_ELEMENTS = 1 << 26  # logits of one chunk: 128 MiB in bf16, 256 MiB as fp32


def _same(one: Tensor, other: Tensor) -> bool:
    """Compare two scalars. Two that are not finite count as equal: the step guard deals with them."""
    return torch.allclose(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)


def shifted(labels: Tensor) -> Tensor:
    """Move `labels` [batch, seq] left by one: target i is the token after i; the last position has no target."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def targets_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the token that each position of `batch` is trained on, [batch, seq]; -100 where there is none."""
    return batch["targets"] if "targets" in batch else shifted(batch["labels"])


def chunk_tokens(vocab_size: int) -> int:
    """Return the tokens per chunk of the chunked form."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


class TokenLoss:
    """A call of a Hugging Face causal language model that returns the summed loss of its labels.

    `model` is the bare transformers model, `kind` the form. Only the output layer of this model is patched, and only
    while a forward runs. Meta tensors have no values to compare (`verify=False`) and need another `cross_entropy` in
    the chunked form.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: LossKind,
        *,
        verify: bool = True,
        cross_entropy: CrossEntropy | None = None,
    ) -> None:
        self.kind = kind
        self.verified = not verify  # compared once, on the first call: it costs a host synchronisation
        self.cross_entropy = cross_entropy or fused_cross_entropy
        self.head: Any = model.get_output_embeddings()  # type: ignore[operator]
        if (saved := getattr(self.head, "modules_to_save", None)) is not None and len(saved):
            (self.head,) = saved.values()  # the copy that is trained in peft's wrapper, and called by it
        if self.head is None:
            raise ConfigError(
                f"{type(model).__name__} has no output layer: remat trains causal language models"
            )
        if kind is LossKind.chunked and not isinstance(self.head, nn.Linear):
            raise ConfigError(
                f"train.loss=chunked needs a Linear output layer, {type(model).__name__} has "
                f"{type(self.head).__name__}: use train.loss=full"
            )

    def __call__(self, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum of the token losses, a float32 scalar on the batch's device; no mean is taken here.

        `module` is what is called (the DeepSpeed engine or the model). `batch` has `input_ids` and `labels`, both
        [batch, seq]; labels are unshifted, with -100 where nothing is trained. A block of a sequence has `targets`,
        labels that were shifted before it was cut.
        """
        targets = targets_of(batch)
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "targets")}
        if self.kind is LossKind.full:
            logits = module(**inputs, use_cache=False).logits
            return F.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        with self._armed(targets) as returned:
            output = module(**inputs, use_cache=False).logits
        if not self.verified and not _same(output, returned[0]):
            raise ConfigError(
                "this model edits its logits after the output layer (soft-capping or scaling), which "
                "train.loss=chunked would skip: use train.loss=full"
            )
        self.verified = True
        return output

    @contextmanager
    def _armed(self, targets: Tensor) -> Iterator[list[Tensor]]:
        """Make the output layer return the summed loss instead of logits while the context is entered."""
        returned: list[Tensor] = []

        def forward(hidden: Tensor) -> Tensor:
            returned.append(chunked_loss(hidden, self.head.weight, self.head.bias, targets, self.cross_entropy))
            return returned[0]

        self.head.forward = forward
        try:
            yield returned
        finally:
            del self.head.forward


class LossWindow:
    """Summed loss and trained tokens since the last row of the record.

    This rank's loss stays on its device, so that adding needs no synchronisation. The window is part of the training
    state: `state` and `restore`.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._tokens = 0

    def add(self, loss_sum: torch.Tensor, global_tokens: int) -> None:
        self._loss += loss_sum
        self._tokens += global_tokens

    def mean(self) -> float:
        """Return the mean loss per trained token over all ranks; NaN without tokens.

        Costs one all-reduce and one host synchronisation.
        """
        total = self._loss.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.item() / self._tokens if self._tokens else math.nan

    def take(self) -> float:
        """Return `mean` and start a new window."""
        mean = self.mean()
        self._loss.zero_()
        self._tokens = 0
        return mean

    def state(self) -> dict[str, Any]:
        """Return plain data, the same on all ranks. Collective.

        It holds each rank's sum: adding them here would round differently from an uninterrupted run.
        """
        return {"loss_by_rank": distributed.gather(self._loss.item()), "tokens": self._tokens}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`. When another number of ranks saved it, rank 0 takes the whole sum."""
        sums, rank = state["loss_by_rank"], dist.get_rank()
        if len(sums) != dist.get_world_size():
            sums = [math.fsum(sums)] + [0.0] * (dist.get_world_size() - 1)
        self._loss.fill_(sums[rank])
        self._tokens = int(state["tokens"])


def fused_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return DeepSpeed's summed cross entropy, which keeps the logits and one number per row."""
    from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy

    return chunked_cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    cross_entropy: CrossEntropy = fused_cross_entropy,
) -> Tensor:
    """Return the sum over tokens of cross entropy(hidden @ weight.T + bias, targets), a float32 scalar.

    `hidden` [batch, seq, dim], `weight` [vocab, dim], `targets` [batch, seq] with -100 for no loss.
    """

    def one(rows: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(F.linear(rows, weight, bias), wanted)

    size = chunk_tokens(weight.shape[0])
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    if rows.shape[0] <= size:
        return one(rows, wanted)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part, part_wanted in zip(rows.split(size), wanted.split(size), strict=True):
        total = total + checkpoint(one, part, part_wanted, use_reentrant=False)
    return total
