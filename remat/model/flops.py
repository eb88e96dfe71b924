"""Count the FLOPs per token of a decoder, for MFU and HFU.

The model's own forward runs on the meta device; nothing is guessed from sizes. Products with weights are counted as
they run. Experts count as many times as a token visits one. Attention is counted from the widths of query and value and
the number of keys that a token can see. Each operation is counted by torch's formula, or by one of this file where
torch's is missing or incomplete. A multiply-add is 2. A model that cannot be counted is refused, because no figure is
better than a wrong one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from remat.config.options import ConfigError
from remat.model import meta_kernels

aten = torch.ops.aten
FOUR_BIT_PRODUCT = "bitsandbytes.gemm_4bit"  # compared by name, because bitsandbytes is optional


class Mode(TorchDispatchMode):
    """A mode that also sees higher-order operators, and stays in place when something inside is compiled."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def flop_formula(func: Any) -> Callable[..., int] | None:
    """Return the FLOP formula of `func`; None unless it is a matrix product or attention.

    Call it as `formula(*args, **kwargs, out_val=result)`.
    """
    packet = getattr(func, "_overloadpacket", func)
    if str(packet) == FOUR_BIT_PRODUCT:
        return _four_bit
    return _OWN.get(packet) or flop_registry.get(packet)


def dequantised_bytes(func: Any, args: Any) -> int:
    """Return the bytes that a product with a 4-bit weight allocates inside its kernel.

    These are the weight in the dtype of the input, and its constants. No dispatch mode sees them. From bitsandbytes
    0.50.2, backends/cuda/ops.py:911-914; the same on a CPU (backends/default/ops.py:336). A fused kernel without these
    bytes runs only for few tokens (cuda/ops.py:583).
    """
    if str(getattr(func, "_overloadpacket", func)) != FOUR_BIT_PRODUCT:
        return 0
    (rows, columns), block = args[2], args[4]
    return int(rows * columns * args[0].element_size() + 4 * -(-rows * columns // block))


def _four_bit(left: Any, packed: Any, shape: Any, *args: Any, **kwargs: Any) -> int:
    """Count a product with a 4-bit weight: [..., k] x [n, k], where `shape` is (n, k)."""
    return 2 * int(left.numel()) * int(shape[0])


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Count QK^T and PV: [b, h, s_q, d_q], [b, h or fewer, s_k, d_q], [b, h or fewer, s_k, d_v].

    torch's own formulas refuse grouped-query attention before 2.13.
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (width + value.shape[3])


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Count the backward: QK^T again, then the gradients of P, V, Q and K.

    These are five products; three of them have the width of the query.
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[3])


def _grouped_mm(left: Any, right: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Count [tokens, k] x [experts, k, n] in forward, [k, tokens] x [tokens, n] for the weights' gradient."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[-1]


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_OWN: dict[Any, Callable[..., int]] = {
    aten._grouped_mm: _grouped_mm,
    **{getattr(aten, f"_scaled_dot_product_{name}"): _attention_flops for name in _KERNELS},
    **{getattr(aten, f"_scaled_dot_product_{name}_backward"): _attention_backward for name in _KERNELS},
}


COUNTED = "remat_counted"  # name of the counting attention, masks and experts in transformers' tables
STEPWISE = (32, 64)  # tokens of two forwards; few, because a model that computes token by token is slow
CHUNKED = (256, 512)  # tokens of two forwards: whole chunks of every linear attention
LINEAR = 1e-3  # share of products that may grow with the square of the length: the first and last chunk
CHOSEN = ("top_k", "num_experts_per_tok", "moe_top_k", "moe_k")  # module attributes: experts per token
WINDOWS = (
    "sliding_window",
    "window_size",
    "attention_window",
    "index_topk",
    "local_window_size",
    "attention_chunk_size",
)
BIASED = ("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv")  # their first tensor is added


@dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of one token in a sequence of a given length, 2 per multiply-add.

    - `num_params_active`: parameters that a token passes through; experts that it does not visit are left out.
    - `weights`: products with these parameters. `trained_weights`: only those whose weight has a gradient.
    - `attention`: scores and weighted values.
    - `mixing`: all other products of activations, as in linear attention and state spaces.
    - `output_layer`: the output layer's part of `weights`.
    """

    num_params: int
    num_params_active: int
    weights: float
    trained_weights: float
    attention: float
    mixing: float
    output_layer: float
    vocab_size: int

    @property
    def model_flops_per_token(self) -> float:
        """Count forward and backward without recomputation: 6 N + 12 L h s (Chowdhery et al. 2022, appendix B).

        Of the 6, forward takes 2, the gradient of the input 2 and the gradient of the weight 2 (Kaplan et al. 2020,
        section 2.1). A frozen weight has no gradient, so its last 2 are left out. The first layer's frozen projections
        of the embedding need no gradient of their input either, but are counted with 4. Attention counts the full
        square of the sequence, as PaLM does, although a causal kernel computes about half of it; so figures stay
        comparable. In a layer with a window or chunks it counts the rows times the keys that a token can see.
        """
        return 2.0 * self.weights + self.trained_weights + 3.0 * (self.attention + self.mixing)

    @property
    def layers_forward_flops_per_token(self) -> float:
        """Count one forward without the output layer, which recomputing all layers would add.

        The share that a policy really recomputes is counted in a run's first step.
        """
        return self.weights - self.output_layer + self.attention + self.mixing


def count(net: Any, seq_len: int) -> ModelFlops:
    """Count a causal language model on the meta device for a sequence of `seq_len` tokens.

    `net` must be built with attention=eager. Raises ConfigError, with the reason, for a model that cannot be counted.
    """
    runs = _forwards(net, seq_len)
    last = runs[-1]
    _check_experts(net, last)
    head = net.get_output_embeddings()
    output = None if head is None else id(head.weight)
    weights = {key: _at([run.products.get(key, 0.0) for run in runs], runs, seq_len) for key in last.products}
    passed = {key: 2.0 * last.active(key) * seq_len for key in last.passed - weights.keys()}
    by_weight = weights | passed
    mixing, own_attention = _mixing(net, runs, seq_len)
    name = type(net).__name__
    found = ModelFlops(
        num_params=sum(p.numel() for p in net.parameters()),
        num_params_active=round(sum(last.active(key) for key in last.passed | last.looked_up)),
        weights=sum(by_weight.values()) / seq_len,
        trained_weights=sum(v for k, v in by_weight.items() if last.weights[k].requires_grad) / seq_len,
        attention=(_attention(name, runs, seq_len) + own_attention) / seq_len,
        mixing=mixing / seq_len,
        output_layer=by_weight.get(output, 0.0) / seq_len if output else 0.0,
        vocab_size=0 if head is None else int(head.weight.shape[0]),
    )
    sound = 0 < found.num_params_active <= found.num_params and found.weights > 0
    if not sound or min(found.attention, found.mixing, found.layers_forward_flops_per_token) < 0:
        raise ConfigError(f"the FLOPs of {name} cannot be counted: the count makes no sense ({found})")
    return found


def formula_text() -> str:
    """Return the definitions of MFU and HFU, for env.json."""
    return (
        "model FLOPs per token = 6*N + 12*L*h*s (PaLM, appendix B), counted in the model's own forward on the meta "
        "device: N = active parameters (of experts those that a token visits) without an embedding that "
        "is only looked up (a tied one is the output head and counts), each as often as it is used; L layers with "
        "attention, 2*h = widths of query and value of all heads, s = sequence "
        "length, full square of the sequence although attention is causal, and in a layer with a window or chunks no "
        "more keys than a token can see; linear attention and state spaces add 3 times their products; frozen "
        "parameters (LoRA) count 4*N, as they have no weight gradient. Recomputed FLOPs per token = "
        "(2*N_layers + 4*L*h*s) * the share of the layers' forward products and attention that the first step was seen "
        "to run again; the chunked loss adds 2*V*h where a micro-batch has more than one "
        "chunk. MFU counts model FLOPs; HFU counts model and recomputed FLOPs. A model that cannot be counted has "
        "neither"
    )


class _Call(NamedTuple):
    """One call of attention.

    `width` is the sum of query and value widths over all heads; `window` is the most keys that a token can see.
    """

    width: int
    queries: int
    keys: int
    window: int | None


class _Forward(Mode):
    """Counts the operations of one forward of one sequence. Weights are known by `id`, tensors by their storage."""

    def __init__(self, net: nn.Module, length: int, most_operations: float) -> None:
        super().__init__()
        self.length, self.operations, self._most_operations = length, 0, most_operations
        self.weights = {id(p): p for p in net.parameters()}
        self.products: dict[int, float] = defaultdict(float)
        self.shares = _shares_of_dense_experts(net)  # by id of an expert's weight
        self.passed: set[int] = set()  # ids of weights used in any operation but a look-up
        self.looked_up: set[int] = set()
        self.mixing = 0.0  # FLOPs of products of activations
        self.calls: list[_Call] = []
        self.windows: dict[int, int | None] = {}  # window sizes of masks, by storage
        self.masks_are_local = False
        self._owner = {p.untyped_storage()._cdata: id(p) for p in net.parameters()}
        self._alive: list[Tensor] = []  # keeps addresses from being reused

    def active(self, key: int) -> float:
        return self.weights[key].numel() * self.shares.get(key, 1.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operations += 1
        if self.operations > self._most_operations:
            raise _TooLong
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        owners = [self._owner.get(t.untyped_storage()._cdata) for t in tensors]
        if len(tensors) == 1 and isinstance(result, Tensor):
            self._inherit(tensors[0], owners[0], result)
        elif func is aten.embedding.default and owners[0] is not None:
            self.looked_up.add(owners[0])
        else:
            self.passed |= {owner for owner in owners if owner is not None}
        formula = flop_formula(func)
        if formula is not None:
            biased = getattr(func, "_schema", None) is not None and func._schema.name in BIASED
            self._product(
                formula(*args, **kwargs, out_val=result), [o for o in owners[biased:] if o is not None]
            )
        return result

    def _inherit(self, source: Tensor, owner: int | None, result: Tensor) -> None:
        """Record that a view or copy of a weight is that weight, and a view or copy of a mask that mask."""
        key, made = source.untyped_storage()._cdata, result.untyped_storage()._cdata
        if made == key:
            return
        if owner is not None:
            self.passed.add(owner)
            if result.numel() == source.numel():
                self._owner[made] = owner
        elif key in self.windows and result.shape[-2:] == source.shape[-2:]:
            self.windows[made] = self.windows[key]
        else:
            return
        self._alive.append(result)

    def _product(self, flops: float, owners: list[int]) -> None:
        if len(owners) == 1:
            self.products[owners[0]] += flops * self.shares.get(owners[0], 1.0)
        elif not owners:
            self.mixing += flops  # a product of two weights is left out: it runs once, not per token

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Replace transformers' attention function: [b, heads, s, d_q], [b, .., s_k, d_q], [b, .., s_k, d_v]."""
        window = kwargs.get("sliding_window")
        if attention_mask is not None:
            window = self._window(module, attention_mask)
        batch, heads, rows, width = query.shape
        self.calls.append(_Call(heads * (width + value.shape[-1]), batch * rows, key.shape[2], window))
        return query.new_empty(batch, rows, heads, value.shape[-1]), None

    def _window(self, module: nn.Module, mask: Tensor) -> int | None:
        key = mask.untyped_storage()._cdata
        if key not in self.windows:
            raise ConfigError(
                f"{type(module).__name__} makes an attention mask of its own: which keys a token sees is not known"
            )
        return self.windows[key]

    def mask(
        self, batch_size: int, q_length: int, kv_length: int, *, local_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Replace transformers' mask function. `local_size` is the size of a window or of a chunk."""
        made = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        self.windows[made.untyped_storage()._cdata] = local_size
        self._alive.append(made)
        return made

    def eager_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the mask function for a model with its own attention code."""
        self.masks_are_local |= kwargs.get("local_size") is not None
        return _EAGER_MASK(*args, **kwargs)

    def visit(self, module: nn.Module, tokens: Tensor, chosen: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replace transformers' experts function: [tokens, d], and the experts of each token [tokens, k]."""
        for weight in module.parameters():
            share = chosen.shape[-1] / weight.shape[0]
            if share > 1:
                raise ConfigError(f"{type(module).__name__} has fewer experts than a token visits")
            self.shares[id(weight)] = share
            self.passed.add(id(weight))
            if weight.dim() >= 3:
                self.products[id(weight)] += 2.0 * chosen.numel() * weight[0].numel()
        return torch.empty_like(tokens)


class _TooLong(Exception):
    """Raised when a forward runs more operations than allowed."""


_EAGER_MASK = ALL_MASK_ATTENTION_FUNCTIONS["eager"]


def _forwards(net: Any, seq_len: int) -> tuple[_Forward, _Forward]:
    """Count a shorter and a longer sequence.

    The longer one has `seq_len` tokens, unless the number of operations grows with the length.
    """
    if seq_len <= CHUNKED[1]:
        return _forward(net, max(1, seq_len // 2)), _forward(net, seq_len)
    short, long = (_forward(net, length) for length in STEPWISE)
    if long.operations > short.operations:
        _check_selection(net, seq_len)
        return short, long
    short = _forward(net, CHUNKED[0])
    try:
        return short, _forward(net, seq_len, most_operations=1.5 * short.operations)
    except _TooLong:
        _check_selection(net, seq_len)
        return short, _forward(net, CHUNKED[1])


def _check_selection(net: nn.Module, seq_len: int) -> None:
    """Raise ConfigError if attention selects keys, because a shorter sequence does not show how many."""
    for module in net.modules():
        selected = getattr(module, "index_topk", None)
        if type(selected) is int and selected < seq_len:
            raise ConfigError(
                f"the FLOPs of {type(net).__name__} cannot be counted: {type(module).__name__} selects {selected} keys"
            )


def _check_experts(net: nn.Module, seen: _Forward) -> None:
    """Raise ConfigError if tokens choose among experts but no call of experts was counted."""
    modules = dict(net.named_modules())
    for name, module in modules.items():
        if not any(type(getattr(module, key, None)) is int for key in CHOSEN):
            continue
        around = modules[name.rpartition(".")[0]] if name else module
        if not any(id(p) in seen.shares for p in (*module.parameters(), *around.parameters())):
            raise ConfigError(
                f"the FLOPs of {type(net).__name__} cannot be counted: {type(module).__name__} chooses experts, and "
                "which weights are theirs is not known"
            )


def _forward(net: Any, length: int, most_operations: float = math.inf) -> _Forward:
    """Run one forward of `length` tokens and return its counts.

    Raises ConfigError when the model's code fails on tensors without values, or cannot be counted.
    """
    seen = _Forward(net, length, most_operations)
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), _put_in(net, seen), meta_kernels.as_in_a_run(0), seen:
            net(input_ids=ids, use_cache=False)
    except _TooLong:
        raise
    except Exception as error:  # a model's code may raise anything on tensors without values
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the FLOPs of {type(net).__name__} cannot be counted: {text}") from error
    return seen


@contextmanager
def _put_in(net: Any, seen: _Forward) -> Iterator[None]:
    """Replace the model's attention, masks and experts by counting functions, where transformers allows it."""
    base = net.get_base_model() if hasattr(net, "get_base_model") else net
    masks = {COUNTED: seen.mask, "eager": seen.eager_mask}
    with (
        mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {COUNTED: seen.attend}),
        mock.patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, masks),  # create_causal_mask looks here
        mock.patch.dict(ALL_EXPERTS_FUNCTIONS._global_mapping, {COUNTED: seen.visit}),
    ):
        base.set_attn_implementation(COUNTED)
        base.set_experts_implementation(COUNTED)
        yield


def _shares_of_dense_experts(net: nn.Module) -> dict[int, float]:
    """Return the share of each expert's weights that a token visits, for models that run all experts.

    Llama 4 runs all experts for all tokens, most of them on zeros.
    """
    shares = {}
    for module in net.modules():
        chosen = next((n for key in CHOSEN if type(n := getattr(module, key, None)) is int), None)
        experts = getattr(module, "num_experts", None)
        for weight in module.parameters():
            if chosen and type(experts) is int and weight.dim() == 3 and weight.shape[0] == experts:
                shares[id(weight)] = chosen / experts
    return shares


def _at(values: Sequence[float], runs: Sequence[_Forward], seq_len: int) -> float:
    """Return the value for `seq_len` on the straight line through two runs. It is exact where a run has that length."""
    short, long = (run.length for run in runs)
    slope = (values[1] - values[0]) / max(1, long - short)
    return values[1] + slope * (seq_len - long)


def _attention(name: str, runs: Sequence[_Forward], seq_len: int) -> float:
    """Return the attention FLOPs of a sequence: scores and weighted values, 2 s k (d_q + d_v) of each head."""
    changes = f"the FLOPs of {name} cannot be counted: its attention depends on the length of the sequence"
    if len({len(run.calls) for run in runs}) > 1:
        raise ConfigError(changes)
    total = 0.0
    for calls in zip(*(run.calls for run in runs), strict=True):
        if len({(call.width, call.window) for call in calls}) > 1:
            raise ConfigError(changes)
        queries = _at([call.queries for call in calls], runs, seq_len)
        keys = _at([call.keys for call in calls], runs, seq_len)
        visible = keys if calls[0].window is None else min(keys, calls[0].window)
        total += 2.0 * calls[0].width * queries * visible
    return total


def _mixing(net: Any, runs: Sequence[_Forward], seq_len: int) -> tuple[float, float]:
    """Return the FLOPs of products of activations: those that grow with the length, and with its square.

    Those that grow with the square are the attention of a model without transformers' attention functions.
    """
    (first, second), (short, long) = (run.mixing for run in runs), (run.length for run in runs)
    square = (second / long - first / short) / max(1, long - short)
    grows = abs(square) * long**2 > LINEAR * max(second, sum(runs[-1].products.values()))
    windows = [key for key in WINDOWS if getattr(net.config.get_text_config(), key, None)]
    if grows and square > 0 and (runs[-1].masks_are_local or windows):
        raise ConfigError(
            f"the FLOPs of {type(net).__name__} cannot be counted: it attends in code of its own, and which keys a "
            "token sees is not known"
        )
    if not grows or square < 0:  # the shorter sequence does not fill a chunk
        return second / long * seq_len, 0.0
    return max(0.0, first / short - square * short) * seq_len, square * seq_len**2


def operands(values: Any) -> list[torch.Tensor]:
    """Return the tensors in an operation's arguments or result, in a fifth of the time of torch's pytrees."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in operands(value)]
