"""LoRA and QLoRA, by the launcher, under every ZeRO stage they run at: plain PyTorch with peft, resume, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from remat.config.options import ModelConfig, ModelInit, PeftConfig, PeftMethod, Precision
from remat.model import adapters, hf_model
from remat.model.adapters import add_lora
from remat.model.four_bits import layout_4bit
from remat.model.layers import decoder_layers
from remat.saving import manifest
from remat.saving.exports import export
from tests.support import tiny
from tests.support.grids import cases, chosen
from tests.support.launcher import deepspeed
from tests.support.pool import RankPool
from tests.support.tiny import words

pytestmark = pytest.mark.launch

EVALUATED = ["train.eval_every=1", "data.eval_fraction=0.1"]
NOTHING_PERSISTENT = "deepspeed.overrides.zero_optimization.stage3_param_persistence_threshold=0"
STRATEGIES = {
    "zero0": ["deepspeed.config=zero1", "deepspeed.overrides.zero_optimization.stage=0"],
    "zero2": ["deepspeed.config=zero2"],
    "zero2_offload": ["deepspeed.config=zero2_offload"],
    "zero3": ["deepspeed.config=zero3"],
    "zero3_nothing_persistent": ["deepspeed.config=zero3_offload", NOTHING_PERSISTENT],
}
WHOLE = ["peft.modules_to_save=[embed_tokens,lm_head]", "train.neftune_alpha=5"]
RESUMED = {
    "zero2_offload_again": [*STRATEGIES["zero2_offload"], "peft.dora=true", "peft.rslora=true"],
    "zero3_offload_again": [*STRATEGIES["zero3_nothing_persistent"], "train.precision=bf16", *WHOLE],
    "random_base_again": ["deepspeed.config=zero3_offload", "model.init=random"],
    "qlora_again": ["deepspeed.config=zero2_offload", "train.precision=bf16", "peft=qlora", *EVALUATED],
    "qlora_sharded_again": [
        *STRATEGIES["zero3_nothing_persistent"],
        "train.precision=bf16",
        "peft=qlora",
        *EVALUATED,
    ],
}
QLORA = {
    "qlora_zero0": [*STRATEGIES["zero0"], "peft=qlora"],
    "qlora_zero2": [*STRATEGIES["zero2"], "peft=qlora"],
    "qlora_zero3": [
        *STRATEGIES["zero3_nothing_persistent"],
        "peft=qlora",
        "save.merge=true",
        "save.max_shard_size=20KB",
    ],
}
# Every stage is among the others, with its optimizer on the host or without, whole or in 4 bits.
REST = {"zero0", "zero2", "zero3", "qlora_zero0", "zero2_offload_again", "qlora_again", "random_base_again"}
REST |= {"qlora_sharded_again"}
RESUMED_STEPS = 3
LORA = ["peft=lora", "peft.r=4", "peft.alpha=8", "save.export=true"]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_workshop(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def reference(workshop: Path) -> tuple[PeftModel, list[tuple[float, float]]]:
    """The trained model of the plain loop and its (loss, gradient norm) per step."""
    kept: list[PeftModel] = []

    def adapt(net: Any) -> PeftModel:
        kept.append(tiny.adapted(net))
        return kept[0]

    history = tiny.plain_loop(words(workshop, "plain", "train.seed=1234"), adapt)
    assert history[-1][0] < history[0][0] - 0.05, "the reference itself must learn something"
    return kept[0].eval(), history


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, workshop: Path) -> Path:
    """All runs in one launch; each resumed one has dropout, a whole sibling, and a stop on the way."""
    names = chosen(request) | {"qlora_zero2", "qlora_zero3"}
    spec = {
        name: words(workshop, name, *LORA, *more)
        for name, more in (STRATEGIES | QLORA).items()
        if name in names
    }
    for name in sorted(names & RESUMED.keys()):
        more = RESUMED[name]
        drawn = [*LORA, "peft.dropout=0.2", f"train.steps={RESUMED_STEPS}", *more]
        spec[f"{name}_whole"] = words(workshop, f"{name}_whole", *drawn)
        spec[name] = words(workshop, name, *drawn, "train.stop_at=2")
        spec[f"{name}_resumed"] = words(workshop, name, *drawn, "resume=auto", "save.at_end=true")
    path = workshop / "spec.json"
    path.write_text(json.dumps(spec))
    done = deepspeed(str(path), ranks=2, script="tests/support/many_runs.py", timeout_s=1200)
    assert done.code == 0, done.out[-6000:]
    (workshop / "output.txt").write_text(done.out)
    return workshop / "out"


def logits(net: Any) -> torch.Tensor:
    with torch.no_grad():
        return net.eval()(input_ids=torch.arange(40)[None]).logits


def reloaded(workshop: Path, folder: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(workshop / "model", dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(folder))


@pytest.mark.parametrize("name", cases(STRATEGIES, REST))
def test_two_ranks_follow_plain_peft(
    name: str, runs: Path, reference: tuple[PeftModel, list[tuple[float, float]]]
) -> None:
    rows, history = tiny.rows(runs / name / "run"), reference[1]
    assert [row["loss/train"] for row in rows] == pytest.approx([loss for loss, _ in history], rel=1e-5)
    assert [row["optim/grad_norm"] for row in rows] == pytest.approx([norm for _, norm in history], rel=1e-4)


@pytest.mark.parametrize("name", cases(STRATEGIES, REST))
def test_the_export_is_an_adapter_that_peft_loads(
    name: str, runs: Path, workshop: Path, reference: tuple[PeftModel, list[tuple[float, float]]]
) -> None:
    folder = runs / name / "run" / "export"
    expected = get_keys(reference[0])
    assert load_file(folder / "adapter_model.safetensors").keys() == expected
    assert not list(folder.glob("model*.safetensors"))
    found = logits(reloaded(workshop, folder))
    assert torch.allclose(found, logits(reference[0]), atol=2e-4)


def get_keys(net: PeftModel) -> set[str]:
    return {name.replace(".default.", ".") for name, p in net.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", cases(RESUMED, REST))
def test_resume_is_bit_equal(name: str, runs: Path) -> None:
    whole, resumed = (tiny.rows(runs / n / "run") for n in (f"{name}_whole", name))
    assert len(whole) == RESUMED_STEPS
    for key in ("loss/train", "optim/grad_norm", "optim/lr"):
        assert [row.get(key) for row in resumed] == [row.get(key) for row in whole], key
    one, other = (
        load_file(runs / n / "run" / "export" / "adapter_model.safetensors") for n in (f"{name}_whole", name)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", cases(RESUMED, REST))
def test_saved_states_hold_adapters_only_and_export_offline(name: str, runs: Path, tmp_path: Path) -> None:
    run = runs / name / "run"
    state = run / "saved" / f"step-{RESUMED_STEPS:06d}"
    info = manifest.read(state)
    assert info.frozen_excluded
    live = load_file(run / "export" / "adapter_model.safetensors")
    adapters = sum(value.numel() for value in live.values())
    assert sum(entry.size_bytes for entry in info.files.values()) < 16 * adapters + 200_000
    result = export.export_saved_state(state, run, tmp_path / "out", export.Form("1KB"))
    offline = load_file(result.path / "adapter_model.safetensors")
    assert offline.keys() == live.keys()
    assert all(torch.equal(offline[key], live[key]) for key in live)
    names = {path.name for path in (run / "export").iterdir()}
    assert {path.name for path in result.path.iterdir()} == names - {"README.md"}  # the command writes the card
    assert "config.json" not in names
    one, other = (json.loads((f / "adapter_config.json").read_text()) for f in (run / "export", result.path))
    assert sorted(one.pop("target_modules")) == sorted(other.pop("target_modules"))
    assert one == other


def trained_engine(folder: Path, stage: int, offload: bool) -> dict[str, Any]:
    """Two steps; the frozen weights before and after, and the live model's logits beside its export."""
    import deepspeed

    place = {"device": "cpu", "pin_memory": False}
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {"offload_optimizer": place} if offload else {}
    zero |= {"offload_param": place} if offload and stage == 3 else {}
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    cfg = ModelConfig(init=ModelInit.pretrained, path=str(folder / "model"))
    built = {"precision": Precision.fp32, "ds_config": ds, "zero_stage": stage, "seed": 3}
    net = hf_model.build(cfg, hf_model.load_config(cfg), **built)  # type: ignore[arg-type]
    peft = PeftConfig(method=PeftMethod.lora, r=4)
    wrapped = add_lora(net, peft, layers=decoder_layers(net), ds_config=ds, zero_stage=stage, seed=3)
    adamw = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    engine = deepspeed.initialize(model=wrapped, optimizer=adamw, config=ds, dist_init_required=False)[0]

    def whole(trained: bool) -> dict[str, torch.Tensor]:
        chosen = [(n, p) for n, p in wrapped.named_parameters() if p.requires_grad == trained]
        with deepspeed.zero.GatheredParameters([p for _, p in chosen]):
            return {name: p.detach().clone() for name, p in chosen}

    before, adapters = whole(trained=False), whole(trained=True)
    for step in range(2):
        ids = torch.arange(20)[None] + step
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    out = folder / f"engine-{stage}-{offload}"
    export.export(engine, out, export.Form("1GB"), tokenizer=None)
    with torch.no_grad():
        engine.eval()
        live = engine(input_ids=torch.arange(40)[None]).logits
    return {"before": before, "after": whole(False), "first": adapters, "last": whole(True), "live": live}


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("stage", [2, 3])
def test_only_adapters_change(two_ranks: RankPool, workshop: Path, stage: int, offload: bool) -> None:
    for rank in two_ranks.run(trained_engine, folder=workshop, stage=stage, offload=offload):
        assert len(rank["before"]) == 21
        assert all(torch.equal(rank["after"][name], value) for name, value in rank["before"].items())
        assert not any(torch.equal(rank["last"][name], value) for name, value in rank["first"].items())
        found = reloaded(workshop, workshop / f"engine-{stage}-{offload}")
        assert torch.allclose(logits(found), rank["live"], rtol=0, atol=1e-5)
        with found.disable_adapter():
            assert not torch.allclose(logits(found), rank["live"], rtol=0, atol=1e-3)


