"""Secrets are known by name, by form and from the environment; ordinary words stay."""

from __future__ import annotations

import pytest

from remat.redact import redact, redact_text


def test_by_name_and_by_value() -> None:
    config = {
        "hub_token": "abc",
        "api_key": "k",
        "password": "p",
        "tokenizer": "bytes",
        "bos_token": "<s>",
        "tokens": 5,
        "empty": {"secret": None},
        "list": [{"access_key": "x"}, "https://me:pw@host/repo"],
        "env": "hf_" + "a" * 30,
    }
    assert redact(config) == {
        "hub_token": "***",
        "api_key": "***",
        "password": "***",
        "tokenizer": "bytes",
        "bos_token": "<s>",
        "tokens": 5,
        "empty": {"secret": None},
        "list": [{"access_key": "***"}, "https://***@host/repo"],
        "env": "***",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host/x and s3://a@b", "https://***@host/x and s3://***@b"),
        ("/data/https:/me:pw@host/x", "/data/https:/***@host/x"),
        ("deepspeed.overrides.comet.api_key=abc train.steps=3", "deepspeed.overrides.comet.api_key=*** train.steps=3"),
        ("comet:\n  api_key: abc def\n  token: null\nend: 1", "comet:\n  api_key: ***\n  token: null\nend: 1"),
        ("FLOPs per token = 6 N; one token: five words", "FLOPs per token = 6 N; one token: five words"),
        ("model.tokenizer=bytes a@b.c train.steps=3", "model.tokenizer=bytes a@b.c train.steps=3"),
        ("W&B said: 401 for key 0123456789abcdef", "W&B said: 401 for key ***"),
    ],
)  # fmt: skip
def test_text(text: str, expected: str) -> None:
    env = {"WANDB_API_KEY": "0123456789abcdef", "HF_TOKEN": "short", "HOME": "FLOPs per"}
    assert redact_text(text, env) == expected
