"""`remat launch` under fault: real launchers, ranks without torch. No outcome depends on a time."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support import tiny
from tests.support.launcher import ROOT
from tests.support.pool import CPU_ONLY
from tests.support.supervised import DEADLINE_S, RANK, Supervised, supervised, words_of

pytestmark = pytest.mark.launch
slow = pytest.mark.slow_fault
RUNNER = ("--no_ssh_check",)  # an option that only the runner takes, so that there is one


def rank(folder: Path, *words: str) -> tuple[str, ...]:
    return (str(RANK), str(folder), *words)


def ends(run: Supervised, code: int) -> None:
    """The run ends with `code` and leaves no process."""
    assert run.finish() == code, run.out
    assert run.left() == [], run.out


@pytest.mark.parametrize(
    ("signum", "options"),
    [
        (signal.SIGTERM, ()),
        pytest.param(signal.SIGTERM, RUNNER, marks=slow),
        pytest.param(signal.SIGUSR1, (), marks=slow),
        pytest.param(signal.SIGINT, (), marks=slow),
        pytest.param(signal.SIGHUP, (), marks=slow),
    ],
)
def test_a_stop_signal_reaches_every_rank_at_once(
    tmp_path: Path, signum: signal.Signals, options: tuple[str, ...]
) -> None:
    """A rank leaves only after all got the signal: sent to one after the other had ended, this would never end."""
    with supervised(tmp_path, *rank(tmp_path, "stop"), options=options) as run:
        run.ready()
        run.launcher("launch").send_signal(signal.SIGTERM)  # a sender that signals all processes: no harm
        if options:
            run.launcher("runner").send_signal(signal.SIGTERM)
        run.signal(signum)
        ends(run, 75)
        expected = "SIGTERM" if signum == signal.SIGHUP else signum.name
        assert [(tmp_path / f"got-{n}").read_text() for n in (0, 1)] == [expected] * 2
        assert f"{signum.name} sent to 2 ranks" in run.out


@pytest.mark.parametrize(
    ("who", "code"),
    [(1, 70), pytest.param(0, 2, marks=slow), pytest.param(0, 3, marks=slow), pytest.param(1, 75, marks=slow)],
)
def test_the_exit_code_of_a_rank_is_that_of_the_run(tmp_path: Path, who: int, code: int) -> None:
    with supervised(tmp_path, *rank(tmp_path, "exit", str(who), str(code)), options=("--grace-s", "5")) as run:
        run.ready()
        (tmp_path / "go").touch()
        if code == 75:  # one has stopped: the other may still be saving, and is not ended by anybody
            run.until(
                lambda: f"rank {who} ends" in (tmp_path / f"logs/rank-{who}.log").read_text(), "end of a rank"
            )
            os.kill(run.ready()[1 - who], signal.SIGTERM)
        ends(run, code)
        services = [int((tmp_path / f"service-{n}").read_text()) for n in (0, 1)]
        assert not any(psutil.pid_exists(pid) for pid in services)
        assert (f"rank {who} failed with exit code {code}" in run.out) == (code != 75)
        if (who, code) == (1, 70):
            tail = run.out.split("the last lines of rank 1, which failed first:\n")[1]
            assert tail.startswith("  rank 1 is ready\n  rank 1 ends with 70\n")


def test_a_killed_rank_is_named_with_its_memory(tmp_path: Path) -> None:
    """The other ends at its signal: it does not wait for the dead one."""
    with supervised(tmp_path, *rank(tmp_path, "exit", "1", "0")) as run:
        os.kill(run.ready()[1], signal.SIGKILL)
        ends(run, 128 + signal.SIGKILL)
        said = re.search(r"rank 1 was killed \(SIGKILL\).*peak RSS was \d+\.\d of (\d+\.\d) GiB, \d", run.out)
        assert said and 0 < float(said[1]) <= psutil.virtual_memory().total / 2**30 + 0.1, run.out


@pytest.mark.parametrize(
    ("options", "module", "name"),
    [
        ((), "launch", "node launcher"),
        pytest.param(RUNNER, "launch", "node launcher", marks=slow),
        pytest.param(RUNNER, "runner", "deepspeed runner", marks=slow),
    ],
)
def test_a_killed_launcher_ends_the_run(
    tmp_path: Path, options: tuple[str, ...], module: str, name: str
) -> None:
    with supervised(tmp_path, *rank(tmp_path, "stop"), options=options) as run:
        run.ready()
        assert any("deepspeed.launcher.runner" in words_of(p) for p in run.seen) == bool(options)
        run.launcher(module).kill()
        ends(run, 137)
        assert f"the {name} was killed" in run.out
        assert all((tmp_path / f"got-{n}").exists() for n in (0, 1))  # the ranks had a chance to save


def test_a_killed_supervisor_leaves_no_rank(tmp_path: Path) -> None:
    with supervised(tmp_path, *rank(tmp_path, "stop")) as run:
        run.ready()
        run.signal(signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL
        run.until(lambda: not run.left(), "end of the ranks")
        assert all((tmp_path / f"got-{n}").exists() for n in (0, 1))


@slow
def test_a_stopped_rank_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with supervised(tmp_path, *rank(tmp_path, "exit", "1", "70")) as run:
        os.kill(run.ready()[0], signal.SIGSTOP)
        (tmp_path / "go").touch()
        ends(run, 70)
        assert "1 rank did not end in time: killed" in run.out


@slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with supervised(tmp_path, *rank(tmp_path, "deaf")) as run:
        run.ready()
        run.signal(signal.SIGINT)
        run.until(lambda: "SIGINT sent to 2 ranks" in run.out, "first signal")

        def again() -> bool:  # one that comes at once is the same request, sent to process and group
            run.signal(signal.SIGINT)
            return run.process.poll() is not None

        run.until(again, "end")
        assert "SIGINT again: ending at once" in run.out
        ends(run, 128 + signal.SIGINT)


@slow
def test_ranks_that_do_not_stop_in_their_grace_are_killed(tmp_path: Path) -> None:
    with supervised(tmp_path, *rank(tmp_path, "deaf"), options=("--grace-s", "0.5")) as run:
        run.ready()
        run.signal(signal.SIGTERM)
        ends(run, 128 + signal.SIGTERM)
        assert "2 ranks did not end in time: killed" in run.out


@slow
def test_a_stop_before_the_ranks_began(tmp_path: Path) -> None:
    with supervised(tmp_path, *rank(tmp_path, "stop")) as run:
        run.until(lambda: "output is kept" in run.out, "start")
        run.watch()
        run.signal(signal.SIGTERM)
        ends(run, 75)
        assert not (tmp_path / "ready-0").exists() and "nothing to save" in run.out


def test_every_rank_has_a_plain_log_and_one_is_seen_live_in_a_terminal_that_stays_one(tmp_path: Path) -> None:
    terminal, slave = pty.openpty()
    command = [
        "remat",
        "launch",
        "--num_gpus",
        "2",
        "--log-dir",
        str(tmp_path / "logs"),
        *rank(tmp_path, "talk"),
    ]
    env = os.environ | CPU_ONLY
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    shown = b""
    try:
        while data := os.read(terminal, 4096):
            shown += data
    except OSError:  # the last process has closed it
        pass
    assert process.wait(DEADLINE_S) == 0, shown
    assert b"\x1b[31mred\x1b[0m" in shown and b"bar 10%\rbar 100% True" in shown
    assert b"error of rank 0" in shown and b"rank 1" not in shown
    assert f"{tmp_path}/logs/rank-N.log" in re.sub(r"\s", "", shown.decode())
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "red\nbar 100% True\nerror of rank 0\n"
    other = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "red" in other and "error of rank 1" in other


@slow
def test_the_real_thing(tmp_path: Path) -> None:
    """train.py under `remat launch`: the run and its exit code are what they are under `deepspeed`.

    The normal tests have it in test_installed.py; stopped by a signal it is in test_stop.py.
    """
    words = tiny.words(tiny.make_workshop(tmp_path), "supervised", "train.steps=3", "train.stop_at=2")
    with supervised(tmp_path, *words) as run:
        assert run.finish() == 75, run.out
        assert "stopped at step 2, resumable" in run.out
        assert "stopped at step 2, resumable" in (tmp_path / "logs" / "rank-0.log").read_text()
    assert [row["step"] for row in tiny.rows(tmp_path / "out" / "supervised" / "run")] == [1, 2]
