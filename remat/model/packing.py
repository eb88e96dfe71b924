"""Keep the documents of a packed block apart, and test whether the model can.

transformers keeps packed documents apart by their position ids, which restart with each document. Without an attention
mask it finds the restarts and makes attention block-diagonal (sdpa, eager, flex). flash's varlen kernel is given the
documents' ends. In a model that builds its masks in another way, or carries a state from token to token, documents
would silently see each other. So a small copy of the model is tested: the logits of a document must be the same after
another document, after a changed one, and alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations import flash_attention
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from remat.config.options import Attention, ConfigError, DataSource, ModelConfig, Packing, RunConfig
from remat.model import hf_model, small_copy


class Way(StrEnum):
    """How a model is told where documents begin. The first way that works is used."""

    # the model builds its masks from them; flash gets `ends` in addition
    positions = "position ids that restart"
    masks = "position ids that restart, and transformers' block-diagonal masks"
    masks_alone = "transformers' block-diagonal masks"


@dataclass(frozen=True)
class Packed:
    """Whether the blocks of a run hold several documents, and how these are kept apart.

    With `form` None every block is one text, and nothing is packed. `reason` explains the choice.
    """

    form: Packing | None
    reason: str
    way: Way | None = None

    @property
    def apart(self) -> bool:
        return self.form is Packing.documents

    def line(self) -> str:
        """Describe the packing in one line of the run's header."""
        return f"{self.form}: {self.reason}" if self.form else self.reason


def given(packed: Packed, batch: Mapping[str, Any], net: Any) -> dict[str, Any]:
    """Return the micro-batch with the inputs that the model `net` needs to keep documents apart.

    `batch` has "position_ids" int64 [batch, seq] where documents are kept apart; otherwise it is returned unchanged.
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
    """Return the documents' ends for flash's varlen kernel; {} for other kernels.

    Call this while the batch is on the host, because `max_length_q` is a Python number. On meta, where values are
    unknown, each row is assumed to be one document, which is the most expensive case.
    """
    if attention is not Attention.flash_attention_2 or not packed.apart or "position_ids" not in batch:
        return {}
    position_ids = batch["position_ids"]
    rows, width = position_ids.shape
    if position_ids.is_meta:
        documents = torch.empty(rows + 1, dtype=torch.int32, device="meta")
    else:
        (documents, _), _ = prepare_fa_kwargs_from_position_ids(position_ids)
    return varlen_of(documents, width, position_ids.device)


def planned(
    packed: Packed, attention: Attention, net: Any
) -> Callable[[dict[str, Tensor]], dict[str, Any]] | None:
    """Return a function that turns a micro-batch on meta into the inputs of `net`; None when no change is needed."""
    if not packed.apart:
        return None

    def inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
        return given(packed, batch, net) | ends(packed, attention, batch)

    return inputs


def varlen_of(documents: Tensor, width: int, device: torch.device) -> dict[str, Any]:
    """Return transformers' FlashAttentionKwargs from `documents`, int32 [documents + 1]: the starts and the end.

    They are on the host, in rows of `width` laid end to end. On meta each row is assumed to be one document.
    """
    longest = width if documents.is_meta else int(documents.diff().max())
    bounds = documents.to(device, non_blocking=True)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _masks(config: PretrainedConfig, position_ids: Tensor, dtype: torch.dtype) -> Any:
    """Return the masks that transformers would make: one [batch, 1, seq, seq], or one for each kind of layer."""
    shape = torch.empty((*position_ids.shape, 1), dtype=dtype, device=position_ids.device)
    return create_masks_for_generate(config, shape, None, None, position_ids=position_ids)


LENGTHS = ((7, 9), (11, 5))  # tokens of the two documents in each row of the trial
SAME_WITHIN = 1e-5  # share of the largest logit: experts get other tokens too and add in another order
ALONE_WITHIN = 1e-4  # share of the largest logit: kernels round differently at another length
LOWEST_ID = 8  # special tokens have low ids
SEEN = "a document sees those before it in its block"
ALONE = "every row has a block of its own, padded to the longest of its micro-batch"
KERNELS = {
    Attention.sdpa: "torch's attention with a mask",
    Attention.eager: "a mask",
    Attention.flex_attention: "flex attention's block mask",
    Attention.flash_attention_2: "flash attention of varying length",
}


def decide(cfg: RunConfig, config: PretrainedConfig, skeleton: PreTrainedModel) -> Packed:
    """Decide how the documents of a block are packed and kept apart in this run.

    `skeleton` is the model of `config` on the meta device. A format that is not known yet counts as plain text. Raises
    ConfigError if data.packing=documents is impossible.
    """
    asked, rows = cfg.data.packing, cfg.data.has_rows
    if cfg.data.source is DataSource.synthetic:
        return Packed(None, "every block is one text")
    if asked is Packing.none:
        return Packed(asked, f"{ALONE}, as data.packing=none asks")
    if asked is Packing.stream:
        return Packed(asked, f"{SEEN}, as data.packing=stream asks")
    found = way(config, skeleton, cfg.model)
    if isinstance(found, Way):
        kernel = KERNELS[cfg.model.attention]
        return Packed(
            Packing.documents, f"positions restart, attention stays within a document ({kernel})", found
        )
    other, what = (Packing.none, ALONE) if rows else (Packing.stream, SEEN)
    if asked is Packing.documents:
        raise ConfigError(
            f"data.packing=documents: {type(skeleton).__name__} with model.attention={cfg.model.attention} cannot keep "
            f"the documents of a block apart: {found}. Set data.packing={other} ({what}), or choose another model"
        )
    return Packed(other, f"{what}, for this model cannot keep documents apart: {found}")


def way(config: PretrainedConfig, skeleton: PreTrainedModel, cfg: ModelConfig) -> Way | str:
    """Return how documents are kept apart in this model, or why they cannot be."""
    answer: Way | str = small_copy.ask(_choose, config, skeleton, cfg, cfg.attention)
    return answer


def _choose(net: Any, attention: Attention) -> Way | str:
    """Return the first way that works in `net`, or why the first of all does not."""
    problems = []
    for option in Way:
        problem = _problem(net, option, attention)
        if problem is None:
            return option
        problems.append(problem)
    return problems[0]


def _problem(net: Any, option: Way, attention: Attention) -> str | None:
    """Return why `option` does not work in `net`, or None when it works."""
    try:
        with kernel_of(net, attention):
            return _difference(net, option, attention)
    except Exception as error:  # the model may not know an argument, or expect another shape
        if "position_ids" in str(error):
            return "it takes no position ids"
        return f"tried on a small copy of it, it fails ({small_copy.first_line(error)})"


def _difference(net: Any, option: Way, attention: Attention) -> str | None:
    """Compare the logits of each row's second document after another first document, and alone, in two rows."""
    draw = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), sum(LENGTHS[0]))
    vocabulary = net.get_input_embeddings().weight.shape[0]
    lowest = min(LOWEST_ID, vocabulary // 2)
    tokens = torch.randint(lowest, vocabulary, shape, generator=draw)
    changed = tokens.clone()
    for row, (first, _) in enumerate(LENGTHS):
        changed[row, :first] = torch.randint(lowest, vocabulary, (first,), generator=draw)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])
    packed = Packed(Packing.documents, "", option)

    def logits(ids: Tensor) -> Tensor:
        batch = {"input_ids": ids, "position_ids": positions}
        more = ends(packed, attention, batch)
        found: Tensor = net(**given(packed, batch, net), **more, use_cache=False).logits
        return found

    before, after = logits(tokens), logits(changed)
    largest = before.abs().max()
    leaks, differs = 0.0, 0.0
    for row, (first, _) in enumerate(LENGTHS):
        alone = net(input_ids=tokens[row : row + 1, first:], use_cache=False).logits[0]
        leaks = max(leaks, float((after[row, first:] - before[row, first:]).abs().max() / largest))
        differs = max(differs, float((alone - before[row, first:]).abs().max() / largest))
    if not leaks <= SAME_WITHIN:
        return f"another document before it changes the logits of one by {leaks:.1g} of the largest"
    if not differs <= ALONE_WITHIN:
        return f"a document's logits are not those it has alone, but {differs:.1g} of the largest beside them"
    return None


