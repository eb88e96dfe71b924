"""The two forms of the loss: same value, same gradients, different bytes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config.options import ConfigError, LossKind
from remat.model import loss
from tests.support.live_bytes import LiveBytes

VOCAB, DIM = 4096, 32


def model(model_type: str = "llama", **more: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        **(
            {
                "vocab_size": VOCAB,
                "hidden_size": DIM,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            }
            | more
        ),
    )
    return AutoModelForCausalLM.from_config(config)


def batch(rows: int = 2, seq: int = 96) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (rows, seq), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, ::5] = loss.IGNORED
    return {"input_ids": ids, "labels": labels}


def value_and_grads(net: torch.nn.Module, kind: LossKind) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    net.zero_grad()
    value = loss.TokenLoss(net, kind)(net, batch())
    (value * 0.01).backward()
    return value.detach(), {name: p.grad.clone() for name, p in net.named_parameters()}


def test_full_is_transformers_own_loss() -> None:
    net = model()
    data = batch()
    ours = loss.TokenLoss(net, LossKind.full)(net, data)
    trained = (loss.shifted(data["labels"]) != loss.IGNORED).sum()
    assert torch.allclose(ours / trained, net(**data).loss, rtol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [1, 3, 7])
def test_chunked_equals_full(monkeypatch: pytest.MonkeyPatch, tied: bool, chunks: int) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", -(-2 * 96 // chunks) * VOCAB)
    net = model(tie_word_embeddings=tied)
    full, full_grads = value_and_grads(net, LossKind.full)
    chunked, chunked_grads = value_and_grads(net, LossKind.chunked)
    assert chunked.dtype == torch.float32
    assert torch.allclose(chunked, full, rtol=1e-6)
    for name, grad in full_grads.items():
        assert torch.allclose(chunked_grads[name], grad, rtol=1e-4, atol=1e-7), name


def test_chunked_in_bf16_returns_fp32_close_to_the_exact_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 64 * VOCAB)
    torch.manual_seed(0)
    hidden = torch.randn(2, 96, DIM, dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, DIM).to(torch.bfloat16)
    targets = torch.randint(0, VOCAB, (2, 96))
    exact = torch.nn.functional.cross_entropy(
        hidden.double().flatten(0, 1) @ weight.double().T, targets.flatten(), reduction="sum"
    )
    value = loss.chunked_loss(hidden, weight, None, targets)
    assert value.dtype == torch.float32
    assert abs(value.item() / exact.item() - 1) < 2e-3


def test_model_that_edits_its_logits_is_refused() -> None:
    net = model("gemma2", head_dim=16, final_logit_softcapping=30.0)
    with pytest.raises(ConfigError, match=r"train\.loss=full"):
        loss.TokenLoss(net, LossKind.chunked)(net, batch())
    assert "forward" not in net.lm_head.__dict__
    loss.TokenLoss(net, LossKind.full)(net, batch())


def test_peak_bytes_of_both_forms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Peak of forward and backward of the loss alone, counted live; the two figures are printed."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 32 * VOCAB)
    peaks = {}
    for kind in LossKind:
        net = model()
        with LiveBytes() as live:
            value = loss.TokenLoss(net, kind)(net, batch(rows=4, seq=128))
            value.backward()
        peaks[kind] = live.peak_bytes
    logits = 4 * 128 * VOCAB
    with capsys.disabled():
        print(
            f"\nloss peak, 512 tokens x {VOCAB}: full {peaks['full'] / 2**20:.1f} MiB, "
            f"chunked {peaks['chunked'] / 2**20:.1f} MiB"
        )
    assert peaks[LossKind.full] > 8 * logits  # fp32 log-softmax and its gradient; torch 2.13 also fp32 logits
    assert peaks[LossKind.chunked] < 3 * logits


def test_a_loss_that_is_not_finite_is_left_to_the_step_guard() -> None:
    net = model()
    with torch.no_grad():
        net.lm_head.weight.fill_(float("nan"))
    assert torch.isnan(loss.TokenLoss(net, LossKind.chunked)(net, batch()))


def test_the_window_goes_on_from_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit for as many ranks; for others nothing is lost or counted twice."""
    place = {"rank": 0, "size": 1}
    monkeypatch.setattr(loss.dist, "get_rank", lambda: place["rank"])
    monkeypatch.setattr(loss.dist, "get_world_size", lambda: place["size"])
    window = loss.LossWindow(torch.device("cpu"))
    for value in (0.1, 0.2, 1e-9):
        window.add(torch.tensor(value, dtype=torch.float64), 3)
    state = json.loads(json.dumps(window.state()))
    assert window.mean() == window.mean(), "reading takes nothing"
    other = loss.LossWindow(torch.device("cpu"))
    other.restore(state)
    window.add(torch.tensor(0.7, dtype=torch.float64), 2)
    other.add(torch.tensor(0.7, dtype=torch.float64), 2)
    assert other.mean() == window.take() and other.take() > 0
    assert math.isnan(window.take())

    place["size"] = 2
    monkeypatch.setattr(loss.dist, "all_reduce", lambda total: None)
    saved = {"loss_by_rank": [1.0, 2.0, 4.0], "tokens": 7}
    means = []
    for place["rank"] in (0, 1):
        window.restore(saved)
        means.append(window.mean())
    assert means == [1.0, 0.0]
