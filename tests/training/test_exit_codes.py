"""How `train.py` ends: each kind of error has its exit code, and so has a run that was stopped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remat import train
from remat.config.options import ConfigError
from remat.machine import ops
from remat.planning.preflight import DoesNotFit
from remat.report import console
from remat.training import build, loop, lost_peer

WORDS = ["recipe=tiny_zero3_offload"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this process as it is."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "share_cores", lambda: None)
    monkeypatch.setattr(train, "hide_gpus_from_cpu_ranks", lambda: None)
    monkeypatch.setattr(console, "quiet_libraries", lambda *_: None)
    monkeypatch.setattr(lost_peer, "leave_together", lambda: None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (DoesNotFit("too large"), 3),
        (ops.OpError("cannot be built"), 3),
        (loop.TrainingFailed("not finite"), 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def raises(*_: Any) -> None:
        raise error

    monkeypatch.setattr(build, "build", raises)
    assert train.main(WORDS) == code
    assert str(error) in capsys.readouterr().err


def test_a_bad_option_is_told_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("built"))
    assert train.main([*WORDS, "train.stepz=3"]) == 2


@pytest.mark.parametrize(("finished", "code"), [(True, 0), (False, 75)])
def test_a_run_that_was_stopped_is_not_a_finished_one(
    monkeypatch: pytest.MonkeyPatch, finished: bool, code: int
) -> None:
    monkeypatch.setattr(build, "build", lambda *_: None)
    monkeypatch.setattr(loop, "train", lambda _: SimpleNamespace(finished=finished))
    assert train.main(WORDS) == code
