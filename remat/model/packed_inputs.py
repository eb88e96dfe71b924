"""What a model is given beside the tokens so that the documents of a block are kept apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from remat.config.choices import Attention, Packing


class Way(StrEnum):
    """How a model is told where documents begin: the first of these that works."""

    positions = (
        "position ids that restart"  # the model builds its masks from them, and flash has `varlen` beside them
    )
    masks = "position ids that restart, and transformers' block-diagonal masks"
    masks_alone = "transformers' block-diagonal masks"


@dataclass(frozen=True)
class Packed:
    """`form` None: every block holds one document, and there is nothing to keep apart. `reason` is why it is so."""

    form: Packing | None
    reason: str
    way: Way | None = None

    @property
    def apart(self) -> bool:
        return self.form is Packing.documents

    def line(self) -> str:
        """For the header."""
        return f"{self.form}: {self.reason}" if self.form else self.reason


def given(packed: Packed, batch: Mapping[str, Any], net: Any) -> dict[str, Any]:
    """The micro-batch with what `net`, the model, needs to keep documents apart.

    `batch` has "position_ids" int64 [batch, seq] where documents are kept apart, and is otherwise left as it is.
    """
    found = dict(batch)
    position_ids = found.get("position_ids")
    if position_ids is None or packed.way is None:
        return found
    if packed.way is not Way.positions:
        weight = net.get_input_embeddings().weight
        found["attention_mask"] = _masks(net.config, position_ids, weight.dtype)
    if packed.way is Way.masks_alone:
        del found["position_ids"]
    return found


def ends(packed: Packed, attention: Attention, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Where documents end, for flash's varlen kernel: {} for other kernels.

    Of a batch whose tensors are on the host still: `max_length_q` is a number.
    """
    if attention is not Attention.flash_attention_2 or not packed.apart or "position_ids" not in batch:
        return {}
    return varlen(batch["position_ids"])


def planned(
    packed: Packed, attention: Attention, net: Any
) -> Callable[[dict[str, Tensor]], dict[str, Any]] | None:
    """What makes a micro-batch on meta into the inputs of `net`; None: it is its inputs.

    Values are not known there: flash's kernel is taken to have one document in each row, which costs it most.
    """
    if not packed.apart:
        return None

    def inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
        found = given(packed, batch, net)
        if attention is Attention.flash_attention_2:
            rows, length = batch["input_ids"].shape
            bounds = torch.empty(rows + 1, dtype=torch.int32, device="meta")
            found |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            found |= {"max_length_q": length, "max_length_k": length}
        return found

    return inputs


def varlen(position_ids: Tensor) -> dict[str, Any]:
    """transformers' FlashAttentionKwargs; `cu_seq_lens_q` int32 [documents + 1] in the flattened batch."""
    (queries, keys), (longest, _) = prepare_fa_kwargs_from_position_ids(position_ids)
    longest = int(longest)
    return {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys, "max_length_q": longest, "max_length_k": longest}


def _masks(config: PretrainedConfig, position_ids: Tensor, dtype: torch.dtype) -> Any:
    """What the model would make of its own accord: one mask [batch, 1, seq, seq], or one for each kind of layer."""
    shape = torch.empty((*position_ids.shape, 1), dtype=dtype, device=position_ids.device)
    return create_masks_for_generate(config, shape, None, None, position_ids=position_ids)