@contextmanager
def kernel_of(net: Any, attention: Attention) -> Iterator[None]:
    """Replace flash attention by one that a CPU can compute.

    So a trial detects a model that does not pass on the documents' ends.
    """
    if attention is not Attention.flash_attention_2:
        yield
        return
    before = [(config, config._attn_implementation) for config in hf_model.configs_of(net)]
    for config, _ in before:
        config._attn_implementation = str(attention)
    try:
        with (
            mock.patch.object(flash_attention, "_flash_attention_forward", _flash_on_a_cpu),
            mock.patch.object(flash_attention, "get_target_dtype", lambda query, module: None),  # keep float32
        ):
            yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def _flash_on_a_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    query_length: int,
    is_causal: bool,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute attention like flash's kernels, with or without the documents' ends; [batch, seq, heads, width]."""
    batch, length = query.shape[:2]
    places = torch.arange(batch * length)
    rows = places // length
    documents = rows if cu_seq_lens_q is None else torch.bucketize(places, cu_seq_lens_q[1:], right=True)
    distance = places[:, None] - places[None, :]
    seen = (documents[:, None] == documents[None, :]) & (distance >= 0)
    if sliding_window is not None:
        seen &= distance < sliding_window
    queries, keys, values = (x.flatten(0, 1).transpose(0, 1) for x in (query, key, value))
    groups = queries.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = (
        queries @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    )
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if s_aux is not None:  # an attention sink takes its share of each row
        scores = torch.cat([scores, s_aux.reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : scores.shape[1]]
    return (weights @ values).transpose(0, 1).unflatten(0, (batch, length))
