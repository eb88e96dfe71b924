"""Run models on `meta` tensors, which have shapes and no memory, with the kernels of a GPU or a CPU.

On meta tensors torch would choose its slow attention. While `as_in_a_run` is entered:
- attention and dropout are the kernels that the device would choose, called by name;
- transformers' test whether sequences are packed, which needs values, gets an answer: they are packed where documents
  are kept apart;
- torch's rules for meta tensors accept what its kernels accept;
- under ZeRO-3 a Linear is DeepSpeed's.

A kernel without a meta version is replaced by a function that saves the same tensors and moves the same bytes.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils
from transformers.integrations import flash_attention

from remat.config.options import ConfigError

FLASH_DTYPES = (torch.bfloat16, torch.float16)
_TORCH_DROPOUT = F.dropout
aten = torch.ops.aten
INDICES = masking_utils.find_packed_sequence_indices
WHOLE = "sequences are not packed: attention needs no mask of its own"
PACKED = (
    "every block holds several documents, kept apart: a mask for it covers the block, however short they are"
)
FLASH_PACKAGE = (
    "attention runs the flash-attn package's kernel, taken to need what torch's own flash kernel does; packed "
    "documents are computed as one, which costs most"
)


@contextmanager
def as_in_a_run(
    zero_stage: int, assumptions: list[str] | None = None, *, on_gpu: bool = True, packed: bool = False
) -> Iterator[None]:
    """Run attention and dropout as a recent NVIDIA GPU or a CPU does, and Linear as ZeRO-3 does.

    `packed` says that position ids restart within a block. Each assumption is appended to `assumptions` whenever it is
    made.
    """
    assumed: list[str] = [] if assumptions is None else assumptions
    kernel = _attention if on_gpu else _cpu_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return kernel(assumed, _Attention(*args, **kwargs))

    def flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any) -> Tensor:
        assumed.append(FLASH_PACKAGE)
        return _flash_package(query, key, value, named)

    answers = _Kernels(assumed, on_gpu)
    with (
        linear_of(zero_stage),
        mock.patch.object(F, "scaled_dot_product_attention", attention),
        mock.patch.object(flash_attention, "_flash_attention_forward", flash),
        mock.patch.object(flash_attention, "get_target_dtype", _flash_dtype),
        mock.patch.object(F, "dropout", _fused_dropout) if on_gpu else nullcontext(),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", answers.packed if packed else INDICES),
        answers,
    ):
        yield


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError, with the place and the cause, for a model whose own code fails on meta tensors."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a model's code may raise anything on tensors without values
        text = (str(error).strip() or "no reason given").splitlines()[0]
        frame = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frame) if "/models/" in f.filename or "modeling" in f.filename), None)
        where = f" ({Path(place.filename).name}, line {place.lineno})" if place else ""
        raise ConfigError(
            f"{type(model).__name__} cannot be planned: its forward and backward do not run on tensors that have "
            f"shapes and no values: {type(error).__name__}: {text}{where}. The run itself may work"
        ) from error


@contextmanager
def linear_of(zero_stage: int) -> Iterator[None]:
    """Replace F.linear as DeepSpeed does under ZeRO-3, whose operations and saved tensors differ from torch's."""
    with mock.patch.object(F, "linear", _Zero3Linear.apply) if zero_stage == 3 else nullcontext():
        yield


