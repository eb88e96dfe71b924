"""A precision that the device cannot compute in is refused before the model is built, with those that it can."""

from __future__ import annotations

import pytest
from deepspeed.accelerator import get_accelerator

from remat.config.options import ConfigError, Precision
from remat.training import build


@pytest.mark.parametrize("bf16", [True, False])
def test_fp16_is_refused_where_the_device_cannot(monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    monkeypatch.setattr(get_accelerator(), "is_bf16_supported", lambda: bf16)
    others = "fp32, bf16" if bf16 else "fp32"
    with pytest.raises(ConfigError, match=f"train.precision=fp16 is not supported on this .*: use {others}$"):
        build._check_precision(Precision.fp16)
    build._check_precision(Precision.fp32)


def test_what_the_device_can_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    build._check_precision(Precision.fp16)
