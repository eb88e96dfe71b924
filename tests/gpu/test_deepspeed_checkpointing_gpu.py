"""DeepSpeed's cpu_checkpointing on a real GPU: inputs move to pinned host memory, gradients stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.deepspeed import DeepSpeedCheckpointing
from remat.config.options import DeepSpeedCheckpointingConfig
from remat.model import layers
from tests.activation_checkpointing.test_deepspeed_checkpointing import LAYERS, batch, build
from tests.support.pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none"),
]
HIDDEN_BYTES = 2 * 16 * 32 * 4


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    ids = batch(0).cuda()
    net.zero_grad()
    torch.manual_seed(7)
    net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def moved(model_type: str, reentrant: bool, cfg: DeepSpeedCheckpointingConfig) -> list[int]:
    """Bytes that went to the host, per layer; asserts equal gradients."""
    net = build(model_type).cuda()
    expected = gradients(net)
    engine = DeepSpeedCheckpointing(cfg, num_calls=LAYERS, reentrant=reentrant, tensor_parallel=None)
    counts = [LayerCounters() for _ in range(LAYERS)]
    for layer, of_layer in zip(layers.decoder_layers(net), counts, strict=True):

        def run(layer_forward: Any, *args: Any, of_layer: LayerCounters = of_layer) -> Any:
            return engine.run(layer_forward, *args, counts=of_layer, layer="a layer")

        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = run  # type: ignore[assignment]
    try:
        for _ in range(2):
            engine.reset()
            assert all(
                torch.allclose(a, b, rtol=1e-4, atol=1e-6)
                for a, b in zip(expected, gradients(net), strict=True)
            )
    finally:
        engine.close()
    return [of_layer.moved_bytes for of_layer in counts]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_inputs_move_to_the_host_but_the_last(model_type: str, reentrant: bool) -> None:
    pool = RankPool(1, gpus=True)
    try:
        cfg = DeepSpeedCheckpointingConfig(cpu_checkpointing=True)
        (found,) = pool.run(moved, model_type=model_type, reentrant=reentrant, cfg=cfg)
    finally:
        pool.close()
    assert found == [2 * HIDDEN_BYTES] * (LAYERS - 1) + [0]
