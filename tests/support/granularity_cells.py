"""The grid of docs/granularity.md: every mode of activation checkpointing under every memory strategy, full and LoRA.

A cell is a run of 3 steps on 2 ranks. Dropout is on, biases are not zero, nothing is persistent, prefetch is above 0.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config import compose
from remat.config.units import GIB
from remat.planning.plan import make_plan
from tests.support import tiny

STEPS = 3
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "granularity.json"
BIT_EQUAL, REFERENCE = "bit-equal", "reference"
OFFLOAD = ["checkpointing.offload.enabled=true", "checkpointing.offload.min_bytes=0"]
MODES: dict[str, list[str]] = {
    "none": ["checkpointing=none"],
    "full": ["checkpointing=full"],
    "full_reentrant": ["checkpointing=full_reentrant"],
    "full, early_stop=false": ["checkpointing=full", "checkpointing.early_stop=false"],
    "interval": ["checkpointing=interval"],
    "uniform": ["checkpointing=uniform"],
    "uniform, reentrant=false": ["checkpointing=uniform", "checkpointing.reentrant=false"],
    "block": ["checkpointing=block", "checkpointing.block_layers=2"],
    "sqrt": ["checkpointing=sqrt"],
    "layers {0: none, 1-2: uniform, 3: selective_ops}": [
        "checkpointing=full",
        "checkpointing.layers={0: none, 1-2: uniform, 3: selective_ops}",
    ],
    "selective_ops": ["checkpointing=selective_ops"],
    "selective_ops, matmul": [
        "checkpointing=selective_ops",
        "checkpointing.selective_ops.save=[attention, matmul]",
    ],
    "selective_ops, every_other_matmul": [
        "checkpointing=selective_ops",
        "checkpointing.selective_ops.save=[attention, every_other_matmul]",
    ],
    "selective_linears": ["checkpointing=selective_linears"],
    "selective_modules": ["checkpointing=selective_modules"],
    "selective_modules, core_attention and norm": [
        "checkpointing=selective_modules",
        "checkpointing.recompute_modules=[core_attention, norm]",
    ],
    "selective_modules, attention": [
        "checkpointing=selective_modules",
        "checkpointing.recompute_modules=[attention]",
    ],
    "discard_output": ["checkpointing=discard_output"],
    "budget": ["checkpointing=budget"],  # with `half_way` between full and none
    "budget + offload": ["checkpointing=budget"],  # by `TABLE`
    "deepspeed": ["checkpointing=deepspeed"],
    "deepspeed, reentrant=false": ["checkpointing=deepspeed", "checkpointing.reentrant=false"],
    "deepspeed, partition_activations": [
        "checkpointing=deepspeed",
        "checkpointing.deepspeed.partition_activations=true",
    ],
    "deepspeed, cpu_checkpointing": [
        "checkpointing=deepspeed",
        "checkpointing.deepspeed.cpu_checkpointing=true",
    ],
    "offload (full)": ["checkpointing=offload", *OFFLOAD],
    "uniform + offload": ["checkpointing=uniform", *OFFLOAD],
    "selective_linears + offload": ["checkpointing=selective_linears", *OFFLOAD],
    "selective_modules + offload": ["checkpointing=selective_modules", *OFFLOAD],
    "discard_output + offload": ["checkpointing=discard_output", *OFFLOAD],
    "none + offload": ["checkpointing=none", *OFFLOAD],
    "offload, dtype=fp8": ["checkpointing=offload", *OFFLOAD, "checkpointing.offload.dtype=fp8"],
    "offload, dtype=int8": ["checkpointing=offload", *OFFLOAD, "checkpointing.offload.dtype=int8"],
}
MOVES = ["self_attn: cat 3", "self_attn: attention", "resid_dropout: mul", "mlp.activation_fn: tanh"]
TABLE = {  # full and LoRA, under which no gradient comes to the input of the first layer
    "0": {"keep": ["mlp.activation_fn: add 2"], "offload": MOVES},
    "1-2": {"keep": ["mlp.activation_fn: add 2"], "offload": ["input 0", *MOVES]},
    "3": {"policy": "none"},
}
VARIANTS = {  # each has its mechanism in common with another mode, or with runs of tests/runs/test_trajectories.py
    "full",
    "full_reentrant",
    "selective_ops, matmul",
    "deepspeed",
    "discard_output + offload",
    "full, early_stop=false",
    "interval",
    "sqrt",
    "uniform, reentrant=false",
    "block",
    "layers {0: none, 1-2: uniform, 3: selective_ops}",
    "selective_ops, every_other_matmul",
    "selective_modules, attention",
    "selective_modules, core_attention and norm",
    "none + offload",
    "deepspeed, reentrant=false",
    "uniform + offload",
    "selective_linears + offload",
    "selective_modules + offload",
    "offload, dtype=int8",
}
TOLERANCE = {"offload, dtype=fp8": 3e-2, "offload, dtype=int8": 3e-2}  # relative, of losses and gradient norms
ZERO = "deepspeed.overrides.zero_optimization"
EVERYTHING_MOVES = [
    f"{ZERO}.stage3_param_persistence_threshold=0",
    f"{ZERO}.stage3_prefetch_bucket_size=20000",
    f"{ZERO}.stage3_max_live_parameters=20000",
    f"{ZERO}.stage3_max_reuse_distance=20000",
]
STRATEGIES = {
    "ZeRO-2": ["deepspeed.config=zero2"],
    "ZeRO-2 offload": ["deepspeed.config=zero2_offload"],
    "ZeRO-3": ["deepspeed.config=zero3", *EVERYTHING_MOVES],
    "ZeRO-3 offload": ["deepspeed.config=zero3_offload", *EVERYTHING_MOVES],
}
TRAINED = {"full": [], "LoRA": ["peft=lora", "peft.r=4", "peft.dropout=0.1"]}
COLUMNS = [f"{strategy}, {trained}" for strategy in STRATEGIES for trained in TRAINED]


SIZES = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
SHARING = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 258,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "shared K/V": ("gemma4_text", SHARING | {"global_head_dim": 8}),
    "shared K/V, keyword tensors": (
        "gemma3n_text",
        SHARING | {"intermediate_size": [64] * 4, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "repeated layers, two stacks": ("hrm_text", {"num_layers_per_stack": 2, "num_hidden_layers": 12}),
    "sinks and experts": (
        "gpt_oss",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 4,
            "sliding_window": 8,
        },
    ),
    "skipped layers": (
        "opt",
        {"num_hidden_layers": 4, "ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.3},
    ),
}
PACKED = "packed documents"
HARD_MODES = (
    "none",
    "full",
    "full_reentrant",
    "uniform",
    "block",
    "selective_ops, matmul",
    "selective_modules, attention",
    "discard_output",
    "deepspeed",
    "offload (full)",
)
IN_SAMPLE = {  # beside none: each mode where it is not refused
    "shared K/V": (),  # its keyword tensors are a harder case of it
    "shared K/V, keyword tensors": ("selective_ops, matmul",),
    "repeated layers, two stacks": (),  # tests/activation_checkpointing has both, on one rank
    "sinks and experts": (),
    PACKED: ("full_reentrant",),
}


def make_architectures(folder: Path) -> None:
    """One folder for each of `ARCHITECTURES`: models whose layers share, repeat, or are skipped."""
    for name, (model_type, more) in ARCHITECTURES.items():
        torch.manual_seed(5)
        config = AutoConfig.for_model(model_type, **(SIZES | more))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / folder_name(name))
    tiny.make_texts(folder / "texts.jsonl")


def hard_words(workshop: Path, architecture: str, mode: str, strategy: str) -> list[str]:
    """The overrides of one cell of the hard ones: an architecture, or packed documents, under one mode."""
    more = [
        *STRATEGIES[strategy],
        *MODES[mode],
        f"train.steps={STEPS}",
        "optim.warmup_steps=0",
    ]
    if architecture == PACKED:
        texts = [
            "data=jsonl",
            f"data.path={workshop}/texts.jsonl",
            "data.packing=documents",
            "train.seq_len=64",
        ]
        more += texts
    else:
        more += [f"model.path={workshop / folder_name(architecture)}", "train.loss=full"]
        more += ["model.attention=eager"] * (ARCHITECTURES[architecture][0] == "gpt_oss")  # for its sinks
    return tiny.words(workshop, run_name(mode, f"{strategy}, {architecture}"), *more)


def folder_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def chosen(*, whole: bool, each: bool) -> list[tuple[str, str]]:
    """(mode, column) of the cells that run: all 240 take ten minutes, so usually modes in one column.

    Columns that have each strategy, full and LoRA take turns; `none`, which the others are held to, runs in each.
    Without `each` variants of another mode do not run, and the columns are one of ZeRO-2 and one of ZeRO-3.
    """
    if whole:
        return [(mode, column) for column in COLUMNS for mode in MODES]
    columns = [COLUMNS[index] for index in ((0, 3, 5, 6) if each else (3, 6))]
    modes = [mode for mode in MODES if each or mode not in VARIANTS]
    turns = {mode: columns[index % len(columns)] for index, mode in enumerate(modes)}
    return [(mode, column) for column in columns for mode in modes if mode == "none" or turns[mode] == column]


def chosen_hard(*, whole: bool) -> list[tuple[str, str]]:
    """(architecture, mode) that run: usually each architecture with some modes."""
    modes = {name: HARD_MODES if whole else few and ("none", *few) for name, few in IN_SAMPLE.items()}
    return [(architecture, mode) for architecture in modes for mode in modes[architecture]]


def make_workshop(folder: Path) -> Path:
    """A Phi of 4 layers: dropout, a bias on every Linear, parallel residual."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "phi",
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=192,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
    )
    net = AutoModelForCausalLM.from_config(config)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):  # zero biases hide wrong gradients
            torch.nn.init.normal_(parameter, std=0.05)
    net.save_pretrained(folder / "model")
    tiny.make_instructions(folder / "data.jsonl")
    (folder / "moves.json").write_text(json.dumps({"layers": TABLE}))
    return folder