def quantised(workshop: Path) -> Any:
    """The base as transformers and bitsandbytes alone quantise it."""
    shape = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    net = AutoModelForCausalLM.from_pretrained(
        workshop / "model", dtype=torch.float32, quantization_config=shape, device_map={"": "cpu"}
    )
    for module in net.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # a kernel for blocks of 32 rows, which these do not have
    return net


@pytest.fixture(scope="module")
def quantised_reference(workshop: Path) -> tuple[PeftModel, list[tuple[float, float]]]:
    """The plain loop on that base."""
    kept: list[PeftModel] = []

    def adapt(_: Any) -> PeftModel:
        kept.append(tiny.adapted(quantised(workshop)))
        return kept[0]

    history = tiny.plain_loop(words(workshop, "plain_4bit", "train.seed=1234"), adapt)
    assert history[-1][0] < history[0][0] - 0.05, "the reference itself must learn something"
    return kept[0].eval(), history


@pytest.mark.parametrize("name", cases(QLORA, REST))
def test_a_quantised_base_trains_as_in_plain_pytorch(
    name: str, runs: Path, workshop: Path, quantised_reference: tuple[PeftModel, list[tuple[float, float]]]
) -> None:
    """Its export loads on the quantised base, and merges into the whole one."""
    net, history = quantised_reference
    rows = tiny.rows(runs / name / "run")
    assert [row["loss/train"] for row in rows] == pytest.approx([loss for loss, _ in history], rel=1e-5)
    assert [row["optim/grad_norm"] for row in rows] == pytest.approx([norm for _, norm in history], rel=1e-4)
    folder = runs / name / "run" / "export"
    assert load_file(folder / "adapter_model.safetensors").keys() == get_keys(net)
    found = PeftModel.from_pretrained(quantised(workshop), str(folder))
    assert torch.allclose(logits(found), logits(net), atol=2e-4)
    whole = reloaded(workshop, folder)
    expected = logits(whole)
    assert torch.allclose(logits(whole.merge_and_unload()), expected, atol=1e-5)


