"""The record comes first and is whole; W&B may fail in every way without stopping or slowing anything."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remat.config import validation
from remat.config.options import ConfigError, RunConfig, TrackingConfig, WandbMode
from remat.report import tracking
from remat.report.tracking import Tracker, read_metrics
from tests.support.wandb_file import read_wandb


class FakeWandb:
    """Stands in for the module; `fail` names the call that raises, `hang` an event that the call `at` waits for."""

    def __init__(self, fail: str = "", hang: threading.Event | None = None, at: str = "init") -> None:
        self.fail, self.hang, self.at = fail, hang, at
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.init_arguments: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.calls: list[str] = []
        self.exit_code: int | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.hang and self.at == name:
            self.hang.wait(30)
        if self.fail == name:
            raise RuntimeError(f"{name} broke\nand a second line")

    def Settings(self, **settings: Any) -> SimpleNamespace:
        self.settings = settings
        return SimpleNamespace(**settings)

    def setup(self, settings: object) -> None:
        self._called("setup")

    def init(self, **arguments: Any) -> FakeWandb:
        self.init_arguments = arguments
        self._called("init")
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._called("log")
        self.rows.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        self._called("finish")
        self.exit_code = exit_code

    def teardown(self, exit_code: int) -> None:
        self.calls.append("teardown")


@pytest.fixture(autouse=True)
def no_reporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield
    for thread in threading.enumerate():  # one that a test let hang must not reach the next test's fake
        if thread.name == "remat-W&B":
            thread.join(30)
            assert not thread.is_alive()


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeWandb | None) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake)


def tracker(run_dir: Path, warnings: list[str] | None = None, *, begun: bool = True, **changes: Any) -> Tracker:
    arguments: dict[str, Any] = {
        "run_config": {"train": {"steps": 3}},
        "name": "tiny",
        "run_id": "r1",
        "wandb_run_id": None,
        "is_main": True,
        "warn": (warnings if warnings is not None else []).append,
    }
    cfg = changes.pop("cfg", TrackingConfig(wandb=WandbMode.offline))
    made = Tracker(run_dir, cfg, **(arguments | changes))
    if begun:
        made.begin()
    return made


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


DISABLED = TrackingConfig(wandb=WandbMode.disabled)


def test_rows_are_on_disk_as_soon_as_logged(tmp_path: Path) -> None:
    record = tracker(tmp_path, cfg=DISABLED)
    record.log(1, {"loss/train": 2.5})
    record.log(2, {"loss/train": 2.0, "optim/lr": 1e-3})
    first, second = lines(tmp_path)
    assert (first["step"], first["loss/train"]) == (1, 2.5)
    assert (second["step"], second["optim/lr"]) == (2, 1e-3)
    assert second["time_unix_s"] >= first["time_unix_s"] > 1.6e9
    assert record.wandb_run_id is None
    record.finish(0)


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    record = tracker(tmp_path, is_main=False)
    record.log(1, {"loss/train": 1.0})
    record.rewind(0)
    record.finish(0)
    assert list(tmp_path.iterdir()) == []
    assert fake.calls == []
    assert record.wandb_run_id is None


def test_not_finite_numbers_are_valid_json_and_come_back(tmp_path: Path) -> None:
    record = tracker(tmp_path, cfg=DISABLED)
    record.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    record.finish(0)
    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_rewind_leaves_each_step_once(tmp_path: Path) -> None:
    record = tracker(tmp_path, cfg=DISABLED)
    for step in (10, 20, 30):
        record.log(step, {"loss/train": float(step)})
    record.finish(0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "loss/tr')
    again = tracker(tmp_path, cfg=DISABLED)
    again.rewind(20)
    again.log(30, {"loss/train": 3.0})
    again.finish(0)
    assert [(row["step"], row["loss/train"]) for row in lines(tmp_path)] == [(10, 10.0), (20, 20.0), (30, 3.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_torn_last_row_is_left_out_when_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss/train": 2.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1.0, "loss/train": 2.0}]


def test_unwritable_record_warns_once_and_goes_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    record = tracker(tmp_path, warnings, cfg=DISABLED)

    record._file.close()
    record._file = Path("/dev/full").open("a")  # noqa: SIM115 - closing it tries to write its rows again
    record.log(1, {"a": 1.0})
    record.log(2, {"a": 1.0})
    record.finish(0)
    assert len(warnings) == 1
    assert "No space left" in warnings[0]


def test_wandb_gets_the_same_numbers_and_the_mode_before_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    cfg = TrackingConfig(wandb=WandbMode.offline, project="p", entity="e", tags=["t"])
    record = tracker(tmp_path, cfg=cfg, run_config={"hub_token": "abc", "lr": 1.0})
    record.log(1, {"loss/train": 2.0})
    record.finish(3)
    assert fake.rows == [(1, {"loss/train": 2.0})]
    assert fake.exit_code == 3
    assert fake.calls == ["setup", "init", "log", "finish", "teardown"]
    given = fake.init_arguments
    assert given["mode"] == "offline"
    assert given["dir"] == str(tmp_path)
    assert (given["project"], given["entity"], given["tags"]) == ("p", "e", ["t"])
    assert given["config"] == {"hub_token": "***", "lr": 1.0}
    assert (given["id"], given["resume"]) == (record.wandb_run_id, "allow")
    assert fake.settings["x_disable_stats"] and fake.settings["silent"] and fake.settings["console"] == "off"


@pytest.mark.parametrize("steps", [0, 1])
def test_wandb_opens_after_the_first_step_or_at_the_end_and_gets_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    record = tracker(tmp_path, begun=False)
    record.log(0, {"loss/eval": 5.0})
    assert fake.calls == [] and "remat-W&B" not in {thread.name for thread in threading.enumerate()}
    for _ in range(steps):
        record.begin()
        record.begin()
    record.finish(0)
    assert fake.calls == ["setup", "init", "log", "finish", "teardown"]
    assert fake.rows == [(0, {"loss/eval": 5.0})]


def test_wandb_run_continues_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    record = tracker(tmp_path, wandb_run_id="abcd1234")
    assert record.wandb_run_id == "abcd1234"
    record.finish(0)
    assert fake.init_arguments["id"] == "abcd1234"


@pytest.mark.parametrize("call", ["setup", "init", "log", "finish"])
def test_wandb_that_raises_costs_one_warning(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeWandb(fail=call))
    warnings: list[str] = []
    record = tracker(tmp_path, warnings)
    for step in range(1, 6):
        record.log(step, {"loss/train": 1.0})
    record.finish(0)
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert len(warnings) == 1
    assert f"RuntimeError: {call} broke" in warnings[0]
    assert "\n" not in warnings[0]


def test_wandb_that_is_not_installed_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    warnings: list[str] = []
    record = tracker(tmp_path, warnings)
    record.log(1, {"loss/train": 1.0})
    record.finish(0)
    assert len(lines(tmp_path)) == 1
    assert len(warnings) == 1
    assert "wandb" in warnings[0]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("call", ["setup", "init", "log", "finish"])
def test_wandb_that_hangs_delays_neither_rows_nor_the_end(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    install(monkeypatch, FakeWandb(hang=release, at=call))
    monkeypatch.setattr(tracking, "FINISH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tracking, "LAST_WAIT_S", 0.05)
    warnings: list[str] = []
    record = tracker(tmp_path, warnings)
    record.log(1, {"loss/train": 1.0})
    assert len(lines(tmp_path)) == 1  # while the call still hangs
    record.finish(0)
    assert len(warnings) == 1
    assert "did not finish" in warnings[0]
    assert f"wandb sync {tmp_path}/wandb/*run-*" in warnings[0]


def test_wandb_ends_while_a_stopping_run_still_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    warnings: list[str] = []
    record = tracker(tmp_path, warnings)
    record.log(1, {"loss/train": 2.0})
    record.finish_wandb_soon()
    assert record._wandb is not None
    record._wandb.join(30)  # not asked to wait for: it ends by itself
    assert fake.calls == ["setup", "init", "log", "finish", "teardown"]
    record.log(1, {"time/save_s": 0.5})
    record.finish(1)
    record.finish(1)
    assert fake.rows == [(1, {"loss/train": 2.0})]
    assert [row.get("time/save_s") for row in lines(tmp_path)] == [None, 0.5]
    assert fake.exit_code == 0
    assert warnings == []


def test_queue_is_bounded_while_wandb_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    install(monkeypatch, FakeWandb(hang=release))
    for name, value in (("QUEUE_ROWS", 3), ("FINISH_TIMEOUT_S", 0.05), ("LAST_WAIT_S", 0.05)):
        monkeypatch.setattr(tracking, name, value)
    warnings: list[str] = []
    record = tracker(tmp_path, warnings)
    for step in range(1, 11):
        record.log(step, {"loss/train": 1.0})
    record.finish(0)
    assert len(lines(tmp_path)) == 10
    assert len(warnings) == 1
    assert "has not taken a row" in warnings[0]


def test_offline_files_hold_the_same_numbers_as_the_record(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    warnings: list[str] = []
    record = tracker(tmp_path, warnings, run_config={"train": {"steps": 3}, "api_key": "abc"})
    for step in range(1, 4):
        record.log(step, {"loss/train": 1 / step, "memory/host_rss_gib": 0.25 * step})
    record.log(3, {"loss/eval": 0.125})
    record.finish(0)
    assert warnings == []
    (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{record.wandb_run_id}.wandb")
    history, config, exit_code = read_wandb(file)
    expected: dict[int, dict[str, float]] = {}
    for row in read_metrics(tmp_path):
        named = {name: value for name, value in row.items() if name not in ("step", "time_unix_s")}
        expected.setdefault(int(row["step"]), {}).update(named)
    assert history == expected
    assert config["train"] == {"steps": 3}
    assert config["api_key"] == "***"
    assert exit_code == 0


class Board:
    """Stands in for `torch.utils.tensorboard`; keeps events as its reader does: a purge hides later steps before it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, float]] = []
        self.folders: list[str] = []
        self.closed = 0

    def SummaryWriter(self, log_dir: str, purge_step: int | None) -> Board:
        self.folders.append(log_dir)
        self.events = [event for event in self.events if purge_step is None or event[1] < purge_step]
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.events.append((name, step, value))

    def flush(self) -> None:
        if self.closed < 0:
            raise OSError("the disk is full")

    def close(self) -> None:
        self.closed += 1


