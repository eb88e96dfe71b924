"""Write the tables of docs/memory-model.md from the planner: `python scripts/memory_model_tables.py [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat.config import compose, ds_config  # noqa: E402
from remat.config.options import Precision  # noqa: E402
from remat.planning import (  # noqa: E402
    plan,
)
from remat.planning.model_states import Item, by_place, model_states  # noqa: E402
from remat.planning.recording import Recordings  # noqa: E402
from remat.planning.simulation.types import Category  # noqa: E402
from scripts.generated import between, update  # noqa: E402

PAGE = ROOT / "docs" / "memory-model.md"
END = "<!-- end of table -->"
GIB, MIB = 1024**3, 1024**2
PARAMS, LARGEST, RANKS, HIDDEN = 8_030_261_248, 128_256 * 4096, 8, 4096  # Llama 3.1 8B on eight GPUs
STRATEGIES = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload_optimizer", "zero3_offload", "zero3_nvme"]  # fmt: skip  # noqa: E501
FORMULAS = {  # by item: bytes per rank, and what changes it
    ("parameters", "gpu"): ("w P; ZeRO-3: w P/N", "stage; `offload_param` moves it away"),
    ("frozen parameters", "gpu"): ("w F; ZeRO-3: w F/N", "`peft`"),
    ("gradients", "gpu"): (
        "g P until reduced; ZeRO-2: g P/N; ZeRO-3: g P/N, always there",
        "stage, `offload_optimizer`",
    ),
    ("accumulated gradients", "gpu"): ("4 P", "`grad_accum_dtype=fp32` under ZeRO-1"),
    ("master parameters", "gpu"): ("4 P/N; ZeRO-0: 4 P", "`offload_optimizer`; none in fp32 under ZeRO-0"),
    ("moments", "gpu"): ("8 P/N; ZeRO-0: 8 P", "`offload_optimizer`"),
    ("reduction buckets", "gpu"): ("w b, twice with `overlap_comm`; in backward only", "`reduce_bucket_size`"),
    ("reduction bucket", "gpu"): ("c b; always there", "`reduce_bucket_size`, `communication_data_type`"),
    ("gradient staging on the GPU", "gpu"): ("w M", "ZeRO-1/2 with `offload_optimizer`"),
    ("master parameters", "host"): ("4 P/N", "`offload_optimizer`"),
    ("master parameters", "pinned"): ("4 P/N", "`offload_optimizer`, `pin_memory`"),
    ("master gradients", "pinned"): (
        "4 P/N, one buffer per sub-group under ZeRO-3",
        "`sub_group_size`, `pin_memory`",
    ),
    ("moments", "host"): ("8 P/N", "`offload_optimizer`"),
    ("parameters on their way back", "pinned"): ("w P/N", "ZeRO-1/2 with `offload_optimizer`"),
    ("gradient staging", "pinned"): ("w M", "ZeRO-1/2 with `offload_optimizer`"),
    ("accumulated gradients", "pinned"): ("w P/N", "ZeRO-2 with `offload_optimizer` and accumulation"),
    ("gradients", "pinned"): ("g P/N, one buffer", "ZeRO-3 with `offload_optimizer`, also to NVMe"),
    ("parameters", "pinned"): ("w P/N, one buffer", "`offload_param`; pinned whatever its `pin_memory` says"),
    ("parameters", "nvme"): ("w P/N", "`offload_param.device=nvme`"),
    ("parameters kept in host memory", "pinned"): ("w min(`max_in_cpu`, P/N)", "`max_in_cpu`"),
    ("parameter swap buffers", "pinned"): ("w `buffer_count` x `buffer_size`", "`offload_param`"),
    ("parameter write buffer", "pinned"): ("w x the largest sub-group", "`sub_group_size`"),
    ("optimizer swap buffers", "pinned"): ("4 `buffer_count` x the largest sub-group", "`sub_group_size`"),
    ("master parameters, moments, gradients", "nvme"): ("16 P/N", "`offload_optimizer.device=nvme`"),
}


def rendered(name: str, precision: Precision = Precision.bf16) -> dict[str, Any]:
    run = ds_config.RunValues(
        world_size=RANKS,
        micro_batch_size=1,
        global_batch_size=2 * RANKS,
        gradient_clipping=1.0,
        precision=precision,
        hidden_size=HIDDEN,
        nvme_path="/scratch",
    )
    stage_0: dict[str, Any] = {"zero_optimization": {"stage": 0}}
    base = "zero1" if name == "zero0" else name
    return ds_config.render(
        ds_config.load(base, compose.DS_CONFIG_DIR), stage_0 if name == "zero0" else {}, run
    )


def items(name: str) -> list[Item]:
    """Of one rank: two micro-batches per step, so that accumulation is there."""
    return model_states(
        num_params=PARAMS,
        largest_param=LARGEST,
        ds=rendered(name),
        world_size=RANKS,
        ranks_per_node=RANKS,
        gas=2,
    )


def strategies() -> str:
    """Model states by strategy: what each place has to hold."""
    head = ["strategy", "GPU", "host", "pinned", "pinned, before rounding", "NVMe", "host memory of the node"]
    rows = []
    for name in STRATEGIES:
        found = items(name)
        places = by_place(found)
        raw = sum(item.raw_bytes_per_rank for item in found if item.place == "pinned")
        node = sum(item.bytes_per_node for item in found if item.place in ("host", "pinned"))
        sizes = [places["gpu"], places["host"], places["pinned"], raw, places["nvme"], node]
        rows.append([f"`{name}`", *(_gib(size) for size in sizes)])
    return table(head, rows)


def allocations() -> str:
    """Every allocation of every strategy: formula, size in the example, who allocates it."""
    head = ["what", "place", "bytes per rank", "what changes it", "example, GiB per rank", "allocated at"]
    rows: dict[tuple[str, str], list[str]] = {}
    sizes: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name in STRATEGIES:
        for item in items(name):
            key = item.name, str(item.place)
            size = _gib(item.raw_bytes_per_rank)
            sizes.setdefault(key, {}).setdefault(size, []).append(name.removeprefix("zero"))
            formula, changed = FORMULAS[key]
            rows.setdefault(key, [item.name, item.place, formula, changed, "", ""])
            source = f"`{item.source}`" if ".py" in item.source else item.source
            if source not in rows[key][5]:
                rows[key][5] = ", ".join(filter(None, [rows[key][5], source]))
    for key, by_size in sizes.items():
        rows[key][4] = "; ".join(f"{size} ({', '.join(names)})" for size, names in by_size.items())
    return table(head, [rows[key] for key in sorted(rows, key=lambda key: (_ORDER[key[1]], key[0]))])


def activations() -> str:
    """What one layer keeps from forward to backward, counted on the model's own operations."""
    head = [
        "model",
        "tokens",
        "`none`, bytes x tokens x hidden",
        "`none`, MiB per layer",
        "`full`, MiB per layer",
    ]
    rows = []
    for name, seq_len, hidden, layers in FAMILIES:
        kept = [kept_bytes(name, seq_len, layers, policy) for policy in ("none", "full")]
        unit = f"{kept[0] / (seq_len * hidden):.1f}"
        rows.append([f"`model={name}`", str(seq_len), unit, *(f"{size / MIB:.1f}" for size in kept)])
    return table(head, rows)


