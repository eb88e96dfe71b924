"""Which evaluation is the best so far, and when training is over because none was better for long."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from remat.config import compose, validation
from remat.training import saves
from remat.training.run import Progress


def judged(
    losses: list[float | None], patience: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Progress, list[int], int]:
    """Progress after these evaluations, the steps whose model was exported, and the step it was over at (0: never)."""
    exported: list[int] = []
    monkeypatch.setattr(saves, "_export_best", lambda run, progress: exported.append(progress.step))
    cfg = SimpleNamespace(save=SimpleNamespace(best=True), train=SimpleNamespace(early_stopping_evals=patience))
    run: Any = SimpleNamespace(cfg=cfg)
    progress, over = Progress(), 0
    for step, loss in enumerate(losses):
        progress.step = step
        saves.count_evaluation(run, progress, {} if loss is None else {"loss/eval": loss})
        if saves.is_over(run, progress) and not over:
            over = step
    return progress, exported, over


@pytest.mark.parametrize(
    ("losses", "patience", "exported", "over"),
    [
        ([1.0, 3.0, 2.0, 2.5, 2.4], 0, [1, 2], 0),
        ([1.0, 3.0, 2.0, 2.5, 2.4], 2, [1, 2], 4),
        ([1.0, 3.0, 2.0, 2.5, 1.9, 2.0], 2, [1, 2, 4], 0),
        ([1.0, 2.0, 2.0, 2.0], 2, [1], 3),
        ([1.0, 2.0, float("nan"), float("inf")], 2, [1], 3),
        ([1.0, float("nan"), 5.0, 4.0], 2, [2, 3], 0),
        ([1.0, 2.0, None, None, None], 1, [1], 0),
        ([1.0], 1, [], 0),
    ],
)
def test_the_lowest_counts(
    losses: list[float | None], patience: int, exported: list[int], over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, found, when = judged(losses, patience, monkeypatch)
    assert (found, when) == (exported, over)
    assert (progress.best_step or []) == (exported[-1] if exported else [])


def test_what_is_counted_is_saved_with_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, _, _ = judged([1.0, 2.0, 3.0], 5, monkeypatch)
    saved = asdict(progress)
    assert (saved["best_loss"], saved["best_step"], saved["evals_since_best"]) == (2.0, 1, 1)
    assert Progress(**saved) == progress


@pytest.mark.parametrize("word", ["save.best=true", "train.early_stopping_evals=3"])
def test_nothing_to_compare_is_refused(word: str) -> None:
    cfg = compose.compose_run(["recipe=tiny_zero3_offload", word]).run
    assert validation.problems(cfg) == []
    cfg.train.eval_every, cfg.data.eval_fraction = 0, 0.0
    (text,) = validation.problems(cfg)
    assert word in text and "train.eval_every=STEPS and data.eval_fraction or data.eval_path" in text
    cfg.data.eval_path = "held_out.jsonl"
    assert "data." not in validation.problems(cfg)[0]
