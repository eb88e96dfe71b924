"""QLoRA under ZeRO-3 on two ranks: its base is shards, its training is that of the same engine with the base whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from remat.activation_checkpointing import apply, policy
from remat.config import compose, ds_config
from remat.config.options import ModelConfig, ModelInit, PeftConfig, PeftMethod, Precision
from remat.model import adapters, hf_model
from remat.model.four_bits.layout_4bit import flat_bytes
from remat.model.layers import decoder_layers
from remat.saving.exports import export, merge
from tests.support import small_models
from tests.support.pool import RankPool

LAYERS, STEPS, CPU = 2, 2, torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 320, "num_key_value_heads": 1, "num_hidden_layers": LAYERS}
BARE = {  # nothing is kept gathered, fetched ahead or used again: what stays is what autograd keeps
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
NAMES = sorted(compose.group_choices()["checkpointing"])
PEFT = PeftConfig(method=PeftMethod.qlora, r=4, alpha=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    for family in ("qwen2", "gpt2"):
        small_models.build(family, **SIZES).to(torch.bfloat16).save_pretrained(
            folder / family, max_shard_size="200KB"
        )
    return folder


def rendered(config: str, zero: dict[str, Any], precision: Precision, accumulation: int = 1) -> dict[str, Any]:
    values = ds_config.RunValues(
        world_size=2,
        micro_batch_size=2,
        global_batch_size=4 * accumulation,
        gradient_clipping=1.0,
        precision=precision,
        hidden_size=128,
        pin_memory_possible=False,
    )
    made = ds_config.render(ds_config.load(config, compose.DS_CONFIG_DIR), {"zero_optimization": zero}, values)
    return made | {"zero_force_ds_cpu_optimizer": False}  # torch's AdamW everywhere: one arithmetic


def find_matrices(net: Any) -> list[str]:
    return adapters.paths_to_quantise(net, decoder_layers(net))


def hide(net: Any) -> None:
    """Take the 4-bit weights from DeepSpeed, which leaves them whole on each rank."""
    for module in net.modules():
        if adapters.is_quantised(module):
            weight = module._parameters.pop("weight")
            object.__setattr__(module, "weight", weight)


def build(folder: Path, ds: dict[str, Any], precision: Precision, *, hidden: bool, read_as: str) -> Any:
    cfg = ModelConfig(init=ModelInit.pretrained, path=str(folder))
    config, dtype = hf_model.load_config(cfg), hf_model.DTYPES[precision]
    if read_as == "4 bits":
        from remat.model.four_bits import load_4bit

        net, _ = load_4bit.load(cfg, config, dtype=dtype, ds_config=ds, device=CPU, find_matrices=find_matrices)
    else:
        stage = 2 if hidden else 3
        net = hf_model.build(cfg, config, precision=precision, ds_config=ds, zero_stage=stage, seed=1)
        if hidden:
            adapters.quantise(net, decoder_layers(net), dtype, CPU)
            hide(net)
        else:
            from remat.model.four_bits import sharded_4bit

            sharded_4bit.quantise_shards(net, find_matrices(net), dtype, ds)
    stage = 2 if hidden else 3
    return adapters.add_lora(net, PEFT, layers=decoder_layers(net), ds_config=ds, zero_stage=stage, seed=5)


def gathered(parameter: Any) -> torch.Tensor:
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()


class Watch:
    """What of the gathered base is still there once the forward that gathered it is over."""

    def __init__(self, net: Any) -> None:
        self.quantised = [module for module in net.modules() if adapters.is_quantised(module)]
        self._seen: list[tuple[Any, int]] = []
        for module in self.quantised:
            module.register_forward_hook(self._note, prepend=True)

    def _note(self, module: Any, *_: Any) -> None:
        storage = module.weight.data.untyped_storage()
        self._seen.append((storage._weak_ref(), storage.nbytes()))

    def alive(self) -> tuple[int, int]:
        """Bytes that are left, and of all that were there, since the last call."""
        sizes = [size for ref, size in self._seen if not torch.UntypedStorage._expired(ref)]
        passed = sum(size for _, size in self._seen)
        self._seen.clear()
        return sum(sizes), passed


def train(
    folder: Path,
    *,
    name: str = "none",
    config: str = "zero3",
    hidden: bool = False,
    precision: Precision = Precision.bf16,
    read_as: str = "16 bits",
    zero: dict[str, Any] = BARE,
    accumulation: int = 1,
    evaluate: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:
    """Losses, gradients of each step, final adapters; bytes of the base on this rank, and left after a forward."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    ds = rendered(config, zero, precision, accumulation)
    net = build(folder, ds, precision, hidden=hidden, read_as=read_as)
    cfg = compose.compose_run([f"checkpointing={name}", "checkpointing.offload.min_bytes=0"]).run.checkpointing
    applied = apply.apply(net, policy.decide_layers(cfg, LAYERS, zero_stage=3), cfg, zero_stage=3, device=CPU)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds, dist_init_required=False)
    watch = Watch(net)
    found: dict[str, Any] = {"losses": [], "gradients": [], "alive": []}
    for step in range(STEPS):
        for part in range(accumulation):
            ids = batch(step, part)
            with applied.micro_batch():
                loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
                found["alive"].append(watch.alive())
                engine.backward(loss)
                watch.alive()
            found["losses"].append(loss.item())
        found["gradients"] += [safe_get_full_grad(p).clone() for p in trained]
        engine.step()
        if evaluate:
            found["losses"].append(float(logits(engine).square().sum()))
    found |= {"adapters": [gathered(p) for p in trained]} | held_of(watch.quantised)
    if out is not None:
        merge.export_merged(engine, out, export.Form("1GB"), tokenizer=None)
        found["logits"] = logits(engine)
    applied.remove()
    engine.destroy()
    return found