BOARD = TrackingConfig(wandb=WandbMode.disabled, tensorboard=True)


def test_tensorboard_gets_the_same_numbers_and_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    first = tracker(tmp_path, cfg=BOARD)
    for step in (10, 20, 30):
        first.log(step, {"loss/train": float(step), "optim/lr": 0.1})
    first.log(20, {"loss/eval": 7.0})
    first.finish(0)
    again = tracker(tmp_path, cfg=BOARD, begun=False)
    again.rewind(20)
    again.begin()
    again.log(30, {"loss/train": 3.0})
    again.finish(0)
    assert board.folders == [str(tmp_path / "tensorboard")] * 2 and board.closed == 2
    record = [(name, row["step"], row[name]) for row in lines(tmp_path) for name in row]
    expected = [event for event in record if event[0] not in ("step", "time_unix_s")]
    assert sorted(board.events) == sorted(expected) and len(expected) == 6
    tracker(tmp_path, cfg=BOARD, is_main=False).log(40, {"loss/train": 1.0})
    assert len(board.folders) == 2


def test_tensorboard_that_fails_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, warnings = Board(), list[str]()
    board.closed = -9
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    record = tracker(tmp_path, warnings, cfg=BOARD)
    for step in (1, 2, 3):
        record.log(step, {"loss/train": 1.0})
    record.finish(0)
    assert warnings == [
        "TensorBoard is off for the rest of this run (OSError: the disk is full); metrics.jsonl has every row"
    ]
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]


def test_tensorboard_that_is_not_installed_is_refused_before_anything_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunConfig(tracking=BOARD)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking\.tensorboard=true .* `pip install tensorboard`"):
        validation.check_launch(run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError) as caught:
        validation.check_launch(run)
    assert "tensorboard" not in str(caught.value)
