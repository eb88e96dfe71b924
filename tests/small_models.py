"""Six small decoders of six families, with what hides bugs switched on: biases that are not zero, dropout, experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.apply import Applied
from remat.activation_checkpointing.watch import Watch
from remat.config import CheckpointingConfig

LAYERS = 4
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "gemma": {"num_key_value_heads": 2, "head_dim": 16},
    "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
}


@dataclass
class Result:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    applied: Applied
    watch: Watch


def build(model_type: str, **more: object) -> PreTrainedModel:
    """fp32, 4 layers of width 32, in training mode."""
    torch.manual_seed(0)
    sizes: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    config = AutoConfig.for_model(model_type, use_cache=False, **(sizes | FAMILIES[model_type] | more))
    net = AutoModelForCausalLM.from_config(config)
    fill_biases(net)
    return net.train()


def fill_biases(net: torch.nn.Module) -> None:
    """Zero biases hide wrong gradients: with them, adding a bias twice changes nothing."""
    torch.manual_seed(1)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.02)


def run(net: torch.nn.Module, cfg: CheckpointingConfig, *, steps: int = 1) -> Result:
    """`steps` forward and backward passes of the same batch under `cfg`; gradients add up. The model is left bare."""
    count = net.config.num_hidden_layers
    applied = apply.apply(net, policy.plan(cfg, count), cfg)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    net.zero_grad()
    torch.manual_seed(7)
    watch = applied.watch(torch.device("cpu"))
    for _ in range(steps):
        with applied.micro_batch(), watch:
            loss = net(input_ids=ids, labels=ids, use_cache=False).loss
            watch.forward_done()
            loss.backward()
    applied.remove()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return Result(loss.detach(), gradients, applied, watch)


def assert_equal(one: Result, other: Result) -> None:
    """Bit for bit."""
    assert torch.equal(one.loss, other.loss)
    assert one.gradients.keys() == other.gradients.keys()
    differing = [name for name, value in one.gradients.items() if not torch.equal(value, other.gradients[name])]
    assert not differing, f"gradients differ: {differing[:5]}"