def held_of(quantised: list[Any]) -> dict[str, Any]:
    tensors = [getattr(module.weight, "ds_tensor", module.weight) for module in quantised]
    return {
        "held": sum(tensor.nbytes for tensor in tensors),
        "on": {tensor.device.type for tensor in tensors},
        "sizes": [module.in_features * module.out_features for module in quantised],
    }


def batch(step: int, part: int) -> torch.Tensor:
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(1000 * part + 100 * step + rank)
    return torch.randint(0, 64, (2, 16), generator=generator)


def logits(net: Any) -> torch.Tensor:
    with torch.no_grad():
        net.eval()
        found: torch.Tensor = net(input_ids=torch.arange(20)[None], use_cache=False).logits
        net.train()
    return found


def assert_same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one["losses"] == other["losses"]
        for kind in ("gradients", "adapters"):
            assert all(map(torch.equal, one[kind], other[kind])), kind
    assert any(gradient.any() for gradient in left[0]["gradients"])


@pytest.fixture(scope="module")
def whole(two_ranks: RankPool, base: Path) -> list[dict[str, Any]]:
    """The same engine, with the base in 4 bits hidden from it."""
    return two_ranks.run(train, folder=base / "qwen2", hidden=True)


@pytest.mark.sample(one_in=8)
@pytest.mark.parametrize("name", NAMES)
def test_every_policy_trains_as_with_a_whole_base(
    name: str, two_ranks: RankPool, base: Path, whole: list[dict[str, Any]]
) -> None:
    """With both offloads; the bytes of each rank are its part and nothing of the base is left after a forward."""
    found = two_ranks.run(train, folder=base / "qwen2", name=name, config="zero3_offload")
    assert_same(found, whole)
    assert len(whole[0]["gradients"]) == STEPS * LAYERS * 7 * 2
    for rank in found:
        assert rank["held"] == sum(map(flat_bytes, rank["sizes"])) / 2 and rank["on"] == {"cpu"}
        assert all(alive == 0 < passed for alive, passed in rank["alive"])


EVALUATED: dict[str, Any] = {"accumulation": 2, "evaluate": True}


