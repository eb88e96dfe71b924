"""How weights are read is planned from headers: who reads what, in what time, and what a rank holds meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.config.options import ConfigError, ModelLoad
from remat.config.units import GIB
from remat.machine import gpus
from remat.model.hf_model import Loaded, describe_loaded
from remat.planning import strategy
from remat.planning.loading import WHOLE_MODEL, Loading, plan_loading
from remat.report.loading import CHECKING, LoadingProgress
from remat.training import build, ledger
from tests.support.tiny import make_model

SIZE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 259}
MACHINE = ["hardware=1x4090", "hardware.gpus_per_node=2"]


def planned(folder: Path | str, *words: str, ranks: int = 2, on_gpu: bool = False) -> Loading | None:
    args = ["recipe=tiny_zero3_offload", "model=hf", f"model.path={folder}", "model.tokenizer=bytes", *words]
    cfg = compose.compose_run([*args, *MACHINE]).run
    return plan_loading(
        cfg, strategy.decide(cfg, world_size=ranks, can_pin=on_gpu), world_size=ranks, on_gpu=on_gpu
    )


def test_reading_into_4_bit_shards_is_planned_with_the_shards_it_makes() -> None:
    """70B on two cards: 4-bit shards on the host, a matrix at a time; rank 0 alone reads what stays in 16 bits."""
    asked = compose.compose_run(["recipe=llama70b_qlora_2x24"]).run
    decided = strategy.decide(asked, world_size=2, can_pin=True)
    found = plan_loading(asked, decided, world_size=2, on_gpu=True)
    assert found is not None and found.way is ModelLoad.own_slices and not found.files_seen
    matrices, rest = sum(decided.held.quantised_weights), 2 * 128256 * 8192 + 161 * 8192
    assert found.read_bytes_of_all == 2 * (matrices + rest)
    assert found.read_bytes == matrices + 2 * rest
    shards = (0.516 * matrices + 2 * rest) / 2
    assert shards < found.host_peak_bytes < 1.001 * shards + 2 * 128256 * 8192 + GIB // 8
    assert found.gpu_peak_bytes == 2 * 128256 * 8192, "the embedding, before it is cut into shards"
    assert found.time_s is not None and "each rank reads its own" in found.line()


def test_4_bit_weights_below_zero_3_are_planned_in_the_bits_they_train_in(tmp_path: Path) -> None:
    make_model(tmp_path, **SIZE)
    both = [
        planned(tmp_path, "train.precision=bf16", "deepspeed.config=zero2", f"peft={peft}", on_gpu=True)
        for peft in ("lora", "qlora")
    ]
    assert both[0] and both[1] and both[1].because == WHOLE_MODEL
    assert both[1].read_bytes == both[0].read_bytes and both[1].gpu_peak_bytes < both[0].gpu_peak_bytes
    assert both[1].flat_bytes == both[0].flat_bytes > 0


def test_below_zero_3_each_rank_reads_all_and_copies_what_is_trained(tmp_path: Path) -> None:
    """ZeRO-2's flat buffer is made on the GPU beside the model, or on the host where the GPU lacks the room."""
    file = make_model(tmp_path, **SIZE) / "model.safetensors"
    weights = [weight.nbytes for weight in load_file(file).values()]
    whole, fp32 = sum(weights), ("train.precision=fp32", "deepspeed.config=zero2")
    found = planned(tmp_path, *fp32, on_gpu=True)
    assert found is not None and found.way is ModelLoad.from_pretrained
    assert found.read_bytes == found.read_bytes_of_all == whole
    assert (found.host_peak_bytes, found.gpu_peak_bytes) == (max(weights), 2 * whole)
    assert f"each rank reads all {whole / 1024:.1f} KiB (below ZeRO-3" in found.line()
    room = (gpus.outside_torch_bytes(2) + 1.5 * whole) / GIB
    tight = planned(tmp_path, *fp32, f"hardware.gpu_memory_gib={room}", on_gpu=True)
    assert tight is not None
    assert (tight.host_peak_bytes, tight.gpu_peak_bytes) == (2 * whole, whole + max(weights))
    on_cpus = planned(tmp_path, *fp32, ranks=2)
    assert on_cpus is not None and (on_cpus.host_peak_bytes, on_cpus.gpu_peak_bytes) == (2 * whole, 0)
    adapters = planned(tmp_path, *fp32, "peft=lora", on_gpu=True)
    assert adapters is not None and whole < adapters.gpu_peak_bytes < 2 * whole