class _Zero3Linear(torch.autograd.Function):
    """The operations of deepspeed/runtime/zero/linear.py:77-135 (0.19.8).

    The input is saved after the product is computed, so a recomputation also runs the last product of a layer.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(rows, weight, bias)
        if rows.dim() == 2 and bias is not None:
            return torch.addmm(bias, rows, weight.t())
        output = rows.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, bias = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            grad.matmul(weight) if ctx.needs_input_grad[0] else None,
            flat.t().matmul(rows.reshape(-1, rows.shape[-1])) if ctx.needs_input_grad[1] else None,
            flat.sum(0) if bias is not None and ctx.needs_input_grad[2] else None,
        )


class _Kernels(TorchDispatchMode):
    """Runs operations that meta tensors refuse, or do differently from the device.

    transformers reads one value, which meta tensors do not have: whether sequences are whole. The answer is yes, except
    inside `packed`. Meta tensors refuse a grouped product in all dtypes but bf16; the kernels take others too. A CPU
    keeps a norm's statistics in the dtype of its weight, a GPU in fp32.

    torch's rules for meta tensors are slow Python. So the results of operations that make new tensors are cached in
    KNOWN as shapes, by the shapes of the arguments, for this recording and later ones of the process.
    """

    def __init__(self, assumed: list[str], on_gpu: bool) -> None:
        super().__init__()
        self._assumed, self._on_gpu = assumed, on_gpu
        self._whole = True
        if len(KNOWN) > MOST_KNOWN:
            KNOWN.clear()

    def packed(self, position_ids: Tensor) -> Tensor | None:
        """Call transformers' test for packed sequences, with the answer that position ids restart."""
        self._whole = False
        try:
            found: Tensor | None = INDICES(position_ids)
        finally:
            self._whole = True
        return found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype is not torch.bool:
                raise ValueError(
                    f"the model reads a {args[0].dtype} value from its data, which a plan does not have"
                )
            self._assumed.append(WHOLE if self._whole else PACKED)
            return self._whole
        unchecked = func is aten._grouped_mm.default and args[0].is_meta
        if unchecked and (args[0].dtype is not torch.bfloat16 or not self._on_gpu):
            return _grouped_mm(*args, **kwargs)
        result = self._run(func, args, kwargs)
        if func is aten.native_layer_norm.default and args[0].is_meta and not self._on_gpu:
            dtype = args[0].dtype if args[2] is None else args[2].dtype
            return result[0], result[1].to(dtype), result[2].to(dtype)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func`, or return tensors like its earlier result for arguments of the same shapes."""
        if not isinstance(func, torch._ops.OpOverload):  # its arguments may be functions that hold tensors
            return func(*args, **kwargs)
        found: list[Tensor] = []
        given = _describe(args, found), _describe(tuple(kwargs.items()), found)
        key = func, given, torch.get_default_dtype()
        if not found or not all(type(each) in PLAIN and each.is_meta for each in found):
            return func(*args, **kwargs)
        try:
            like = KNOWN.get(key, UNKNOWN)
        except TypeError:  # an argument cannot be hashed
            return func(*args, **kwargs)
        if like is UNKNOWN:
            result = func(*args, **kwargs)
            KNOWN[key] = _Like.of(func, result, found)
            return result
        return func(*args, **kwargs) if like is None else like.make()


PLAIN = (Tensor, nn.Parameter)
UNKNOWN: Any = object()
MOST_KNOWN = 10_000  # about 15 MB; the recordings of one model have a few hundred


class _Like(NamedTuple):
    """Size, stride and dtype of the tensors that an operation returns. `alone`: a single tensor, not a tuple."""

    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    alone: bool

    @classmethod
    def of(cls, func: Any, result: Any, given: Sequence[Tensor]) -> _Like | None:
        """Describe `result`; None unless it consists of new, whole tensors."""
        made = (result,) if isinstance(result, Tensor) else result
        if func._schema.is_mutable or not isinstance(made, tuple):
            return None
        if not made or not all(type(each) is Tensor and each.is_meta for each in made):
            return None
        like = cls(tuple((each.size(), each.stride(), each.dtype) for each in made), made is not result)
        own, others = ({each.untyped_storage()._cdata for each in group} for group in (made, given))
        is_whole = all(
            not one.storage_offset() and one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
            for one, other in zip(made, like.tensors_made(), strict=True)
        )
        return like if len(own - others) == len(made) and is_whole else None

    def tensors_made(self) -> tuple[Tensor, ...]:
        return tuple(torch.empty_strided(*place, dtype=dtype, device="meta") for *place, dtype in self.tensors)

    def make(self) -> Any:
        made = self.tensors_made()
        return made[0] if self.alone else made


KNOWN: dict[Any, _Like | None] = {}  # None: the operation returns something other than new tensors


def _describe(value: Any, found: list[Tensor]) -> Any:
    """Return a cache key of an argument; of a tensor, the properties that determine a result's shape.

    Tensors are added to `found`.
    """
    if isinstance(value, Tensor):
        found.append(value)
        return value.size(), value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_describe(each, found) for each in value)
    return type(value), value


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return an empty result with the shape and strides of torch 2.13 (ATen/native/GroupedMMUtils.h).

    The products are [tokens, k] x [experts, k, n], [k, tokens] x [tokens, n] and [experts, m, k] x [experts, k, n].
    Rows are padded to 16 bytes.
    """
    rows, columns = left.shape[-2], right.shape[-1]
    groups = [left.shape[0]] if left.dim() == 3 and right.dim() == 3 else []
    if left.dim() == right.dim() == 2 and offs is not None:
        groups = [offs.shape[0]]
    dtype = out_dtype or left.dtype
    aligned = 16 // dtype.itemsize
    padded = -(-columns // aligned) * aligned
    strides = [rows * padded, padded, 1][-(2 + len(groups)) :]
    return torch.empty_strided((*groups, rows, columns), strides, dtype=dtype, device=left.device)


def _fused_dropout(rows: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run dropout as a GPU does: it keeps one byte per element, unless in place.

    From ATen/native/Dropout.cpp, is_fused_kernel_acceptable.
    """
    if training and 0 < p < 1 and not inplace and rows.is_meta:
        fused: Tensor = torch.native_dropout(rows, p, True)[0]
        return fused
    return _TORCH_DROPOUT(rows, p, training, inplace)


class _Attention(NamedTuple):
    """The arguments of `F.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _attention(assumed: list[str], call: _Attention) -> Tensor:
    """Choose and run attention as torch 2.13's sdp_utils.cpp does on a GPU.

    Flash takes fp16 and bf16 without a mask, if query, key and value have the same head width, up to 256. Everything
    else runs the memory-efficient kernel.
    """
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    one_width = query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    if attn_mask is None and query.dtype in FLASH_DTYPES and one_width:
        assumed.append(
            "attention runs torch's flash kernel; cuDNN's, which torch prefers on Hopper, is taken to need the same"
        )
        padded = [F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (query, key, value)]
        flash: Tensor = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale if scale is not None else query.shape[-1] ** -0.5
        )[0]
        return flash[..., : value.shape[-1]]
    assumed.append(
        "attention runs torch's memory-efficient kernel: there is a mask, it is fp32, or heads are too wide for flash "
        "or of two widths"
    )
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    bias = None
    if attn_mask is not None:
        bias = _added(attn_mask, query)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]
    return output


