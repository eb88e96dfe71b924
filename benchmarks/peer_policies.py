"""Activation checkpointing of other trainers, put on a Hugging Face decoder through their own public functions.

torch, Hugging Face and DeepSpeed are called as their users call them. torchtitan and Megatron-LM checkpoint models of
their own, so what they do is done again here with the public functions of torch that they use (the rows say "after").
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from remat.activation_checkpointing.mechanisms.operators import FUSED_ATTENTION, MATMULS
from remat.model.layers import decoder_layers

PutOn = Callable[[Any], None]  # changes the given model for good
SEGMENT = 2  # layers of one of Megatron's uniform segments
BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.0)  # of torch.compile: a share of what keeping everything needs
RECOMPUTED_CORE = "remat_benchmark_recomputed_core"


def peers(device: torch.device, *, compiled: bool = True) -> dict[str, PutOn]:
    """Return what puts each peer's policy on a model. Without `compiled` none of torch.compile's."""
    found: dict[str, PutOn] = {
        "torch checkpoint": partial(_around_layers, partial(checkpoint, use_reentrant=False)),
        "torch checkpoint, reentrant": partial(_around_layers, partial(checkpoint, use_reentrant=True)),
        "torch selective, attention": partial(_selective, _keep_attention),
        "torch selective, matmul and attention": partial(_selective, _keep_products),
        "after torchtitan: every second matmul": partial(_selective, _keep_every_second_product),
        "Hugging Face": partial(_hugging_face, reentrant=False),
        "Hugging Face, reentrant": partial(_hugging_face, reentrant=True),
        "DeepSpeed": _deepspeed,
        f"after Megatron: uniform, {SEGMENT} layers": _uniform,
        "after Megatron: block, half the layers": _block,
        "after Megatron: selective, core attention": _recompute_core_attention,
    }
    if compiled:
        found |= {f"torch.compile, budget {share}": partial(_compile, share, device) for share in BUDGETS}
    return found


def _around_layers(run: Callable[..., Any], net: Any) -> None:
    """Run each layer's forward through `run(forward, *args)`: the hook point of transformers."""
    for layer in decoder_layers(net):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = run


def _selective(make_policy: Callable[[], Any], net: Any) -> None:
    """torch's selective checkpointing; the policy is made anew for each call, because it may count."""
    contexts = lambda: create_selective_checkpoint_contexts(make_policy())  # noqa: E731
    _around_layers(partial(checkpoint, use_reentrant=False, context_fn=contexts), net)


def _name(operation: Any) -> str:
    return operation._schema.name if hasattr(operation, "_schema") else str(operation.name())


def _keep(wanted: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_attention() -> Any:
    return lambda ctx, operation, *_, **__: _keep(bool(FUSED_ATTENTION.fullmatch(_name(operation))))


def _keep_products() -> Any:
    return lambda ctx, operation, *_, **__: _keep(
        _name(operation) in MATMULS or bool(FUSED_ATTENTION.fullmatch(_name(operation)))
    )


def _keep_every_second_product() -> Any:
    """torchtitan's list: attention, and of the matrix products the first, third, ... of each pass."""
    products: Counter[bool] = Counter()

    def choose(ctx: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = _name(operation)
        if name in MATMULS:
            products[ctx.is_recompute] += 1
            return _keep(products[ctx.is_recompute] % 2 == 1)
        return _keep(bool(FUSED_ATTENTION.fullmatch(name)))

    return choose


def _hugging_face(net: Any, *, reentrant: bool) -> None:
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def _deepspeed(net: Any) -> None:
    import deepspeed

    if not deepspeed.comm.is_initialized():  # its function asks for a rank
        file = tempfile.mkstemp()[1]
        deepspeed.init_distributed("gloo", False, init_method=f"file://{file}", rank=0, world_size=1)
    deepspeed.checkpointing.configure(None)
    _around_layers(deepspeed.checkpointing.checkpoint, net)


class _Segment(nn.Module):
    """Layers that are recomputed by one call."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, hidden, *args, use_reentrant=False, **kwargs)

    def _run(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, *args, **kwargs)
        return hidden


def _uniform(net: Any) -> None:
    layers = decoder_layers(net)
    segments = [_Segment(list(layers[first : first + SEGMENT])) for first in range(0, len(layers), SEGMENT)]
    path = next(name for name, module in net.named_modules() if name and layers[0] in module.children())
    net.set_submodule(path, nn.ModuleList(segments))


def _block(net: Any) -> None:
    layers = decoder_layers(net)
    for layer in layers[: len(layers) // 2]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def _core_attention(*args: Any, **kwargs: Any) -> Any:
    return checkpoint(sdpa_attention_forward, *args, use_reentrant=False, **kwargs)


def _recompute_core_attention(net: Any) -> None:
    AttentionInterface.register(RECOMPUTED_CORE, _core_attention)
    AttentionMaskInterface.register(RECOMPUTED_CORE, sdpa_mask)
    net.config._attn_implementation = RECOMPUTED_CORE


def _compile(share: float, device: torch.device, net: Any) -> None:
    """Compile each layer. On a CPU its graphs run operation by operation: memory of Inductor's cannot be counted."""
    name = "inductor" if device.type == "cuda" else "aot_eager_decomp_partition"

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=share):
            return lookup_backend(name)(graph, inputs, **options)

    torch._dynamo.config.recompile_limit = 64
    for layer in decoder_layers(net):
        layer.compile(backend=backend)