def test_each_rank_reads_its_own_part_of_the_files(tmp_path: Path) -> None:
    file = make_model(tmp_path, **SIZE) / "model.safetensors"
    whole = sum(weight.nbytes for weight in load_file(file).values())
    found = planned(tmp_path, "train.precision=fp32")
    assert found is not None and found.way is ModelLoad.own_slices and found.because == ""
    assert found.read_bytes_of_all == whole
    assert whole / 2 <= found.read_bytes <= 1.01 * whole / 2
    assert found.host_peak_bytes == pytest.approx(whole / 2, rel=0.01)
    assert found.gpu_peak_bytes == 0
    assert found.time_s == pytest.approx(whole / 7.45e9, rel=0.01)
    assert f"of {whole / 1024:.1f} KiB in " in found.line() and "not seen" not in found.line()


def test_other_dtypes_and_gpus_take_a_buffer_to_read_through(tmp_path: Path) -> None:
    make_model(tmp_path, **SIZE)
    plain, converted = (planned(tmp_path, f"train.precision={name}") for name in ("fp32", "bf16"))
    assert plain and converted
    assert converted.host_peak_bytes == plain.host_peak_bytes / 2 + 16 * 1024**2
    onto = planned(tmp_path, "train.precision=fp32", "deepspeed.config=zero3", on_gpu=True)
    assert onto and onto.host_peak_bytes == 16 * 1024**2
    assert onto.gpu_peak_bytes == plain.host_peak_bytes + 4 * 259 * 64


def test_files_that_are_not_here_are_taken_to_hold_16_bits() -> None:
    found = planned("nobody/nothing", "model=llama8b")
    assert found is not None and not found.files_seen
    assert found.read_bytes_of_all == pytest.approx(2 * 8.03e9, rel=0.01)
    assert "files not seen, taken to hold 16 bits a value" in found.line()


def test_the_reason_is_told_where_rank_0_reads_all(tmp_path: Path) -> None:
    make_model(tmp_path, **SIZE)
    (tmp_path / "adapter_config.json").write_text("{}")
    found = planned(tmp_path)
    assert found is not None and found.way is ModelLoad.from_pretrained
    assert found.read_bytes == found.read_bytes_of_all
    assert "peak per rank at least" in found.line()
    assert "rank 0 reads all" in found.line() and "(the folder holds adapters too)" in found.line()


def test_shards_on_nvme_take_no_memory_while_weights_are_read(tmp_path: Path) -> None:
    make_model(tmp_path, **SIZE)
    words = ("train.precision=bf16", "deepspeed.config=zero3_nvme", f"hardware.nvme_path={tmp_path}")
    found = planned(tmp_path, *words, on_gpu=True)
    assert found is not None and "parameters on NVMe" in found.because
    assert (found.host_peak_bytes, found.gpu_peak_bytes) == (0, 2 * 2 * 259 * 64), "one weight and its copy"
    assert "of host memory" not in found.line()


def test_nothing_is_planned_where_nothing_is_read_in_slices(tmp_path: Path) -> None:
    make_model(tmp_path, **SIZE)
    random = compose.compose_run(["recipe=tiny_zero3_offload"]).run
    decided = strategy.decide(random, world_size=2, can_pin=False)
    assert plan_loading(random, decided, world_size=2, on_gpu=False) is None


def test_own_slices_that_options_rule_out_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    make_model(tmp_path, **SIZE)
    with pytest.raises(ConfigError, match=r"model\.load=own_slices: .* ZeRO stage 2 .* use model\.load=auto"):
        planned(tmp_path, "model.load=own_slices", "deepspeed.config=zero2")
    with pytest.raises(ConfigError, match=r"model\.load=own_slices: model\.init=random reads no weights"):
        compose.compose_run(["recipe=tiny_zero3_offload", "model.load=own_slices"])


