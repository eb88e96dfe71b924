"""Compute the next-token cross entropy, summed over trained tokens, in two forms of the same value.

`full` builds the logits of all tokens. With the fp32 copy, log-softmax and gradient, it takes 12 bytes x tokens x
vocabulary at the peak. `chunked` has the logits of one chunk at a time: the output layer itself loops over chunks of
tokens. Each chunk runs under activation checkpointing (torch) and through DeepSpeed's fp32 cross entropy, which keeps
one number per token (Triton on CUDA). It costs one more forward of the output layer.

`RouterBalance` adds the load-balancing loss of a mixture of experts, if the run has one.

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
from transformers.pytorch_utils import Conv1D

from remat.config.options import Compilation, ConfigError, LossKind, RunConfig
from remat.machine import distributed
from remat.model import layers

IGNORED = -100
CrossEntropy = Callable[[Tensor, Tensor], Tensor]  # logits [rows, vocab], targets [rows] -> the sum over rows
CHUNK_ELEMENTS = 1 << 26  # logits of one chunk: 128 MiB in bf16, 256 MiB as fp32


def _same(one: Tensor, other: Tensor) -> bool:
    """Compare two scalars. Two that are not finite count as equal, because the step guard handles them."""
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
    """Calls a Hugging Face causal language model and returns the summed loss of its labels.

    `model` is the bare transformers model, `kind` the form. Only the output layer of this model is patched, and only
    while a forward runs. Meta tensors have no values to compare, so they need `verify=False`. In the chunked form, meta
    tensors and an output layer shared by ranks need another `cross_entropy`. `enter` is applied to the hidden states.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: LossKind,
        *,
        verify: bool = True,
        cross_entropy: CrossEntropy | None = None,
        enter: Callable[[Tensor], Tensor] | None = None,
        router_coef: float = 0.0,
    ) -> None:
        self.kind = kind
        own = getattr(model.config, "output_router_logits", False)  # it would keep the logits of all routers
        self.fixed: dict[str, Any] = {"output_router_logits": False} if own else {}
        self.balance = RouterBalance(model, router_coef) if router_coef else None
        self.verified = not verify  # compared once, on the first call: it costs a host synchronisation
        self.cross_entropy = cross_entropy or fused_cross_entropy
        self.enter = enter or (lambda hidden: hidden)
        self.head = find_head(model)
        if self.head is None:
            raise ConfigError(
                f"{type(model).__name__} has no output layer: remat trains causal language models"
            )
        if kind is LossKind.chunked and (isinstance(self.head, Conv1D) or not layers.is_linear(self.head)):
            raise ConfigError(
                f"train.loss=chunked needs a Linear output layer, {type(model).__name__} has "
                f"{type(self.head).__name__}: use train.loss=full"
            )

    def __call__(self, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum of the token losses, a float32 scalar on the batch's device, not a mean.

        `module` is what is called: the DeepSpeed engine or the model. While it trains, the sum includes the balancing
        loss of its routers, once for each trained token. `batch` has `input_ids` and `labels`, both [batch, seq];
        labels are not shifted, with -100 where nothing is trained. Where ranks share sequences, `batch` has `targets`
        instead: labels that were shifted before the sequence was divided.
        """
        targets = targets_of(batch)
        # of the head, as an engine's own `training` stays true in an evaluation
        if self.balance is None or not self.head.training:
            return self._token_losses(module, batch, targets)
        self.balance.begin(batch, targets)
        return self.balance.add_to(self._token_losses(module, batch, targets))

    def _token_losses(self, module: nn.Module, batch: dict[str, Tensor], targets: Tensor) -> Tensor:
        inputs = {
            name: value for name, value in batch.items() if name not in ("labels", "targets")
        } | self.fixed
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
            hidden = self.enter(hidden)
            returned.append(chunked_loss(hidden, self.head.weight, self.head.bias, targets, self.cross_entropy))
            return returned[0]

        self.head.forward = forward
        try:
            yield returned
        finally:
            del self.head.forward


def find_head(model: Any) -> Any:
    """Return the output layer that `model` calls, or None."""
    head = model.get_output_embeddings()
    if (saved := getattr(head, "modules_to_save", None)) is not None and len(saved):
        (head,) = saved.values()  # peft's wrapper trains and calls a copy
    return head


class RouterBalance:
    """The load-balancing loss of a mixture of experts (Fedus et al. 2021, equations 4 to 6), as transformers has it.

    The loss of one block is the number of experts x the sum over experts of (share of the block's tokens sent to the
    expert) x (mean probability of the expert), over the tokens of all layers. Each block has its own loss, weighted by
    its number of trained tokens, so that micro-batches and ranks do not change the sum. With one block per micro-batch
    it equals the loss of transformers.

    No tensor leaves a layer for it, so any mechanism may recompute a layer. In backward each router's logits get their
    part of the gradient within the layer, from counts that the forward of all layers has summed. `model` is the
    transformers model, perhaps with adapters, `coef` the factor of the loss.
    """

    def __init__(self, model: Any, coef: float) -> None:
        routers, index, self.top_k, self.experts = find_routers(model)
        self.coef, self.upstream = coef, torch.empty(0)
        for router in routers:
            router.register_forward_hook(lambda router, _, output: self._attach(router, output, index))

    def begin(self, batch: Mapping[str, Tensor], targets: Tensor) -> None:
        """Begin a micro-batch of blocks; `targets` [batch, seq] as in `targets_of`."""
        mask = batch.get("attention_mask")
        real = mask if mask is not None and mask.shape == targets.shape else torch.ones_like(targets)
        self.real = real.float()
        self.trained = (targets != IGNORED).sum(1).float()  # [batch]
        self.seen: set[int] = set()  # routers that were counted
        # [batch, experts]: tokens, probabilities. A layer that made them would count as keeping them.
        self.sent, self.likely = (self.real.new_zeros(len(self.real), self.experts) for _ in range(2))

    def add_to(self, loss: Tensor) -> Tensor:
        """Return `loss` plus the balancing loss of the micro-batch whose forward has ended."""
        added: Tensor = _Balanced.apply(loss, self._value(), self)
        return added

    def gradient(self, logits: Tensor) -> Tensor:
        """Return the gradient of the balancing loss for the logits [batch x seq, experts] of one layer's router."""
        likely = self._by_block(torch.softmax(logits.float(), -1))
        weight = self.coef * self.upstream * self.trained / self._rows().square() * likely.shape[-1]
        grad = weight[:, None, None] * self.sent[:, None] * self.real[..., None]
        grad = likely * (grad - (grad * likely).sum(-1, keepdim=True))
        return grad.reshape(logits.shape).to(logits.dtype)

    def _value(self) -> Tensor:
        of_blocks = (self.sent * self.likely).sum(-1) * self.sent.shape[-1] / self._rows().square()
        return self.coef * (of_blocks * self.trained).sum()

    def _rows(self) -> Tensor:
        return self.real.sum(1).clamp(min=1) * len(self.seen)

    def _by_block(self, rows: Tensor) -> Tensor:
        return rows.reshape(*self.real.shape, -1)

    def _attach(
        self, router: nn.Module, output: tuple[Tensor, ...] | None, index: int
    ) -> tuple[Tensor, ...] | None:
        if output is None or not router.training:  # None: a table under ZeRO-3 only gathers its weights
            return output
        logits = output[index]
        with torch.no_grad():
            self._count(router, logits.detach())
        if not logits.requires_grad:  # first forward of a recomputed layer, or nothing below is trained
            return output
        used = next(i for i, t in enumerate(output) if i != index and t.is_floating_point())
        attached: Tensor = _Attached.apply(output[used], logits, self)
        return (*output[:used], attached, *output[used + 1 :])

    def _count(self, router: nn.Module, logits: Tensor) -> None:
        """Add the counts of one layer, but only once: a recomputed layer calls its router again."""
        likely = torch.softmax(logits.float(), -1)
        chosen = torch.zeros_like(likely).scatter_(-1, likely.topk(self.top_k, -1).indices, 1.0)
        sums = [(self._by_block(each) * self.real[..., None]).sum(1) for each in (chosen, likely)]
        if id(router) not in self.seen:
            self.seen.add(id(router))
            self.sent += sums[0]
            self.likely += sums[1]


class _Attached(torch.autograd.Function):
    """Return a router's expert weights unchanged. In backward add the gradient of the balancing loss to its logits."""

    @staticmethod
    def forward(ctx: Any, used: Tensor, logits: Tensor, balance: RouterBalance) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.balance = balance
        return used.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return grads[0], ctx.balance.gradient(logits), None


class _Balanced(torch.autograd.Function):
    """Add a value to the loss. In backward, which begins here, store the factor by which the loss was multiplied."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, balance: RouterBalance) -> Tensor:
        ctx.balance = balance
        return loss + value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.balance.upstream = grads[0]
        return grads[0], None, None


def find_routers(model: Any) -> tuple[list[nn.Module], int, int, int]:
    """Return the routers of a model, the index of the logits in their output, experts per token, and experts in all.

    Raises ConfigError for a model without a balancing loss in transformers.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    recorded: Any = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    routers = [module for module in base.modules() if kind and isinstance(module, kind)]
    top_k = getattr(base.config, "num_experts_per_tok", None)
    if not routers or not top_k or not hasattr(base.config, "router_aux_loss_coef"):
        raise ConfigError(
            f"train.router_aux_loss_coef: transformers has no balancing loss for {type(base).__name__}; set it to 0"
        )
    return routers, recorded.index, top_k, base.num_experts


def decide_balance(cfg: RunConfig, model: Any) -> float:
    """Return the factor of the balancing loss: the option's, or the model's own if its config enables the loss.

    Raises ConfigError for options that exclude the loss.
    """
    own = getattr(model.config, "output_router_logits", False) and model.config.router_aux_loss_coef
    coef = float(own) if cfg.train.router_aux_loss_coef is None else cfg.train.router_aux_loss_coef
    if not coef:
        return 0.0
    find_routers(model)
    asked = f"train.router_aux_loss_coef={coef:g}" + " (the model's own)" * (
        cfg.train.router_aux_loss_coef is None
    )
    wrong = []
    if cfg.train.sequence_parallel_size > 1 or cfg.train.tensor_parallel_size > 1:
        wrong.append(
            f"{asked} with ranks that share a block: a rank does not know where the others send its tokens"
        )
    if cfg.train.pipeline_parallel_size > 1:
        wrong.append(
            f"{asked} with stages: the last one, which has the loss, does not know the routers of the others"
        )
    if cfg.compile is Compilation.layers:
        wrong.append(f"{asked} with compile=layers: a compiled layer cannot count its tokens")
    if cfg.checkpointing.tiles != "1":
        wrong.append(
            f"{asked} with checkpointing.tiles={cfg.checkpointing.tiles}: it counts tokens of whole MLPs"
        )
    if wrong:
        raise ConfigError(
            "\n".join(f"{problem}; change that, or set train.router_aux_loss_coef=0" for problem in wrong)
        )
    return coef


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
        """Continue from a `state`. If it was saved by another number of ranks, rank 0 takes the whole sum."""
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
