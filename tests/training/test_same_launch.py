"""What ranks were started with is compared by name; the difference, its hosts and the remedy are in one message."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from remat.config.options import RunConfig
from remat.training import same_launch


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    return same_launch.collect_facts(RunConfig(), {"zero_optimization": {"stage": 2}}, {"hidden_size": 64})


def test_equal_ranks_are_not_refused(mine: dict[str, Any]) -> None:
    verdict = same_launch.judge([mine, copy.deepcopy(mine), mine])
    assert verdict.problem is None and verdict.addresses == ["127.0.0.1"] * 3 and len(verdict.hosts) == 3


def changed(mine: dict[str, Any], **of_run: Any) -> dict[str, Any]:
    cfg = RunConfig()
    for name, value in of_run.items():
        section, _, option = name.partition("__")
        setattr(getattr(cfg, section) if option else cfg, option or section, value)
    found = same_launch.collect_facts(cfg, {"zero_optimization": {"stage": 2}}, {"hidden_size": 64})
    return found | {"host": "node-2"}


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("train__seq_len", 32, "train.seq_len=32 on node-2 (rank 1), 512 on"),
        ("data__path", "/other", "data.path=/other on node-2 (rank 1), null on"),
        ("output_dir", "/elsewhere", "output_dir=/elsewhere on node-2 (rank 1), outputs on"),
        (
            "model__architecture",
            {"hidden_size": 96},
            "model.architecture.hidden_size=96 on node-2 (rank 1), nothing on",
        ),
    ],
)
def test_another_option_is_named_with_both_values(
    mine: dict[str, Any], option: str, value: Any, said: str
) -> None:
    problem = same_launch.judge([mine, changed(mine, **{option: value})]).problem
    assert (
        problem is not None and said in problem and "remedy: give every node the same command line" in problem
    )


def test_what_belongs_to_a_node_may_differ(mine: dict[str, Any]) -> None:
    other = changed(mine, data__cache_dir="/local/a", hardware__nvme_path="/local/b")
    assert same_launch.judge([mine, other]).problem is None


def test_files_that_options_name_are_compared_too(mine: dict[str, Any]) -> None:
    found = same_launch.collect_facts(RunConfig(), {"zero_optimization": {"stage": 3}}, {"hidden_size": 96})
    problem = same_launch.judge([mine, found | {"host": "node-2"}]).problem
    assert problem is not None
    assert "deepspeed.config: zero_optimization.stage=3 on node-2 (rank 1), 2 on" in problem
    assert "model config: hidden_size=96 on node-2 (rank 1), 64 on" in problem


def test_other_code_and_other_versions_are_named(mine: dict[str, Any]) -> None:
    other = copy.deepcopy(mine) | {"host": "node-2", "commit": "abc123-dirty"}
    other["code"]["loss.py"] = ("0", "0")
    other["versions"]["torch"] = ("9.9", "9.9")
    problem = same_launch.judge([mine, mine, other]).problem
    assert problem is not None
    assert "files of remat: loss.py=0 on node-2 (rank 2)" in problem and "abc123-dirty" in problem
    assert "torch=9.9 on node-2 (rank 2)" in problem and "requirements.lock" in problem


def test_another_number_of_ranks_is_named(mine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert "ranks=16 on node-2 (rank 1)" in str(same_launch.judge([mine, changed(mine)]).problem)


def test_many_ranks_that_differ_alike_are_one_line(mine: dict[str, Any]) -> None:
    problem = same_launch.judge([mine, *[changed(mine, train__seq_len=32)] * 1000]).problem
    assert problem is not None and len(problem.splitlines()) == 3 and "(rank 1, 2, 3" in problem


def test_a_secret_that_differs_is_found_and_not_shown(mine: dict[str, Any]) -> None:
    one, other = (
        same_launch.collect_facts(RunConfig(), {}, {"api_key": key}) | {"host": key}
        for key in ("node-1", "node-2")
    )
    problem = same_launch.judge([one, other]).problem
    assert problem is not None and "model config: api_key=***" in problem and "the same" in problem


def test_a_digest_of_the_code_changes_with_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = same_launch.digest_code(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert same_launch.digest_code(tmp_path) != before and list(before) == ["a.py"]
    assert "model/loss.py" in same_launch.digest_code() and "data/batches.py" in same_launch.digest_code()