def test_the_header_says_what_is_trained(runs: Path, workshop: Path) -> None:
    text = " ".join((workshop / "output.txt").read_text().split())
    assert "LoRA r=4 alpha=8 on every linear module of the decoder layers: 4,096 of" in text
    assert "18,432 parameters in 14 matrices as 4-bit NF4, the rest as trained" in text
    assert "18,432 parameters in 14 matrices as 4-bit NF4, each rank its part, the rest as trained" in text


def test_shards_in_4_bits_are_where_the_plan_says(runs: Path, workshop: Path) -> None:
    """In host memory, half of each flat weight on each of two ranks; gathered as planned; merged as trained."""
    run = runs / "qlora_zero3" / "run"
    base = AutoModelForCausalLM.from_pretrained(workshop / "model", dtype=torch.float32)
    flat = [layout_4bit.flat_bytes(size) for size in adapters.find_quantised(decoder_layers(base))]
    planned = json.loads((run / "plan.json").read_text())["planned"]
    assert planned["host_bytes_per_rank"]["4-bit weights"] == sum(flat) / 2
    rows = {row["category"]: row for row in json.loads((run / "ledger.json").read_text())["rows"]}
    for name in ("weights in host memory", "gathered by ZeRO-3 per micro-batch"):
        assert rows[name]["planned"] == pytest.approx(rows[name]["measured"], rel=0.001), name
    proof = json.loads((run / "proof.json").read_text())
    assert not any(layer["pinned_gathered_weight_bytes"] for layer in proof["layers"])
    merged = AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32)
    apart = PeftModel.from_pretrained(quantised(workshop), str(run / "export"))
    assert torch.allclose(logits(merged), logits(apart), atol=1e-4)
