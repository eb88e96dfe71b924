"""Documents of a block do not see each other: another document 1 leaves document 2 and its gradients as they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from remat.activation_checkpointing import apply, policy
from remat.config import compose
from remat.config.options import (
    Attention,
    CheckpointingConfig,
    ConfigError,
    DataFormat,
    ModelConfig,
    Packing,
    Policy,
    RunConfig,
)
from remat.model import hf_model, layers, meta_kernels, packing, small_copy
from remat.model.packing import Packed, Way
from remat.planning import strategy
from remat.planning.plan import Recordings
from tests.support import small_models
from tests.support.pool import RankPool

BOUNDS = (6, 10)  # of the second document, in each row of a batch
LENGTH = 16
ARCHITECTURES = [
    "llama",
    "gpt2",
    "qwen3",
    "gemma3_text",
    "mistral",
    "phi",
    "gpt_neox",
    "opt",
    "falcon",
    "deepseek_v3",
]
WITH_EXPERTS = {"deepseek_v3"}  # which add up in another order where other tokens came before
POLICIES = {
    "full": CheckpointingConfig(policy=Policy.full),
    "full, reentrant": CheckpointingConfig(policy=Policy.full, reentrant=True),
    "segments": CheckpointingConfig(policy=Policy.uniform, segment_layers=2),
    "segments, reentrant": CheckpointingConfig(policy=Policy.uniform, segment_layers=2, reentrant=True),
    "selective_ops": CheckpointingConfig(policy=Policy.selective_ops),
    "selective_modules": CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=["attention"]),
    "deepspeed": CheckpointingConfig(policy=Policy.deepspeed),
}


def micro_batch(rows: int, *, first: int) -> dict[str, torch.Tensor]:
    """`first` seeds the first documents; only the second ones are trained."""
    ids = torch.randint(1, 64, (rows, LENGTH), generator=torch.Generator().manual_seed(3))
    others = torch.randint(1, 64, (rows, LENGTH), generator=torch.Generator().manual_seed(first))
    places = torch.arange(LENGTH).expand(rows, -1)
    bounds = torch.tensor(BOUNDS[:rows])[:, None]
    ids = torch.where(places < bounds, others, ids)
    labels = torch.where(places <= bounds, -100, ids)
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.where(places < bounds, places, places - bounds),
    }


def way_of(net: Any) -> Packed:
    found = packing.way(net.config, net, ModelConfig(attention=Attention(net.config._attn_implementation)))
    assert isinstance(found, Way), found
    return Packed(Packing.documents, "", found)


def second_documents(net: Any, batch: dict[str, torch.Tensor], packed: Packed | None) -> list[torch.Tensor]:
    """The logits of the second documents, then every gradient of their loss. `packed` None: as one stream."""
    batch = dict(batch)
    if packed is None:
        del batch["position_ids"]
    inputs = packing.given(packed, batch, net) if packed else batch
    labels = inputs.pop("labels")
    net.zero_grad()
    torch.manual_seed(7)  # dropout
    logits = net(**inputs, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
    seen = [logits[row, bound:].detach() for row, bound in enumerate(BOUNDS[: len(logits)])]
    return [*seen, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def put_on(net: Any, cfg: CheckpointingConfig) -> apply.Applied:
    plan = policy.decide_layers(cfg, len(layers.decoder_layers(net)), zero_stage=0)
    return apply.apply(net, plan, cfg)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_another_first_document_changes_nothing_of_the_second(
    model_type: str, attention: str, rows: int
) -> None:
    net = small_models.build(model_type, attention=attention)
    packed = way_of(net)
    batch, other = micro_batch(rows, first=1), micro_batch(rows, first=2)
    before, after = (second_documents(net, given, packed) for given in (batch, other))
    assert len(before) > rows + 3
    if model_type in WITH_EXPERTS:
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    else:
        assert small_models.same(after, before)
    stream, changed = (second_documents(net, given, None) for given in (batch, other))
    assert (stream[0] - changed[0]).abs().max() > 1e-4 * stream[0].abs().max(), "without packing they are seen"


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "mistral", "opt", "falcon"])
def test_a_packed_document_is_as_it_is_alone(model_type: str) -> None:
    """No position and no mask of the block's, also where the model is given its masks, or has a window."""
    window = {"sliding_window": 3} if model_type in ("gemma3_text", "mistral") else {}
    net = small_models.build(model_type, **window).eval()
    batch = micro_batch(2, first=1)
    labels = batch.pop("labels")
    with torch.no_grad():
        packed = net(**packing.given(way_of(net), batch, net), use_cache=False).logits
        for row, bound in enumerate(BOUNDS):
            for part in (slice(0, bound), slice(bound, LENGTH)):
                alone = net(input_ids=batch["input_ids"][row : row + 1, part], use_cache=False).logits[0]
                torch.testing.assert_close(packed[row, part], alone, rtol=1e-4, atol=1e-5)
    assert (labels[:, : min(BOUNDS) + 1] == -100).all()