def half_way(workshop: Path, column: str) -> str:
    """A budget in the middle of what full and none need in this column."""
    peaks = [
        make_plan(
            compose.compose_run(words(workshop, mode, column)).run, world_size=2, on_gpu=False
        ).plan.peak_bytes
        for mode in ("full", "none")
    ]
    return f"checkpointing.budget_gib={sum(peaks) / 2 / GIB:.9f}"


def words(workshop: Path, mode: str, column: str) -> list[str]:
    """The overrides of one cell; its run is workshop/out/<run name>/run."""
    strategy, trained = column.rsplit(", ", 1)
    more = [
        *STRATEGIES[strategy],
        *TRAINED[trained],
        *MODES[mode],
        *([half_way(workshop, column)] if mode == "budget" else []),
        *([f"checkpointing.table={workshop / 'moves.json'}"] if mode == "budget + offload" else []),
        f"train.steps={STEPS}",
        "optim.warmup_steps=0",
    ]
    return tiny.words(workshop, run_name(mode, column), *more)


def run_name(mode: str, column: str) -> str:
    """A folder name."""
    return "".join(c if c.isalnum() else "_" for c in f"{column}-{mode}")


def trajectory(folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) per step, as written."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss/train"], row["optim/grad_norm"]) for row in rows if "loss/train" in row]