FAMILIES = [  # model, tokens, hidden size, the option that says how many layers
    ("llama8b", 4096, 4096, "num_hidden_layers"),
    ("llama2_7b", 4096, 4096, "num_hidden_layers"),
    ("qwen3_8b", 4096, 4096, "num_hidden_layers"),
    ("gemma_7b", 4096, 3072, "num_hidden_layers"),
    ("phi2", 2048, 2560, "num_hidden_layers"),
    ("gpt2_medium", 1024, 1024, "n_layer"),
]


def kept_bytes(name: str, seq_len: int, layers: str, policy: str) -> int:
    words = [
        f"model={name}", f"model.architecture.{layers}=3", f"train.seq_len={seq_len}", "train.micro_batch_size=1",
        "deepspeed.config=zero2", f"checkpointing={policy}", "peft=none",
    ]  # fmt: skip
    made = plan.make_plan(compose.compose_run(words).run, world_size=1)
    return made.simulation.kept_bytes[1]


EXAMPLE = ["recipe=llama8b_zero3_offload_optimizer", "train.seq_len=4096"]
KNOBS = {
    "as shipped": [],
    "`stage3_max_reuse_distance=1e9` (DeepSpeed's default)": ["stage3_max_reuse_distance=1000000000"],
    "`stage3_max_reuse_distance=3e9`": ["stage3_max_reuse_distance=3000000000"],
    "`stage3_max_reuse_distance=0`": ["stage3_max_reuse_distance=0"],
    "and `stage3_prefetch_bucket_size=0`": ["stage3_max_reuse_distance=0", "stage3_prefetch_bucket_size=0"],
    "`stage3_max_live_parameters=1e8`": ["stage3_max_live_parameters=100000000"],
    "`stage3_param_persistence_threshold=1e7`": ["stage3_param_persistence_threshold=10000000"],
}


def gathers() -> str:
    """The same run under other knobs of ZeRO-3; one simulation answers for all."""
    head = [
        "knobs",
        "gathered at the peak, GiB",
        "peak, GiB",
        "peak in",
        "gathered per micro-batch, model sizes",
    ]
    recordings, rows = Recordings(), []
    for label, knobs in KNOBS.items():
        words = [*EXAMPLE, *(f"deepspeed.overrides.zero_optimization.{knob}" for knob in knobs)]
        made = plan.make_plan(compose.compose_run(words).run, recordings=recordings)
        volume = made.simulation.gathered_elements / made.strategy.facts.num_params
        gathered = made.plan.gpu.get(Category.gathered, 0)
        rows.append(
            [label, _gib(gathered), _gib(made.plan.peak_bytes), str(made.plan.peak.phase), f"{volume:.2f}"]
        )
    return table(head, rows)


def losses() -> str:
    """The loss's bytes at its own policy, and what becomes of the peak."""
    head = ["`train.loss=`", "tokens", "logits and loss at the peak, GiB", "peak, GiB", "peak in"]
    rows = []
    for kind in ("full", "chunked"):
        for seq_len in (4096, 16384):
            words = [EXAMPLE[0], f"train.seq_len={seq_len}", f"train.loss={kind}"]
            made = plan.make_plan(compose.compose_run(words).run)
            size = made.plan.gpu.get(Category.loss, 0)
            where = f"{made.plan.peak.phase}, {'a layer' if made.plan.peak.layer is not None else 'the loss'}"
            rows.append([f"`{kind}`", str(seq_len), _gib(size), _gib(made.plan.peak_bytes), where])
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "strategies": strategies,
    "allocations": allocations,
    "activations": activations,
    "losses": losses,
    "gathers": gathers,
}
_ORDER = {"gpu": 0, "host": 1, "pinned": 2, "nvme": 3}


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def mark(name: str) -> str:
    return f"<!-- {name}: written by scripts/memory_model_tables.py -->"


def renewed(page: str) -> str:
    """`page` with every table replaced."""
    for name, make in TABLES.items():
        page = between(page, mark(name), END, make())
    return page


if __name__ == "__main__":
    sys.exit(update(PAGE, renewed))
