"""Models of many architectures, three layers small, whose biases are not zero: zero ones hide wrong gradients."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi": {},
    "phi3": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mistral": {},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "falcon": {},
}


EAGER_ONLY = {"gemma2"}  # transformers has no other attention for it


def build(model_type: str, *, attention: str = "sdpa", **more: Any) -> Any:
    """A model in training mode, always with the same values."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | ARCHITECTURES.get(model_type, {}) | more))
    net = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if model_type in EAGER_ONLY else attention
    )
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return net.train()


def gradients(net: Any, *, seed: int = 3) -> list[torch.Tensor]:
    """The loss, then the gradient of every parameter, of one forward and backward over 2 x 16 tokens."""
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
    net.zero_grad()
    torch.manual_seed(7)  # dropout
    loss = net(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(left) == len(right) > 1 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