def test_own_slices_that_files_rule_out_are_refused_at_the_first_look(tmp_path: Path) -> None:
    make_model(tmp_path, **SIZE)
    (tmp_path / "adapter_config.json").write_text("{}")
    words = ["recipe=tiny_zero3_offload", "model=hf", f"model.path={tmp_path}", "model.tokenizer=bytes"]
    told = {
        load: build._look_first(compose.compose_run([*words, f"model.load={load}"]).run).problems
        for load in ("auto", "own_slices")
    }
    assert told["auto"] == []
    assert len(told["own_slices"]) == 1 and told["own_slices"][0].startswith("model.load=own_slices: ")


def test_the_command_tells_how_weights_are_read(tmp_path: Path) -> None:
    make_model(tmp_path, **SIZE)
    words = [
        "recipe=tiny_zero3_offload",
        "model=hf",
        f"model.path={tmp_path}",
        "model.tokenizer=bytes",
        *MACHINE,
    ]
    assert (
        "loading: each rank reads its own"
        in CliRunner().invoke(cli.app, ["plan", "--no-advice", *words]).output
    )
    unknown = CliRunner().invoke(cli.app, ["plan", "--no-advice", *words, "hardware.nvme_read_gbs=null"]).output
    assert "s from disks of 7.45 GB/s" in " ".join(unknown.split())
    found = json.loads(CliRunner().invoke(cli.app, ["plan", "--json", "--no-advice", *words]).output)["loading"]
    assert found["way"] == "own_slices" and found["read_bytes"] < found["read_bytes_of_all"]


def run_of(loaded: list[Loaded], loading: Loading | None) -> Any:
    engine = SimpleNamespace(optimizer=SimpleNamespace())
    return SimpleNamespace(plan=SimpleNamespace(loading=loading), loaded=loaded, engine=engine)


def test_the_ledger_holds_the_plan_against_what_was_read() -> None:
    own = ModelLoad.own_slices
    loaded = [Loaded(own, "", 60, 2.0, 70), Loaded(own, "", 50, 3.0, 90)]
    plan = Loading(own, "", 55, 110, 64, 0, 1.5, True, 64)
    rows = {row.category: (row.planned, row.measured) for row in ledger._loading(run_of(loaded, plan))}
    assert rows == {
        "weights read, all ranks together": (110, 110),
        "host memory while weights are read": (64, 90),
        "reading weights": (1.5, 3.0),
    }
    assert ledger._loading(run_of([], None)) == []


def test_what_transformers_reads_is_not_counted_and_says_so() -> None:
    loaded = [Loaded(ModelLoad.from_pretrained, "a reason", None, 2.0, 70)]
    row = ledger._loading(run_of(loaded, None))[0]
    assert (row.planned, row.measured) == (None, None)
    assert row.how.startswith("transformers counts none; rank 0 read all") and row.how.endswith(": a reason")
    assert (
        describe_loaded([Loaded(ModelLoad.from_pretrained, "", None, 2.0, 70)]) == "read by every rank in 2 s"
    )


def test_progress_says_rate_and_time_left_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said, alive = [100.0], [], []
    monkeypatch.setattr("remat.report.loading.time.monotonic", lambda: now[0])
    progress = LoadingProgress(said.append, lambda: alive.append(now[0]))
    for second in range(1, 12):
        now[0] = 100.0 + second
        progress(second * 2**20, 20 * 2**20)
    assert said == [
        "loading: 5.0 MiB of 20.0 MiB of this rank, 1.0 MiB/s, 15 s left",
        "loading: 10.0 MiB of 20.0 MiB of this rank, 1.0 MiB/s, 10 s left",
    ]
    assert len(alive) == 11


def test_the_check_of_a_state_is_timed_from_its_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an older state, after a newer one that is damaged."""
    now, said = [100.0], list[str]()
    monkeypatch.setattr("remat.report.loading.time.monotonic", lambda: now[0])
    progress = LoadingProgress(said.append, lambda: None, CHECKING)
    for begins in (160.0, 200.0):
        for second in (0, 5, 10):
            now[0] = begins + second
            progress(second * 2**30, 20 * 2**30)
    line = "checking the saved state: {}.0 GiB of 20.0 GiB, 1.0 GiB/s, {} s left"
    assert said == [line.format(5, 15), line.format(10, 10)] * 2
