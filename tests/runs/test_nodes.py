"""Faults of launches over several nodes, with one rank a node and no launcher that would end one for another."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from remat.saving import manifest
from tests.support import tiny
from tests.support.by_hand import by_hand

pytestmark = pytest.mark.launch


@pytest.mark.slow_fault
def test_nodes_that_were_started_with_other_options_are_refused(tmp_path: Path) -> None:
    """It ran to its end, with wrong losses, before the ranks compared."""
    workshop = tiny.make_workshop(tmp_path)
    words = tiny.words(workshop, "differs")
    other = [*words, "train.seq_len=96", f"data.cache_dir={tmp_path}/of-that-node"]
    with by_hand(tmp_path, [words, other]) as run:
        assert run.finish() == [2, 2], run.out(0)[-4000:] + run.out(1)[-4000:]
        for rank in range(2):
            text = run.out(rank)
            assert "train.seq_len=96 on " in text and "192 on " in text and "remedy: " in text
            assert "(rank 1)" in text and "(rank 0)" in text
            assert "cache_dir" not in text and "Traceback" not in text
    assert not (workshop / "out" / "differs").exists()


@pytest.mark.slow_fault  # of a link that is cut, by forks: test_two_nodes.py
def test_a_lost_node_ends_the_others_with_one_sentence(tmp_path: Path) -> None:
    workshop = tiny.make_workshop(tmp_path)
    words = tiny.words(workshop, "lost", *tiny.ENDLESS)
    folder = workshop / "out" / "lost" / "run"
    with by_hand(tmp_path, [words, words]) as run:
        run.until(
            lambda: (folder / "saved" / "step-000004").is_dir() or run.processes[0].poll() is not None, "state"
        )
        os.kill(run.processes[1].pid, signal.SIGKILL)
        assert run.finish(0) == [70], run.out(0)[-4000:]
        text = run.out(0)
    said = text[text.index("\nremat: ") :]
    assert said.count("\n") <= 4 and "Traceback" not in text and "frame #" not in text, text[-4000:]
    assert f"rank 1 on {os.uname().nodename} is gone, last heard of in " in said
    assert "; found in s" in said and str(folder / "errors" / "rank-0.txt") in said
    assert "Traceback" in (folder / "errors" / "rank-0.txt").read_text()
    states = [path for path in (folder / "saved").iterdir() if path.name.startswith("step-")]
    assert states and all(manifest.verify(path) == [] for path in states)


@pytest.mark.slow_fault
def test_the_node_that_holds_the_store_is_named_when_it_is_lost(tmp_path: Path) -> None:
    workshop = tiny.make_workshop(tmp_path)
    words = tiny.words(workshop, "lost", *tiny.ENDLESS)
    folder = workshop / "out" / "lost" / "run"
    with by_hand(tmp_path, [words, words]) as run:
        run.until(
            lambda: (folder / "saved" / "step-000004").is_dir() or run.processes[0].poll() is not None, "state"
        )
        os.kill(run.processes[0].pid, signal.SIGKILL)
        assert run.finish(1) == [70], run.out(1)[-4000:]
        text = run.out(1)
    assert f"rank 0 on {os.uname().nodename}, which held the ranks' store, is gone; found in " in text
    assert "Traceback" not in text and "frame #" not in text, text[-4000:]


@pytest.mark.slow_fault
def test_a_node_that_never_comes_is_named(tmp_path: Path) -> None:
    words = tiny.words(
        tiny.make_workshop(tmp_path), "alone", "train.deadlines.build_s=3", "train.global_batch_size=6"
    )
    with by_hand(tmp_path, [words], size=3) as run:
        assert run.finish() == [70], run.out(0)[-4000:]
        text = run.out(0)
    assert "remat: ranks 1, 2 of 3 did not come within 3 s (train.deadlines.build_s=3)" in text
    assert "MASTER_PORT" in text and "Traceback" not in text