@pytest.mark.parametrize(
    "more",
    [
        {"read_as": "4 bits", "config": "zero3_offload_optimizer"},
        # some weights are never released, the others are fetched ahead
        pytest.param(
            {"zero": {"stage3_param_persistence_threshold": 9000}, **EVALUATED}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_every_setting_trains_as_with_a_whole_base(
    more: dict[str, Any], two_ranks: RankPool, base: Path, whole: list[dict[str, Any]]
) -> None:
    alike = {key: more[key] for key in EVALUATED if key in more}
    expected = two_ranks.run(train, folder=base / "qwen2", hidden=True, **alike) if alike else whole
    assert_same(two_ranks.run(train, folder=base / "qwen2", name="selective_ops", **more), expected)


def test_a_merged_model_answers_as_the_sharded_one(two_ranks: RankPool, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    first, _ = two_ranks.run(
        train,
        folder=base / "qwen2",
        precision=Precision.fp32,
        read_as="4 bits",
        out=out,
        config="zero3_offload",
    )
    found, expected = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), first["logits"]
    assert torch.allclose(logits(found), expected, rtol=0, atol=2e-5)
    plain = AutoModelForCausalLM.from_pretrained(base / "qwen2", dtype=torch.float32)
    assert (logits(plain) - expected).abs().max() > 0.05, "the adapters and 4 bits do something"


def count_read(folder: Path) -> tuple[int, int]:
    """Elements of the files that this rank read, of matrices in 4 bits and of the rest."""
    from remat.model.four_bits import load_4bit

    counts, plain = [0, 0], load_4bit.Files.read

    def counting(self: Any, value: torch.Tensor, rows: slice | None = None) -> torch.Tensor:
        found = plain(self, value, rows)
        counts[rows is None] += found.numel()
        return found

    load_4bit.Files.read = counting  # type: ignore[method-assign]
    try:
        build(folder, rendered("zero3", BARE, Precision.bf16), Precision.bf16, hidden=False, read_as="4 bits")
    finally:
        load_4bit.Files.read = plain  # type: ignore[method-assign]
    return counts[0], counts[1]


def test_each_rank_reads_and_quantises_its_own_rows(two_ranks: RankPool, base: Path) -> None:
    """Rank 0 alone reads the rest."""
    first, second = two_ranks.run(count_read, folder=base / "qwen2")
    net = small_models.build("qwen2", **SIZES)
    sizes = adapters.find_quantised(decoder_layers(net))
    assert first[0] == second[0] == sum(sizes) / 2
    assert first[1] == sum(p.numel() for p in net.parameters()) - sum(sizes) and second[1] == 0


def refused(folders: list[Path]) -> str:
    from remat.model.four_bits import load_4bit

    rank = torch.distributed.get_rank()
    cfg = ModelConfig(init=ModelInit.pretrained, path=str(folders[rank]))
    config = hf_model.load_config(ModelConfig(init=ModelInit.pretrained, path=str(folders[0])))
    ds = rendered("zero3", BARE, Precision.bf16)
    try:
        load_4bit.load(cfg, config, dtype=torch.bfloat16, ds_config=ds, device=CPU, find_matrices=find_matrices)
    except load_4bit.Elsewhere as reason:
        return str(reason)
    return "read"


def test_what_one_rank_cannot_read_so_all_ranks_leave_to_transformers(
    two_ranks: RankPool, base: Path, tmp_path: Path
) -> None:
    first, second = two_ranks.run(refused, folders=[base / "qwen2", tmp_path])
    assert first == second == f"{tmp_path} has no model*.safetensors"
    other = small_models.build("qwen2", **SIZES | {"intermediate_size": 384})
    other.save_pretrained(tmp_path)
    assert "has another shape in its file" in two_ranks.run(refused, folders=[base / "qwen2", tmp_path])[0]


def read(folder: Path, ways: list[str]) -> list[dict[str, torch.Tensor]]:
    """All parameters, gathered, and buffers of the model that each way of reading makes."""
    ds, found = rendered("zero3", BARE, Precision.bf16), []
    for way in ways:
        net = build(folder, ds, Precision.bf16, hidden=False, read_as=way)
        hf_model.assert_sharded(net, torch.distributed.get_world_size())
        values = {name: gathered(p) for name, p in net.named_parameters()}
        found.append(values | {f"{name}, a buffer": b.clone() for name, b in net.named_buffers()})
    return found


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_reading_as_4_bits_gives_what_quantising_afterwards_does(
    family: str, two_ranks: RankPool, base: Path
) -> None:
    """Also of a matrix whose rows are no whole blocks, or lie transposed."""
    for one, other in two_ranks.run(read, folder=base / family, ways=["16 bits", "4 bits"]):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value.dtype is other[name].dtype and torch.equal(value, other[name]), name
        assert sum(value.dtype is torch.uint8 for value in one.values()) == LAYERS * (
            7 if family == "qwen2" else 4
        )