def through(model_type: str, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Without recomputation; with it; and with it after another first document."""
    net = small_models.build(model_type, num_hidden_layers=4)
    packed = way_of(net)
    expected = second_documents(net, micro_batch(2, first=1), packed)
    applied = put_on(net, POLICIES[name])
    try:
        found = []
        for first in (1, 2):
            with applied.micro_batch():
                found.append(second_documents(net, micro_batch(2, first=first), packed))
    finally:
        applied.remove()
    return expected, *found  # type: ignore[return-value]


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gemma3_text"])
def test_recomputation_keeps_documents_apart(model_type: str, name: str, one_rank: RankPool) -> None:
    """Positions and masks reach the layers as keyword arguments, and again when they run a second time."""
    if name == "deepspeed":
        ((expected, found, other),) = one_rank.run(through, model_type=model_type, name=name)
    else:
        expected, found, other = through(model_type, name)
    assert small_models.same(found, expected)
    assert small_models.same(other, expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_flash_attention_is_told_where_documents_end(rows: int) -> None:
    """With a stand-in for its kernels, which need a GPU; transformers' own code leads there."""
    net = small_models.build("llama").eval()
    batch, other = micro_batch(rows, first=1), micro_batch(rows, first=2)
    packed = Packed(Packing.documents, "", Way.positions)
    ends = packing.ends(packed, Attention.flash_attention_2, batch)
    documents = sorted(
        {*range(0, rows * LENGTH + 1, LENGTH), *(i * LENGTH + b for i, b in enumerate(BOUNDS[:rows]))}
    )
    assert ends["cu_seq_lens_q"].tolist() == documents
    assert ends["max_length_q"] == max(b - a for a, b in pairwise(documents))
    expected = second_documents(net, batch, packed)
    with packing.kernel_of(net, Attention.flash_attention_2):
        found, changed = (second_documents(net, given | ends, packed) for given in (batch, other))
        cut = [second_documents(net, given, packed)[0] for given in (batch, other)]
    assert small_models.same(found, changed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if rows == 2:
        assert not torch.equal(*cut), "of more than one row the positions alone are not enough"


def asked(model_type: str, attention: Attention = Attention.sdpa, **more: Any) -> Way | str:
    cfg = ModelConfig(attention=attention)
    config = AutoConfig.for_model(
        model_type, **(small_models.SIZES | small_models.ARCHITECTURES.get(model_type, {}) | more)
    )
    return packing.way(config, hf_model.skeleton(config, cfg), cfg)


def test_what_a_model_needs_is_found_by_trying() -> None:
    assert asked("llama") is asked("qwen2_moe") is asked("llama", Attention.flex_attention) is Way.positions
    assert asked("opt") is Way.masks  # it makes its mask without asking for positions
    for model_type, more in {
        "mamba": {},
        "jamba": {"num_experts": 2, "num_hidden_layers": 8, "mamba_dt_rank": 4},
        "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    }.items():
        found = asked(model_type, Attention.eager, **more)
        assert isinstance(found, str) and "another document before it changes the logits of one by" in found


def test_asking_draws_nothing_and_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asks: list[str] = []
    monkeypatch.setattr(
        packing, "_choose", lambda net, *about: asks.append(net.config.model_type) or torch.rand(1)
    )
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for _ in range(2):
        asked("llama")
    assert torch.equal(torch.get_rng_state(), state)
    assert asks == ["llama"]


def test_a_small_copy_has_a_layer_of_every_kind() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=26)
    skeleton = hf_model.skeleton(config, ModelConfig())
    assert small_copy.kinds_within(skeleton, 26) == 6  # five with a window, then one without
    net = small_copy.build(config, skeleton, attention="sdpa", trust_remote_code=False)
    assert len(net.model.layers) == 6
    assert net.config.layer_types == config.layer_types[:6]
    assert sum(p.numel() for p in net.parameters()) < small_copy.MOST_ELEMENTS


def run_of(*words: str) -> RunConfig:
    return compose.compose_run(list(words)).run


MAMBA = ("model.architecture={model_type: mamba, vocab_size: 258, hidden_size: 16, num_hidden_layers: 2}",)


def decided(cfg: RunConfig) -> Packed:
    return strategy.decide(cfg, world_size=1, can_pin=False).packed


def test_documents_are_kept_apart_where_the_model_can() -> None:
    for words in ((), ("data.packing=documents",), ("model.attention=eager",), ("data=alpaca", "data.path=x")):
        found = decided(run_of("model=tiny_llama", *words))
        assert found.apart and found.way is Way.positions
        assert found.line().startswith("documents: positions restart, attention stays within a document (")
    stream = decided(run_of("model=tiny_llama", "data.packing=stream"))
    assert not stream.apart
    assert stream.line() == "stream: a document sees those before it in its block, as data.packing=stream asks"
    for words, line in (
        (("data=synthetic",), "every block is one text"),
        (
            ("data=chat", "data.path=x", "data.packing=none"),
            "none: every row has a block of its own, padded to the longest of its micro-batch, as data.packing=none "
            "asks",
        ),
    ):
        found = decided(run_of("model=tiny_llama", *words))
        assert (found.apart, found.line()) == (False, line)


def test_a_model_that_cannot_falls_back_and_says_why_but_not_when_asked() -> None:
    base = run_of("model=tiny_llama", "checkpointing=none", "deepspeed.config=zero2")
    mamba = {"model_type": "mamba", "vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 2}
    cfg = replace(base, model=replace(base.model, architecture=mamba, attention=Attention.eager))
    found = decided(cfg)
    assert not found.apart
    assert found.line().startswith(
        "stream: a document sees those before it in its block, for this model cannot keep documents apart: another "
        "document "
    )
    rows = decided(replace(cfg, data=replace(cfg.data, format=DataFormat.chat)))
    assert rows.line().startswith(
        "none: every row has a block of its own, padded to the longest of its micro-batch, "
    )
    explicit = replace(cfg, data=replace(cfg.data, packing=Packing.documents))
    with pytest.raises(
        ConfigError, match=r"data\.packing=documents: MambaForCausalLM .*Set data\.packing=stream"
    ):
        decided(explicit)


def test_a_packing_that_its_data_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.packing=stream with data\.format=chat: .*data\.packing=none"):
        run_of("model=tiny_llama", "data=chat", "data.path=x", "data.packing=stream")
    with pytest.raises(
        ConfigError, match=r"data\.packing=none with data\.format=plain: .*data\.packing=stream"
    ):
        run_of("model=tiny_llama", "data.format=plain", "data.packing=none")


def test_a_plan_has_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer one of the activations' type [batch, 1, seq, seq], as torch makes of the model's booleans."""
    words = ("model=tiny_llama", "train.seq_len=256", "train.micro_batch_size=2", "checkpointing=none")
    plans = {}
    for form in (Packing.documents, Packing.stream):
        cfg = run_of(*words, f"data.packing={form}")
        chosen = strategy.decide(cfg, world_size=1, can_pin=True)
        plans[form] = Recordings().get(cfg, chosen)
    assert meta_kernels.PACKED in plans[Packing.documents].assumptions
    assert meta_kernels.WHOLE in plans[Packing.stream].assumptions
    kept = {form: plan.timeline.kept_bytes[1] for form, plan in plans.items()}
    assert kept[Packing.documents] - kept[Packing.stream] >= 2 * 256 * 256 * 2
