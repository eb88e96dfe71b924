"""Model states against what DeepSpeed 0.19.8 really held, and against sums for published sizes."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from remat.config import ds_config
from remat.config.ds_config import RunValues
from remat.config.options import AllocatorConfig, ConfigError, Precision
from remat.machine import allocator
from remat.machine.allocator import TORCH_DEFAULT, Allocators
from remat.planning import model_states as states
from remat.planning.model_states import Item, model_states

FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
LLAMA_70B = {"num_params": 70_553_706_496, "largest_param": 128_256 * 8192}
LLAMA_8B = {"num_params": 8_030_261_248, "largest_param": 128_256 * 4096}


def by_place(items: Iterable[Item]) -> Counter[str]:
    """Return the bytes per rank in each place."""
    totals = Counter[str]()
    for item in items:
        totals[item.place] += item.bytes_per_rank
    return totals


def rendered(
    name: str,
    *,
    world_size: int = 2,
    precision: Precision = Precision.bf16,
    hidden: int = 256,
    largest_param: int | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    run = RunValues(
        world_size=world_size,
        largest_param=largest_param,
        micro_batch_size=1,
        global_batch_size=world_size,
        gradient_clipping=1.0,
        precision=precision,
        hidden_size=hidden,
        nvme_path="/scratch",
    )
    return ds_config.render(ds_config.load(name, FOLDER), overrides, run)


def plan(
    name: str,
    sizes: dict[str, Any],
    *,
    ranks: int = 8,
    can_pin: bool = True,
    allocators: Allocators = TORCH_DEFAULT,
    **overrides: Any,
) -> list[Item]:
    ds = rendered(name, world_size=ranks, hidden=8192, largest_param=sizes["largest_param"], **overrides)
    return model_states(
        **sizes,
        ds=ds,
        world_size=ranks,
        ranks_per_node=ranks,
        gas=4,
        can_pin=can_pin,
        allocators=allocators,
    )


# (file, precision, accumulation steps, gradients accumulated in fp32, bytes per parameter of the model on one of two
# ranks after backward). Measured by listing every live tensor of a real engine with 2.6 M parameters under
# deepspeed 0.19.8, torch 2.13, gloo; reduction buckets (they come and go) subtracted.
MEASURED = [
    ("zero1", Precision.fp32, 1, False, 12.0),
    ("zero1", Precision.bf16, 1, False, 9.0),
    ("zero1", Precision.bf16, 2, False, 10.0),
    ("zero1", Precision.bf16, 2, True, 14.0),
    ("zero2", Precision.fp32, 1, False, 12.0),
    ("zero2", Precision.bf16, 1, False, 9.0),
    ("zero2", Precision.bf16, 2, False, 9.0),
    ("zero2", Precision.bf16, 2, True, 10.0),
    ("zero1_offload", Precision.bf16, 1, False, 11.2),
    ("zero1_offload", Precision.bf16, 2, False, 13.2),
    ("zero1_offload", Precision.bf16, 2, True, 15.2),
    ("zero2_offload", Precision.fp32, 1, False, 14.4),
    ("zero2_offload", Precision.bf16, 1, False, 11.2),
    ("zero2_offload", Precision.bf16, 2, False, 12.2),
    ("zero2_offload", Precision.bf16, 2, True, 13.2),
    ("zero3", Precision.fp32, 1, False, 10.0),
    ("zero3", Precision.bf16, 1, False, 8.0),
    ("zero3", Precision.bf16, 1, True, 9.0),
    ("zero3_offload_optimizer", Precision.fp32, 1, False, 12.0),
    ("zero3_offload_optimizer", Precision.bf16, 1, False, 10.0),
    ("zero3_offload_optimizer", Precision.bf16, 2, True, 11.0),
    ("zero3_offload", Precision.fp32, 1, False, 12.0),
    ("zero3_offload", Precision.bf16, 1, False, 10.0),
    ("zero3_offload", Precision.bf16, 1, True, 11.0),
]


@pytest.mark.parametrize(("name", "precision", "gas", "fp32_gradients", "measured"), MEASURED)
def test_against_the_tensors_of_a_real_engine(
    name: str, precision: Precision, gas: int, fp32_gradients: bool, measured: float
) -> None:
    num_params, largest_param = 2_623_744, 131_072
    overrides: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}} if fp32_gradients else {}
    if name == "zero1_offload":
        name, overrides["zero_optimization"] = "zero2_offload", {"stage": 1}
    ds = rendered(name, precision=precision, **overrides)
    items = model_states(
        num_params=num_params,
        largest_param=largest_param,
        ds=ds,
        world_size=2,
        ranks_per_node=2,
        gas=gas,
        can_pin=False,
    )
    total = sum(item.bytes_per_rank for item in items if "bucket" not in item.name)
    assert total / num_params == pytest.approx(measured, abs=0.005)


# The same with 2,885,888 frozen parameters and LoRA adapters of 1,114,112 (the largest 32,768) in one bucket-free
# count: bytes on one of two ranks.
MEASURED_LORA = [
    ("zero0", Precision.fp32, 1, False, 29_369_824),
    ("zero0", Precision.bf16, 1, False, 23_598_048),
    ("zero1", Precision.bf16, 1, False, 15_799_048),
    ("zero2", Precision.fp32, 1, False, 24_913_160),
    ("zero2", Precision.bf16, 2, False, 15_799_048),
    ("zero2", Precision.bf16, 2, True, 16_913_160),
    ("zero2_offload", Precision.fp32, 1, False, 27_403_764),
    ("zero2_offload", Precision.bf16, 1, False, 18_158_580),
    ("zero2_offload", Precision.bf16, 2, False, 19_272_692),
    ("zero2_offload", Precision.bf16, 2, True, 20_386_804),
    ("zero3", Precision.fp32, 1, False, 17_175_309 - 262_144),
    ("zero3", Precision.bf16, 1, False, 11_930_125 - 131_072),
    ("zero3", Precision.bf16, 1, True, 13_044_237 - 131_072),
    ("zero3_offload_optimizer", Precision.bf16, 1, False, 14_158_789 - 131_072),
    ("zero3_offload_optimizer", Precision.bf16, 2, True, 15_272_901 - 131_072),
    ("zero3_offload", Precision.fp32, 1, False, 19_403_973 - 262_144),
    ("zero3_offload", Precision.bf16, 1, False, 14_158_789 - 131_072),
]


@pytest.mark.parametrize(
    ("name", "size", "shared_by", "reason"),
    [
        ("zero3", 3, 1, "give a divisor"),
        ("zero3_nvme", 2, 1, "parameters on NVMe"),
        ("zero3", 2, 2, "train.tensor_parallel_size=2.*consecutive ranks"),
    ],
)
def test_second_shards_are_refused_where_they_cannot_be(
    name: str, size: int, shared_by: int, reason: str
) -> None:
    ds = rendered(name, world_size=8, zero_optimization={"zero_hpz_partition_size": size})
    with pytest.raises(ConfigError, match=f"zero_hpz_partition_size={size}.*{reason}"):
        ds_config.check_second_shards(ds, world_size=8, shared_by=shared_by)


def test_second_shards_are_a_part_of_all_weights() -> None:
    ds = rendered("zero3", world_size=8, zero_optimization={"zero_hpz_partition_size": 4})
    ds_config.check_second_shards(ds, world_size=8, shared_by=1)
    items = model_states(**LLAMA_8B, ds=ds, world_size=8, ranks_per_node=4, gas=1)
    found = next(item for item in items if item.name == states.SECOND_SHARDS)
    assert (found.place, found.bytes_per_rank) == ("gpu", 2 * LLAMA_8B["num_params"] // 4)


@pytest.mark.parametrize(("name", "precision", "gas", "fp32_gradients", "measured"), MEASURED_LORA)
def test_frozen_parameters_against_the_tensors_of_a_real_engine(
    name: str, precision: Precision, gas: int, fp32_gradients: bool, measured: int
) -> None:
    overrides: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}} if fp32_gradients else {}
    if name == "zero0":
        name, overrides["zero_optimization"] = "zero1", {"stage": 0}
    items = model_states(
        num_params=4_000_000,
        largest_param=131_072,
        num_trainable_params=1_114_112,
        largest_trainable_param=32_768,
        ds=rendered(name, precision=precision, **overrides),
        world_size=2,
        ranks_per_node=2,
        gas=gas,
        can_pin=False,
    )
    total = sum(item.bytes_per_rank for item in items if "bucket" not in item.name)
    assert total == pytest.approx(measured, abs=1000)


def test_frozen_parameters_lie_where_parameters_lie() -> None:
    sizes = {**LLAMA_70B, "num_trainable_params": 207_093_760, "largest_trainable_param": 16 * 28_672}
    frozen = 2 * (LLAMA_70B["num_params"] - 207_093_760) // 8
    for name, place in (("zero3", "gpu"), ("zero3_offload", "pinned"), ("zero3_nvme", "nvme")):
        items = {item.name: item for item in plan(name, sizes)}
        assert items["frozen parameters"].place == place
        assert items["frozen parameters"].bytes_per_rank == frozen
    assert by_place(plan("zero3", sizes))["gpu"] < 0.2 * by_place(plan("zero3", LLAMA_70B))["gpu"]


@pytest.mark.parametrize(("precision", "measured"), [(Precision.fp32, 16.0), (Precision.bf16, 16.0)])
def test_without_zero(precision: Precision, measured: float) -> None:
    run = RunValues(
        world_size=2,
        micro_batch_size=1,
        global_batch_size=2,
        gradient_clipping=1.0,
        precision=precision,
        hidden_size=64,
    )
    ds = ds_config.render({"zero_optimization": {"stage": 0}}, {}, run)
    items = model_states(num_params=1000, largest_param=100, ds=ds, world_size=2, ranks_per_node=2, gas=1)
    assert {item.place for item in items} == {"gpu"}
    assert sum(item.bytes_per_rank for item in items) == 1000 * measured


def test_70b_with_everything_in_host_memory() -> None:
    """20 bytes per parameter, and a fifth more where torch rounds each pinned buffer to a power of two."""
    raw = by_place(plan("zero3_offload", LLAMA_70B, can_pin=False))
    assert raw["pinned"] == 0
    assert 8 * raw["host"] == pytest.approx(1411e9, rel=0.02)
    items = plan("zero3_offload", LLAMA_70B)
    real = by_place(items)
    assert 8 * (real["host"] + real["pinned"]) == pytest.approx(1706e9, rel=0.02)
    assert sum(item.bytes_per_node for item in items if item.place in ("host", "pinned")) == 8 * (
        real["host"] + real["pinned"]
    )
    assert 8 * sum(
        item.raw_bytes_per_rank for item in items if item.place in ("host", "pinned")
    ) == pytest.approx(1411e9, rel=0.02)
    flat = [item for item in items if item.name == "parameters"]
    assert [item.bytes_per_rank for item in flat] == [2**35], "17.6 GB of 16-bit parameters take 32 GiB"
    assert real["gpu"] == 2 * 8192 * 8192, "only the reduction bucket stays on the GPU"
    exact = plan("zero3_offload", LLAMA_70B, allocators=Allocators(exact_above_bytes=2**24))
    assert sum(item.bytes_per_node for item in exact if item.place != "gpu") == 8 * raw["host"]


def test_8b_sharded_over_eight_gpus() -> None:
    places = by_place(plan("zero3", LLAMA_8B))
    assert places["gpu"] - 2 * 8192**2 == pytest.approx(16 * 8_030_261_248 / 8, rel=1e-6)
    assert places["host"] == places["pinned"] == places["nvme"] == 0


def test_optimizer_offload_leaves_the_shards_on_the_gpu() -> None:
    shard = 8_030_261_248 // 8
    places = by_place(plan("zero3_offload_optimizer", LLAMA_8B, can_pin=False))
    assert places["gpu"] == 2 * shard + 2 * 8192**2
    assert places["host"] == 18 * shard


def test_nvme_keeps_gradients_and_buffers_in_host_memory() -> None:
    shard = 70_553_706_496 // 8
    items = plan("zero3_nvme", LLAMA_70B)
    places = by_place(items)
    assert places["nvme"] == (2 + 4 + 8 + 4) * shard
    locked = {item.name: item.bytes_per_rank for item in items if item.mlocked}
    largest_group = 128_256 * 8192 // 8  # the head's shard is larger than sub_group_size
    assert locked == {
        "parameter swap buffers": 5 * 2 * largest_group,
        "parameter write buffer": 2 * largest_group,
        "optimizer swap buffers": 4 * 4 * largest_group,
    }
    gradients = next(item for item in items if item.name == "gradients")
    assert (gradients.place, gradients.raw_bytes_per_rank, gradients.bytes_per_rank) == (
        "pinned",
        2 * shard,
        2**35,
    )


def test_small_pieces_stay_out_of_swap_files() -> None:
    """One of two ranks: a head of 8 MiB in 16 bits, two matrices of 768 KiB, a norm. DeepSpeed swaps from 1 MiB on."""
    shapes = [(8192, 1024), (1024, 768), (1024, 768), (1024,)]
    head, matrix, norm = 4 * 1024**2, 384 * 1024, 512
    num_params = 2 * (head + 2 * matrix + norm)
    sizes = {"num_params": num_params, "largest_param": 2 * head, "trained_shapes": shapes}
    overrides = {"zero_optimization": {"sub_group_size": 10**8, "offload_param": {"max_in_cpu": 0}}}
    items = {i.name: i for i in plan("zero3_nvme", sizes, ranks=2, **overrides)}
    assert items["parameters"].bytes_per_rank == 2 * head
    assert items["parameters too small to be swapped"].bytes_per_rank == 2 * (2 * matrix + norm)
    on_disk = items["master parameters, moments, gradients"].bytes_per_rank
    assert on_disk == 12 * (head + 2 * matrix) + 4 * (head + 2 * matrix)
    assert items["optimizer swap buffers"].bytes_per_rank == 4 * 4 * (head + 2 * matrix)
    kept = {name: items[name].bytes_per_rank for name in ("master parameters", "master gradients", "moments")}
    assert kept == {"master parameters": 4 * norm, "master gradients": 4 * norm, "moments": 8 * norm}

    smaller = [(8192, 1024), (1024, 256), (1024, 256)]  # 1 MiB of fp32 each, of which a rank has half
    sizes |= {"num_params": 2 * head + 2 * 1024 * 256, "trained_shapes": smaller}
    items = {i.name: i for i in plan("zero3_nvme", sizes, ranks=2, **overrides)}
    assert items["gradients of small weights"].bytes_per_rank == 4 * 2 * 128 * 1024
    assert items["master parameters, moments, gradients"].bytes_per_rank == 16 * head + 12 * 2 * 128 * 1024


def test_unpinned_optimizer_buffers_are_not_rounded() -> None:
    overrides = {"zero_optimization": {"offload_optimizer": {"pin_memory": False}}}
    items = plan("zero3_offload_optimizer", LLAMA_70B, **overrides)
    assert {item.place for item in items} == {"gpu", "host"}


def test_the_flat_parameters_are_pinned_whatever_the_file_says() -> None:
    overrides = {"zero_optimization": {"offload_param": {"pin_memory": False}}}
    items = plan("zero3_offload", LLAMA_70B, **overrides)
    assert next(item for item in items if item.name == "parameters").place == "pinned"


def test_part_of_the_optimizer_can_stay_on_the_gpu() -> None:
    overrides = {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}, "sub_group_size": 100}}
    sizes = {"num_params": 1600, "largest_param": 10}
    places = by_place(plan("zero3_offload_optimizer", sizes, ranks=1, can_pin=False, **overrides))
    assert places["gpu"] == 2 * 1600 + 16 * 800 + 2 * 8192**2
    assert places["host"] == 2 * 1600 + 16 * 800


def test_one_pinned_buffer_per_sub_group() -> None:
    overrides = {"zero_optimization": {"sub_group_size": 1000}}
    sizes = {"num_params": 2500, "largest_param": 10}
    items = plan("zero3_offload_optimizer", sizes, ranks=1, **overrides)
    gradients = next(item for item in items if item.name == "master gradients")
    assert gradients.raw_bytes_per_rank == 4 * 2500
    assert gradients.bytes_per_rank == 4096 + 4096 + 2048


def test_tiny_groups_are_not_swapped() -> None:
    items = plan("zero3_nvme", {"num_params": 10_000, "largest_param": 1000}, ranks=1)
    assert not [item for item in items if item.name.startswith("master parameters, moments")]
    assert by_place(items)["host"] >= 12 * 10_000


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme"])
def test_every_source_is_a_line_that_allocates(name: str) -> None:
    """A DeepSpeed upgrade that moves these lines turns this red: read them again before changing a number."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    allocates = re.compile(
        r"zeros|empty|mean|copy=True|torch.tensor|full|clone|\.to\(|pin_memory|new_cpu_locked|defragment|flatten_dense|swap_out_tensors"
    )
    adapted = {"num_trainable_params": 10**7, "largest_trainable_param": 10**5, "quantised_weights": (10**9,)}
    for item in plan(name, LLAMA_8B | adapted):
        if item.source in (states.MODEL, states.AUTOGRAD, states.TORCH_ADAM):
            continue
        path, _, line = item.source.rpartition(":")
        folder = package.parent if path.startswith("bitsandbytes") else package
        text = (folder / path).read_text().splitlines()[int(line) - 1]
        assert allocates.search(text), (item.name, item.source, text)


def test_the_strategies_of_the_memory_model_page_are_what_is_planned() -> None:
    page = (FOLDER.parent / "docs" / "memory-model.md").read_text()
    rows = re.findall(r"^\| `(zero\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for name, cells in rows:
        stage_0 = {"zero_optimization": {"stage": 0}} if name == "zero0" else {}
        largest = LLAMA_8B["largest_param"]
        file = "zero1" if stage_0 else name
        ds = rendered(file, world_size=8, hidden=4096, largest_param=largest, **stage_0)
        allocators = allocator.in_effect(AllocatorConfig(), {})
        found = model_states(**LLAMA_8B, ds=ds, world_size=8, ranks_per_node=8, gas=2, allocators=allocators)
        places = by_place(found)
        node = sum(item.bytes_per_node for item in found if item.place in ("host", "pinned"))
        sizes = [places["gpu"], places["host"], places["pinned"], places["nvme"], node]
        assert cells.split(" | ") == [f"{size / 2**30:.2f}" if size else "-" for size in sizes], name
