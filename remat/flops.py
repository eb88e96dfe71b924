"""FLOPs per token of a decoder, for MFU and HFU. Plain config fields in, numbers out: no torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remat.config import ConfigError

FIELDS = {  # transformers spells the same size differently from model to model
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, in elements. `num_params` counts a tied embedding once.

    `num_params_active` is what one token passes through (fewer than all with experts); `num_params_trained` is all
    but the frozen ones.
    """

    num_params: int
    num_params_active: int
    num_params_trained: int
    num_params_embedding: int
    tied_embedding: bool
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    largest_param: int

    @property
    def num_params_matmul(self) -> int:
        """Parameters that multiply a token: all active ones, except an embedding that is only looked up.

        A tied embedding is also the output head and therefore counts. Norm weights are included (below 0.01 %).
        """
        return self.num_params_active - (0 if self.tied_embedding else self.num_params_embedding)

    @property
    def num_params_matmul_trained(self) -> int:
        """Those of them that have a gradient. Adapters multiply every token."""
        return min(self.num_params_matmul, self.num_params_trained)

    @property
    def num_params_in_layers(self) -> int:
        """Those that multiply a token inside the decoder layers, without the output head."""
        return self.num_params_matmul - self.num_params_embedding


def shape_from_config(
    config: Mapping[str, Any],
    *,
    num_params: int,
    num_params_embedding: int | None = None,
    num_params_active: int | None = None,
    num_params_trained: int | None = None,
    largest_param: int | None = None,
) -> ModelShape:
    """Sizes from the fields of a transformers config (`config.to_dict()`); counts that are given win.

    `num_params_trained` None: all are.
    Raises ConfigError naming a missing field, or an irregular mixture of experts whose active count must be given.
    """
    fields = {**config, **config.get("text_config", {})}
    hidden, layers, heads = (_field(fields, name) for name in ("hidden_size", "num_layers", "num_heads"))
    inner = _first(fields, "intermediate_size") or 4 * hidden  # GPT-2 writes null for four times the width
    vocabulary = _field(fields, "vocab_size")
    if not isinstance(fields.get("tie_word_embeddings"), bool):
        raise ConfigError("the model's config has no field tie_word_embeddings (true or false): add it")
    experts = int(_first(fields, "num_experts") or 0)
    expert_width = int(fields.get("moe_intermediate_size") or inner)
    head_dim = int(fields.get("head_dim") or hidden // heads)
    if num_params_active is None:
        num_params_active = num_params - _idle(fields, experts, expert_width * hidden, layers)
    sizes = (
        vocabulary * hidden,
        inner * hidden,
        heads * head_dim * hidden,
        experts * 2 * expert_width * hidden,
    )
    return ModelShape(
        num_params=num_params,
        num_params_active=num_params_active,
        num_params_trained=num_params if num_params_trained is None else num_params_trained,
        num_params_embedding=num_params_embedding if num_params_embedding is not None else vocabulary * hidden,
        tied_embedding=fields["tie_word_embeddings"],
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=inner,
        vocab_size=vocabulary,
        largest_param=largest_param if largest_param is not None else max(sizes),
    )


def model_flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Forward and backward without recomputation: 6 N + 12 L h s (Chowdhery et al. 2022, PaLM, appendix B).

    N is `num_params_matmul`, h the width of all heads together. Of the 6, forward takes 2, the gradient of the input 2
    and the gradient of the weight 2 (Kaplan et al. 2020, section 2.1), and a frozen weight has none of the last: 4 N
    for frozen, 6 N for trained parameters. (The first layer's frozen projections of the embedding, which need no
    gradient of their input either, are counted with 4.) Attention counts the full square of the sequence
    although a causal kernel computes about half of it, as PaLM does, so that figures compare.
    """
    matrices = 4.0 * shape.num_params_matmul + 2.0 * shape.num_params_matmul_trained
    return matrices + 3.0 * _attention(shape, seq_len)


def layers_forward_flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """One forward of the decoder layers, 2 N_layers + 4 L h s: what recomputing all of them would add.

    How much of it a policy really runs again is counted in a run's first step.
    """
    return 2.0 * shape.num_params_in_layers + _attention(shape, seq_len)


def output_layer_flops_per_token(shape: ModelShape) -> float:
    """One forward of the output layer, 2 V h: what the chunked loss recomputes when it has more than one chunk."""
    return 2.0 * shape.vocab_size * shape.hidden_size


def formula_text() -> str:
    """The definitions behind MFU and HFU, for env.json."""
    return (
        "model FLOPs per token = 6*N + 12*L*h*s (PaLM, appendix B): N = active parameters without an embedding that "
        "is only looked up (a tied one is the output head and counts), L layers, h = heads * head_dim, s = sequence "
        "length, full square of the sequence although attention is causal; frozen parameters (LoRA) count 4*N, as "
        "they have no weight gradient. Recomputed FLOPs per token = "
        "(2*N_layers + 4*L*h*s) * the share of the layers' forward products and attention that the first step was seen "
        "to run again; the chunked loss adds 2*V*h where a micro-batch has more than one "
        "chunk. MFU counts model FLOPs; HFU counts model and recomputed FLOPs"
    )


def _attention(shape: ModelShape, seq_len: int) -> float:
    """Scores and weighted values of one forward, per token: two products of 2 h s in each layer."""
    return 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * seq_len


def _first(fields: Mapping[str, Any], name: str) -> int | None:
    return next((int(fields[key]) for key in FIELDS[name] if fields.get(key)), None)


def _field(fields: Mapping[str, Any], name: str) -> int:
    value = _first(fields, name) if name in FIELDS else fields.get(name)
    if not value:
        raise ConfigError(
            f"the model's config has none of the fields {', '.join(FIELDS.get(name, (name,)))}: add one"
        )
    return int(value)


def _idle(fields: Mapping[str, Any], experts: int, expert_matrix: int, layers: int) -> int:
    """Parameters of the experts a token does not visit, each of three matrices (gate, up, down)."""
    if experts == 0:
        return 0
    if fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("experts in some layers only: the number of active parameters must be given")
    chosen = _field(fields, "num_experts_per_tok")
    with_experts = layers - int(fields.get("first_k_dense_replace") or 0)
    return with_experts * (experts - chosen) * 3 * expert_matrix