def _flash_dtype(query: Tensor, module: nn.Module) -> torch.dtype | None:
    """Return the weights' dtype, to which fp32 queries are cast (transformers takes autocast's first); else None."""
    if query.dtype is not torch.float32:
        return None
    return next(child.weight.dtype for child in module.modules() if isinstance(child, nn.Linear))


def _flash_package(query: Tensor, key: Tensor, value: Tensor, named: Mapping[str, Any]) -> Tensor:
    """Replace transformers' call of the flash-attn package; tensors are [batch, seq, heads, width]."""
    dtype = named.get("target_dtype") or query.dtype
    queries, keys, values = (x.to(dtype).transpose(1, 2) for x in (query, key, value))
    if dtype not in FLASH_DTYPES:  # a trial of the model in fp32, not a run
        plain = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return plain.transpose(1, 2)
    found: Tensor = aten._scaled_dot_product_flash_attention(
        queries, keys, values, named["dropout"], named["is_causal"], False, scale=named["softmax_scale"]
    )[0]
    return found.transpose(1, 2)


def _cpu_attention(assumed: list[str], call: _Attention) -> Tensor:
    """Run the kernel that torch chooses for such tensors on a CPU. It has no flash attention with dropout."""
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = call
    mask = None if mask is None else _added(mask, query)
    a, b, c = (_as_on_a_cpu(x) for x in (query, key, value))
    small_mask = None if mask is None else mask.new_empty([min(n, 2) for n in mask.shape], device="cpu")
    chosen = torch._fused_sdp_choice(
        a, b, c, small_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if chosen == SDPBackend.FLASH_ATTENTION.value:
        assumed.append("attention runs torch's flash kernel for CPUs")
        flash: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
        return flash
    assumed.append(
        "attention runs torch's plain products, which keep the whole square: a CPU has no other kernel here"
    )
    plain: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return plain


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """Convert the mask to one that is added to the scores, by the operations of torch (convert_boolean_attn_mask)."""
    if mask.dtype is not torch.bool:
        return mask
    zero, never = (torch.scalar_tensor(x, dtype=query.dtype, device=query.device) for x in (0.0, -torch.inf))
    return torch.where(mask, zero, never)


def _as_on_a_cpu(tensor: Tensor) -> Tensor:
    """Return a small CPU tensor of at most two rows for which torch chooses the same kernel as for `tensor`.

    It has the same dtype, heads and width, and rows are contiguous if those of `tensor` are.
    """
    batch, heads, rows, width = tensor.shape
    sizes = min(batch, 2), heads, min(rows, 2), width
    small = torch.empty(sizes, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    if tensor.stride(-1) == 1:
        return small
    return small.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_(tensor.requires_grad)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Replace DeepSpeed's Triton kernel (runtime/chunked_cross_entropy.py:121), summed over rows.

    It saves the logits, the targets and one fp32 number per row; the gradient has the logits' dtype. Values are
    meaningless.
    """
    loss: Tensor = _CrossEntropy.apply(logits.contiguous(), targets.contiguous())
    return loss.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_sum_exp = logits.sum(-1, dtype=torch.float32)
        loss = torch.empty_like(log_sum_exp)
        ctx.save_for_backward(logits, targets, log_sum_exp)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, _, log_sum_exp = ctx.saved_tensors
        scale = grads[0].float().contiguous()
        return logits.mul((log_sum_exp * scale).to(logits.dtype).unsqueeze(-1)), None
