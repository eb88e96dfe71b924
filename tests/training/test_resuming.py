"""What a resume refuses before the model is built, and where its data goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remat.config import compose
from remat.config.options import ConfigError, DataFormat
from remat.model import optimizer
from remat.training import build, same_launch
from remat.training.run import Progress, RunState
from tests.data.test_batches import make_blocks, stream


def test_a_position_in_other_data_means_nothing() -> None:
    batches = stream(make_blocks(10))
    saved = RunState(Progress(), None, batches.state(), "a" * 16, None)
    build.check_same_data(saved, SimpleNamespace(key="a" * 16), batches, "auto")
    with pytest.raises(
        ConfigError,
        match=r"resume=auto.*the data, its packing, the tokenizer or train.seq_len changed \(now bbb",
    ):
        build.check_same_data(saved, SimpleNamespace(key="b" * 16), batches, "auto")


def test_epochs_become_steps_once_the_data_is_open() -> None:
    """10 blocks in batches of 4: an epoch is 2.5 steps, and no block is seen less often than asked."""
    words = ["recipe=tiny_zero3_offload", "train.global_batch_size=4"]

    def steps(epochs: float, *more: str) -> int | None:
        cfg = compose.compose_run([*words, f"train.epochs={epochs}", *more]).run
        assert cfg.train.steps is None
        return build.with_steps(cfg, 10).train.steps

    assert [steps(epochs) for epochs in (0.01, 0.4, 1, 2, 2.1, 3)] == [1, 1, 3, 5, 6, 8]
    fixed = compose.compose_run([*words, "train.steps=7"]).run
    assert build.with_steps(fixed, 10) is fixed
    with pytest.raises(
        ConfigError, match=r"train\.epochs=2 is 5 steps: train\.stop_at=6 must lie between 0 and"
    ):
        steps(2, "train.stop_at=6")
    with pytest.raises(
        ConfigError, match=r"train\.epochs=2 is 5 steps: optim\.warmup_steps=20 \+ optim\.decay_steps=2"
    ):
        steps(2, "optim=adamw_wsd", "optim.decay_steps=2")


def test_the_data_goes_on_with_the_sample_after_the_last_one() -> None:
    cfg = compose.compose_run(["recipe=tiny_zero3_offload", "train.global_batch_size=4"]).run
    world: Any = SimpleNamespace(data_rank=0, data_size=1, sequence_rank=0, sequence_parallel_size=1)

    def batches(saved: RunState | None) -> Any:
        return build._batches(cfg, make_blocks(20), world, saved)

    whole = batches(None)
    before = whole.next_step()
    after = batches(RunState(Progress(step=1), None, whole.state(), "", None)).next_step()
    assert after.sample_ids.tolist() == whole.next_step().sample_ids.tolist()
    assert not set(before.sample_ids.tolist()) & set(after.sample_ids.tolist())


BLOCKS = 80  # of the data
OLD = ["recipe=tiny_zero3_offload", "train.steps=40", "optim.warmup_steps=0", "optim.lr=3e-4"]


def changed(tmp_path: Path, *words: str, old: Sequence[str] = OLD) -> list[str]:
    """What a resume of a run of `old` at step 30 says of `words`."""
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(compose.compose_run(list(old)).yaml)
    state: Any = SimpleNamespace(path=run / "saved" / "step-000030", step=30)
    asked = compose.compose_run([*old, *words]).run
    found = replace(asked, data=replace(asked.data, format=DataFormat.alpaca))
    return same_launch.describe_changes(state, asked, build.with_steps(found, BLOCKS), BLOCKS)


def test_a_longer_schedule_is_told_with_the_learning_rates_before_and_after(tmp_path: Path) -> None:
    lines = changed(tmp_path, "train.steps=60")
    cfg = compose.compose_run(list(OLD)).run
    before, after = (optimizer.lr_at(30, cfg.optim, steps) for steps in (40, 60))
    assert after > 1.5 * before
    assert lines == [
        "changed: train.steps: 40 -> 60",
        f"lr at step 31: {before:.3g} -> {after:.3g} (optim.schedule=cosine spans train.steps=60)",
    ]


def test_more_epochs_are_told_and_what_was_found_out_is_no_change(tmp_path: Path) -> None:
    """The record has neither the steps that follow from epochs nor the format that was found in the data."""
    epochs = ["train.epochs=2", "train.global_batch_size=4", "optim.warmup_steps=null"]
    old = [OLD[0], *epochs, "data=files", "data.path=x"]
    assert changed(tmp_path, old=old) == []
    cfg = compose.compose_run(old).run
    before, after = (optimizer.lr_at(30, cfg.optim, steps) for steps in (40, 60))
    assert changed(tmp_path, "train.epochs=3", old=old) == [
        "changed: train.epochs: 2 -> 3",
        f"lr at step 31: {before:.3g} -> {after:.3g} (optim.schedule=cosine spans train.steps=60)",
    ]


def test_each_change_is_told_once_and_nothing_without_one(tmp_path: Path) -> None:
    assert changed(tmp_path) == []
    assert changed(tmp_path, "log_level=debug", "resume=auto", "train.stop_at=35") == []
    lines = changed(tmp_path, "checkpointing=none", "optim.weight_decay=0", "optim.schedule=constant")
    assert len([line for line in lines if line.startswith("changed: ")]) == 3
    assert any("checkpointing.policy: full -> none (memory and speed" in line for line in lines)
    assert lines[-1].startswith("lr at step 31: ") and lines[-1].endswith("-> 0.0003")
    assert changed(tmp_path, "optim.beta1=0.8")[-1].endswith("as before")


def test_a_run_without_a_readable_configuration_has_nothing_to_compare(tmp_path: Path) -> None:
    state: Any = SimpleNamespace(path=tmp_path / "run" / "saved" / "step-000030", step=30)
    cfg = compose.compose_run(list(OLD)).run
    assert same_launch.describe_changes(state, cfg, cfg, BLOCKS) == []


def test_a_folder_that_a_launch_left_before_its_first_state_is_started_in_again(tmp_path: Path) -> None:
    words = ["recipe=tiny_zero3_offload", f"output_dir={tmp_path}", "run_id=job"]
    again, once = (compose.compose_run([*words, f"resume={how}"]).run for how in ("auto_or_start", "none"))
    assert build._begun_before(again) is None
    folder = tmp_path / "tiny_zero3_offload" / "job"
    folder.mkdir(parents=True)
    assert build._begun_before(again) == folder
    assert build._begun_before(once) is None
