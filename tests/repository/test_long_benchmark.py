"""benchmarks/long.py: its rungs are the ladder's, its climb finds the longest, its page is that of its result file."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import long
from benchmarks.accuracy_points import portable
from remat.config.options import ConfigError
from remat.config.units import MIB
from remat.training.ledger import MICRO_BATCH


def test_the_page_has_the_committed_figures() -> None:
    page = long.PAGE.read_text()
    assert long.renewed(page) == page, "run python benchmarks/long.py --write"


def test_each_rung_has_the_words_of_those_before_it(tmp_path: Path) -> None:
    found = {rung.name: rung.words for rung in long.rungs("cpu", tmp_path)}
    assert long.NO_FLASH not in found
    last = found["2 ranks share each sequence"]
    assert {"train.sequence_parallel_size=2", "checkpointing=offload", "deepspeed.config=zero3_offload"} <= set(
        last
    )
    chunked = [words for words in found.values() if "train.loss=chunked" in words]
    assert len(chunked) == 1 and any("vocab_size" in word for word in chunked[0])


def test_ranks_that_share_sequences_have_as_many_micro_batches(tmp_path: Path) -> None:
    batches = {
        rung.name: word
        for rung in long.rungs("cpu", tmp_path)
        for word in long.overrides(rung, 1024, "cpu", tmp_path)
        if word.startswith("train.global_batch_size")
    }
    assert batches.pop("2 ranks share each sequence") == "train.global_batch_size=4"
    assert set(batches.values()) == {"train.global_batch_size=8"}


@pytest.mark.parametrize("longest", [0, 1024, 7000, 65536])
def test_a_climb_ends_near_the_longest(longest: int, tmp_path: Path) -> None:
    """A run needs 1 KiB for each token."""
    limit = longest * 1024 / MIB
    words = ["--climb", "100", "--device", "cpu", "--cap-mib", str(limit), "--work", str(tmp_path)]
    rung = long.rungs("cpu", tmp_path)[0]

    def ran(words: list[str], *_: object) -> dict[str, object]:
        return {"status": "ran", "measured_bytes": 1024 * tokens_of(words)}

    with mock.patch.object(long, "run", ran), mock.patch.object(long, "planned_longest", lambda *_: 0):
        row = long.climb(rung, float("inf"), long.parse_args(words))
    assert row["ended"] == "found"
    assert row["measured_seq_len"] <= longest
    assert longest - row["measured_seq_len"] <= max(1024, long.NEAR * 2 * longest)


def tokens_of(words: list[str]) -> int:
    return next(int(word.partition("=")[2]) for word in words if word.startswith("train.seq_len="))


def test_a_run_that_fails_for_another_reason_ends_a_climb() -> None:
    assert long.next_length([(1024, "ran"), (2048, "failed")]) == 0
    assert long.next_length([(1024, "ran"), (2048, "ran")]) == 4096
    assert long.next_length([(4096, "ran"), (8192, "out of memory")]) == 6144


@pytest.mark.parametrize(("status", "ended"), [("failed", "failed"), ("refused", "found")])
def test_a_climb_tells_why_it_ended_and_takes_a_refused_length_as_too_long(
    status: str, ended: str, tmp_path: Path
) -> None:
    words = ["--climb", "100", "--device", "cpu", "--cap-mib", "9", "--work", str(tmp_path)]

    def run(words: list[str], *_: object) -> dict[str, object]:
        if tokens_of(words) > 3000:
            if status == "refused":
                raise ConfigError("train.seq_len: too long")
            return {"status": status, "measured_bytes": None}
        return {"status": "ran", "measured_bytes": 1024}

    rung = long.rungs("cpu", tmp_path)[0]
    with mock.patch.object(long, "run", run), mock.patch.object(long, "planned_longest", lambda *_: 0):
        row = long.climb(rung, float("inf"), long.parse_args(words))
    assert (row["ended"], row["measured_seq_len"]) == (ended, 2048)


def test_the_ledger_s_unit_is_read(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.json"
    assert long.measured_bytes(ledger) is None
    for unit, size in (("MiB", MIB), ("GiB", 1024 * MIB)):
        ledger.write_text(json.dumps({"rows": [{"category": MICRO_BATCH, "measured": 1.5, "unit": unit}]}))
        assert long.measured_bytes(ledger) == 1.5 * size


def test_misses_are_shown() -> None:
    row = {"rung": "a", "seq_len": 1024, "planned_bytes": 11 * MIB, "measured_bytes": 10 * MIB, "status": "ran"}
    failed = {**row, "seq_len": 2048, "measured_bytes": None, "status": "failed"}
    text = long.table([row, failed])
    assert "10.0 (+10.0%)" in text and "planned 11.0, failed" in text and "0 of 2 plans are within 3%" in text


def test_the_committed_points_are_today_s_runs(tmp_path: Path) -> None:
    """The rows of the shortest sequences have the options that the benchmark has, and the plan that it makes."""
    rows = json.loads(long.RESULT.read_text())["points"]
    rung = next(rung for rung in long.rungs("cpu", long.WORK) if rung.name == "every layer recomputed")
    row = next(row for row in rows if (row["rung"], row["seq_len"]) == (rung.name, 1024))
    words = long.overrides(rung, 1024, "cpu", long.WORK)
    assert row["words"] == portable(words)
    assert row["planned_bytes"] == long.plan(words, "cpu")["planned_bytes"], "run python benchmarks/long.py"
