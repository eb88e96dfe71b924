"""What a run that is out of memory asks of `remat launch`, and the words that it is started again with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from remat.config.options import ConfigError, OnOutOfMemory, RunConfig
from remat.launch import arguments, retreat, supervisor
from remat.launch.retreat import FILE, NUMBER, Retreat

LESS = ["checkpointing=full"]


def test_a_run_that_nobody_would_start_again_is_refused() -> None:
    cfg = RunConfig(on_out_of_memory=OnOutOfMemory.retreat)
    with pytest.raises(ConfigError, match=r"on_out_of_memory=retreat: only `remat launch` on one node"):
        retreat.check(cfg, {})
    retreat.check(cfg, {FILE: "somewhere"})
    retreat.check(RunConfig(), {})


@pytest.mark.parametrize(
    ("overrides", "keeps"),
    [
        (["checkpointing=full", "train.micro_batch_size=1"], True),
        (["train.loss=chunked"], True),
        (["deepspeed.config=zero3"], False),
        (["train.seq_len=512"], False),
    ],
)
def test_only_what_a_saved_state_fits_may_change(overrides: list[str], keeps: bool) -> None:
    assert retreat.keeps_the_run(overrides) is keeps


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], ["checkpointing=full", "run_id=r1", "resume=auto_or_start"]),
        (["resume=auto", "run_id=old"], ["checkpointing=full", "run_id=r1", "resume=auto_or_start"]),
        (["strategy=auto"], ["checkpointing=full", "run_id=r1", "resume=auto_or_start"]),
        (["resume=outputs/a/r1"], ["resume=outputs/a/r1", "checkpointing=full"]),
    ],
)
def test_the_next_launch_goes_on_in_the_same_run(before: list[str], after: list[str]) -> None:
    asked = Retreat(LESS, "out of memory", "outputs/a/r1")
    assert retreat.words_again(["recipe=a", *before], asked) == ["recipe=a", *after]


def test_before_there_is_a_run_it_is_started_anew() -> None:
    assert retreat.words_again(["recipe=a"], Retreat(LESS, "")) == ["recipe=a", *LESS, "resume=auto_or_start"]


class Launches:
    """Stands for the launches of `supervisor.launch`: each ends with a code, and may ask for a retreat."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: tuple[int, bool, bool]) -> None:
        self.ends, self.seen = list(ends), list[tuple[list[str], dict[str, str], Path]]()
        monkeypatch.setattr(supervisor, "_launch_once", self.once)

    def once(self, words: arguments.LaunchWords, told: dict[str, str]) -> tuple[int, bool]:
        self.seen.append((words.words, told, words.log_dir))
        code, asks, stopped = self.ends[len(self.seen) - 1]
        words.log_dir.mkdir(parents=True, exist_ok=True)
        if asks:
            retreat.leave(Retreat(LESS, "out of GPU memory", "outputs/a/r1"), told)
        return code, stopped


WORDS = arguments.LaunchWords(["--num_gpus", "2"], "module", "remat.train", ["recipe=a"], Path(), 600.0)


def test_a_run_that_asks_is_started_again_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launches = Launches(monkeypatch, (70, True, False), (70, True, False), (0, False, False))
    assert supervisor.launch(replace(WORDS, log_dir=tmp_path)) == 0
    words, told, logs = zip(*launches.seen, strict=True)
    assert words[0] == ["recipe=a"] and words[1][-3:] == [*LESS, "run_id=r1", "resume=auto_or_start"]
    assert [each[NUMBER] for each in told] == ["0", "1", "2"]
    assert logs == (tmp_path, tmp_path / "retreat-1", tmp_path / "retreat-2")
    assert "starting the run again with less memory, checkpointing=full: out of GPU memory" in "".join(
        capfd.readouterr()
    )


@pytest.mark.parametrize("end", [(70, False, False), (137, False, False), (70, True, True), (75, True, False)])
def test_other_ends_are_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: tuple[int, bool, bool]
) -> None:
    """Also where somebody asked the run to stop."""
    launches = Launches(monkeypatch, end)
    assert supervisor.launch(replace(WORDS, log_dir=tmp_path)) == end[0]
    assert len(launches.seen) == 1


def test_several_nodes_cannot_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launches = Launches(monkeypatch, (70, False, False))
    supervisor.launch(replace(WORDS, runner=["--hostfile", "hosts"], log_dir=tmp_path))
    assert launches.seen[0][1] == {}
