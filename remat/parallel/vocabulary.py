"""Cut the output layer by its rows, the vocabulary, over the ranks that share layers.

The chunked loss runs in the output layer's own call, so a rank needs only its logits of a chunk of tokens. For each
token the ranks exchange three numbers: the highest logit, the sum of exponentials, and the logit of the target, which
one rank has (Shoeybi et al. 2019, section 3). The gradient of the hidden states is summed over the ranks once, after
all chunks. `train.loss=full` reads the logits of all tokens, so it keeps the output layer whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from remat.config.options import LossKind
from remat.model.loss import IGNORED
from remat.parallel import sums

BLOCK_ELEMENTS = 1 << 22  # logits copied to fp32 at a time: 16 MiB


def find_head(model: Any, size: int, kind: LossKind) -> str | None:
    """Return the path of the output layer in `model` if `size` ranks share it; None if it is whole on each rank."""
    if size == 1 or why_whole(model, size, kind):
        return None
    head = model.get_output_embeddings()
    return next(path for path, module in model.named_modules() if module is head)


def why_whole(model: Any, size: int, kind: LossKind) -> str:
    """Return why the output layer stays whole on each of `size` ranks that share layers; "" where it does not."""
    head: Any = model.get_output_embeddings()
    if kind is not LossKind.chunked:
        return f"train.loss={kind} reads the logits of all tokens"
    if type(head) is not nn.Linear:
        return "it is no plain matrix" if not hasattr(head, "modules_to_save") else "peft trains a copy of it"
    others = (p for module in model.modules() if module is not head for p in module.parameters(recurse=False))
    if any(head.weight is other for other in others):
        return "its weight is the embedding's"
    if head.out_features % size:
        return f"its {head.out_features} rows do not divide by train.tensor_parallel_size={size}"
    return ""


class Share:
    """The loss on a rank that has the rows `first` to `first + count` of the output layer.

    `group` are the ranks that share the layer; None on meta tensors, where nothing is sent.
    """

    def __init__(self, first: int, count: int, group: Any) -> None:
        self.first, self.count, self.group = first, count, group

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the hidden states unchanged. In backward their gradient is summed over the ranks."""
        entered: Tensor = sums.SumInBackward.apply(hidden, self.group)
        return entered

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross entropy, a float32 scalar, of `logits` [rows, count] and `targets` [rows]."""
        found: Tensor = _CrossEntropy.apply(logits, targets, self)
        return found

    def place(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each target among this rank's columns, and whether the target is one of them."""
        columns = targets - self.first
        inside = (columns >= 0) & (columns < self.count)
        return columns.clamp(0, self.count - 1), inside


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy over the ranks. Keeps the logits and two numbers per row; copies a few rows at a time to fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, share: Share) -> Tensor:
        highest = sums.reduce(logits.amax(-1).float(), share.group, "max")
        columns, inside = share.place(targets)
        wanted = logits.gather(-1, columns[:, None]).squeeze(-1).float() - highest
        total = torch.cat(
            [
                (rows.float() - top[:, None]).exp_().sum(-1)
                for rows, top in zip(_split(logits, logits), _split(highest, logits), strict=True)
            ]
        )
        both = sums.reduce(torch.stack([total, torch.where(inside, wanted, 0.0)]), share.group)
        log_sum = both[0].log_()
        # `highest` and `log_sum` are kept apart: their sum would lose digits of `log_sum`
        ctx.save_for_backward(logits, targets, highest, log_sum)
        ctx.share = share
        return torch.where(targets == IGNORED, 0.0, log_sum - both[1]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, targets, highest, log_sum = ctx.saved_tensors
        columns, inside = ctx.share.place(targets)
        scale = torch.where(targets == IGNORED, 0.0, gradients[0])
        found = torch.empty_like(logits)
        parts = (found, logits, highest, log_sum, columns, inside, scale)
        for out, rows, top, logs, column, own, by in zip(*(_split(t, logits) for t in parts), strict=True):
            gradient = (rows.float() - top[:, None]).sub_(logs[:, None]).exp_()
            gradient.scatter_add_(-1, column[:, None], -own.float()[:, None])
            out.copy_(gradient.mul_(by[:, None]))
        return found, None, None


def _split(value: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    return value.split(max(1, BLOCK_ELEMENTS // logits.shape[-1]))
