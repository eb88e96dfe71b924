"""What a run that is out of memory asks of `remat launch`, and the words that it is started again with."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from remat.config import compose
from remat.config.options import ConfigError, OnOutOfMemory, RunConfig, StrategyChoice
from remat.launch import arguments, retreat, supervisor
from remat.launch.retreat import FILE, NUMBER, Retreat

LESS = ["checkpointing=full"]
GIVEN = "strategy=given"


def test_a_run_that_nobody_would_start_again_is_refused() -> None:
    cfg = RunConfig(on_out_of_memory=OnOutOfMemory.retreat)
    with pytest.raises(ConfigError, match=r"on_out_of_memory=retreat: only `remat launch` on one node"):
        retreat.check(cfg, {})
    retreat.check(cfg, {FILE: "somewhere"})
    retreat.check(RunConfig(), {})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], [*LESS, GIVEN, "run_id=r1", "resume=auto_or_start"]),
        (["resume=auto", "run_id=old"], [*LESS, GIVEN, "run_id=r1", "resume=auto_or_start"]),
        (["strategy=auto"], [*LESS, GIVEN, "run_id=r1", "resume=auto_or_start"]),
        ([*LESS, GIVEN], [*LESS, *LESS, GIVEN, "run_id=r1", "resume=auto_or_start"]),
        (["resume=outputs/a/r1"], ["resume=outputs/a/r1", *LESS, GIVEN]),
    ],
)
def test_the_next_launch_goes_on_in_the_same_run(before: list[str], after: list[str]) -> None:
    asked = Retreat(LESS, "out of memory", "outputs/a/r1")
    assert retreat.words_again(["recipe=a", *before], asked) == ["recipe=a", *after]


def test_before_there_is_a_run_it_is_started_anew() -> None:
    assert retreat.words_again(["recipe=a"], Retreat(LESS, "")) == [
        "recipe=a",
        *LESS,
        GIVEN,
        "resume=auto_or_start",
    ]


def test_a_recipe_that_has_its_settings_chosen_keeps_those_that_need_less(tmp_path: Path) -> None:
    """A search, or a resume, would take the first launch's settings again."""
    words = ["recipe=finetune", f"model.path={tmp_path}", f"data.path={tmp_path}"]
    assert compose.compose_run(words).run.strategy is StrategyChoice.auto
    again = retreat.words_again(words, Retreat(LESS, "out of memory", "outputs/a/r1"))
    assert compose.compose_run(again).run.strategy is StrategyChoice.given


class Launches:
    """Stands for the launches of `supervisor.launch`: each ends with a code, and may ask for a retreat.

    A launch with 137 and "killed" had a rank killed for memory; what to plan for it was said before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: tuple[int, bool | str, bool]) -> None:
        self.ends, self.seen = list(ends), list[tuple[list[str], dict[str, str], Path]]()
        monkeypatch.setattr(supervisor, "_launch_once", self.once)

    def once(self, words: arguments.LaunchWords, told: dict[str, str], _: object) -> supervisor.Ended:
        self.seen.append((words.words, told, words.log_dir))
        code, asks, stopped = self.ends[len(self.seen) - 1]
        words.log_dir.mkdir(parents=True, exist_ok=True)
        if asks is True:
            retreat.leave(Retreat(LESS, "out of GPU memory", "outputs/a/r1"), told)
        retreat.prepare(retreat.Smaller("cpu", ["recipe=a"], [], None, 2), told)
        return supervisor.Ended(code, stopped, "rank 1 was killed" if asks == "killed" else "")


WORDS = arguments.LaunchWords(["--num_gpus", "2"], "module", "remat.train", ["recipe=a"], Path(), 600.0)


def test_a_run_that_asks_is_started_again_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launches = Launches(monkeypatch, (70, True, False), (70, True, False), (0, False, False))
    assert supervisor.launch(replace(WORDS, log_dir=tmp_path)) == 0
    words, told, logs = zip(*launches.seen, strict=True)
    assert words[0] == ["recipe=a"] and words[1][-4:] == [*LESS, GIVEN, "run_id=r1", "resume=auto_or_start"]
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


def test_a_rank_that_the_kernel_killed_for_memory_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The supervisor has it planned, at most as often as the run allows."""
    seen = []

    def choose(run: retreat.Smaller, why: str) -> Retreat:
        seen.append((run.words, why))
        return Retreat(LESS, why, "outputs/a/r1")

    monkeypatch.setattr(retreat, "choose", choose)
    launches = Launches(monkeypatch, *[(137, "killed", False)] * 3)
    assert supervisor.launch(replace(WORDS, log_dir=tmp_path)) == 137
    assert seen == [(["recipe=a"], "rank 1 was killed")] * 2 and len(launches.seen) == 3
    assert launches.seen[1][0][-4:] == [*LESS, GIVEN, "run_id=r1", "resume=auto_or_start"]
    said = "".join(capfd.readouterr())
    assert said.count("starting the run again with less memory, checkpointing=full: rank 1 was killed") == 2
    assert "no retreat: this run was started again 2 times already (most_retreats=2)" in said


def test_a_stop_while_the_next_launch_is_planned_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def choose(run: retreat.Smaller, why: str) -> Retreat:
        os.kill(os.getpid(), signal.SIGTERM)
        return Retreat(LESS, why, "outputs/a/r1")

    monkeypatch.setattr(retreat, "choose", choose)
    handler = signal.getsignal(signal.SIGTERM)
    launches = Launches(monkeypatch, (137, "killed", False))
    assert supervisor.launch(replace(WORDS, log_dir=tmp_path)) == 128 + signal.SIGTERM
    assert len(launches.seen) == 1 and signal.getsignal(signal.SIGTERM) == handler
    assert "stopped by SIGTERM before it was started again" in "".join(capfd.readouterr())


def test_a_killed_run_without_a_word_is_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It did not ask for retreats; what an earlier launch with the same log folder asked for is not read."""
    file = tmp_path / "retreat-1.json"
    retreat.prepare(retreat.Smaller("cpu", [], [], None, 3), {FILE: str(file)})
    monkeypatch.setattr(supervisor, "_launch_once", lambda *_: supervisor.Ended(137, False, "killed"))
    assert supervisor.launch(replace(WORDS, log_dir=tmp_path)) == 137


@pytest.mark.parametrize(
    ("oom_kills", "together_gib", "for_memory"),
    [(1, 10, True), (0, 99, False), (None, 95, True), (None, 50, False)],
)
def test_a_kill_is_for_memory_where_the_kernel_counts_it_or_memory_was_full(
    oom_kills: int | None, together_gib: int, for_memory: bool
) -> None:
    gib = 1 << 30
    found = supervisor.killed_for_memory(oom_kills, together_bytes=together_gib * gib, limit_bytes=100 * gib)
    assert found is for_memory


def test_several_nodes_cannot_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launches = Launches(monkeypatch, (70, False, False))
    supervisor.launch(replace(WORDS, runner=["--hostfile", "hosts"], log_dir=tmp_path))
    assert launches.seen[0][1] == {}
