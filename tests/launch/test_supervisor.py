"""`remat launch`, the parts that need no process: its command line, what a log keeps, what it says of a kill."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from deepspeed.launcher import launch, runner

from remat import cli
from remat.config.options import ConfigError
from remat.launch import arguments, processes, rank_keeper, supervisor
from tests.support.launcher import node_launch


def test_every_option_of_the_installed_runner_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option the runner has and `remat launch` does not know would be refused, or eat the script's name."""
    found: dict[str, bool] = {}
    add = argparse.ArgumentParser.add_argument

    def note(self: argparse.ArgumentParser, *names: str, **how: object) -> argparse.Action:
        action = add(self, *names, **how)
        found.update(dict.fromkeys(action.option_strings, action.nargs == 0))
        return action

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", note)
    runner.parse_args(["train.py"])
    flags = {name for name, alone in found.items() if alone}
    assert flags == arguments.RUNNER_FLAGS | set(arguments.KINDS)
    assert set(found) - flags == arguments.RUNNER_VALUES | set(arguments.REFUSED)


def test_options_stand_before_the_script_and_its_words_are_its_own() -> None:
    words = arguments.parse(
        [
            "--num_gpus",
            "2",
            "--log-dir=/x/logs",
            "--no_ssh",
            "--grace-s",
            "9",
            "train.py",
            "--log-dir",
            "recipe=a",
        ]
    )
    assert (words.runner, words.kind, words.target) == (["--num_gpus", "2", "--no_ssh"], "script", "train.py")
    assert (words.words, words.log_dir, words.grace_s) == (["--log-dir", "recipe=a"], Path("/x/logs"), 9.0)


def test_without_a_script_it_is_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = arguments.parse(["recipe=tiny", "train.steps=3"])
    assert (words.kind, words.target, words.trains) == ("module", "remat.train", True)
    assert words.words == ["recipe=tiny", "train.steps=3"]
    words = arguments.parse(["--num_gpus", "2", "--config-dir", "own", "recipe=mine"])
    assert (words.target, words.words) == ("remat.train", ["--config-dir", "own", "recipe=mine"])
    assert words.log_dir.parent == tmp_path / "outputs" / "logs"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert arguments.parse(["--log-dir=~/logs", "recipe=tiny"]).log_dir == tmp_path / "logs"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num-gpus", "2", "train.py"], "did you mean --num_gpus?"),
        (["--num_gpus"], "--num_gpus needs a value"),
        (["--num_gpus=", "recipe=a"], "--num_gpus needs a value"),
        (["--autotuning", "run", "train.py"], "call deepspeed itself"),
        (["--enable_each_rank_log", "x", "train.py"], "say --log-dir DIR"),
        (["--grace-s", "soon", "train.py"], "--grace-s soon is not a number of seconds"),
        (["trian.py", "recipe=a"], "trian.py: no such script"),
        (["", "recipe=a"], "an empty word: no such script"),
        (["--module"], "which module?"),
    ],
)
def test_bad_words_are_one_message(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        arguments.parse(argv)


@pytest.mark.parametrize(
    ("options", "over_ssh"),
    [
        ([], False),
        (["--hostfile", "h"], False),
        (["--hostfile", "h", "--no_ssh"], False),
        (["--hostfile", "h", "--launcher", "openmpi"], True),
        (["--force_multi"], True),
    ],
)
def test_ranks_of_another_launcher_are_not_ours(options: list[str], over_ssh: bool) -> None:
    words = arguments.parse([*options, "train.py"])
    assert words.over_ssh is over_ssh and words.of_all_nodes is (options == ["--hostfile", "h"])


@pytest.mark.parametrize(
    "options",
    [
        ["--num_gpus", "3"],
        ["--num_accelerators=2", "--no_local_rank", "--bind_cores_to_rank", "--bind_core_list", "0-1"],
        ["--num_gpus", "4", "--num_gpus", "1"],
    ],
)
def test_the_node_launcher_is_started_as_the_runner_would(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = arguments.parse([*options, "train.py"])
    assert words.needs_no_runner
    asked = [*words.runner, "--log_level", "critical", "--master_port", "29123", "--module"]
    module, *ours = arguments.launcher(words, asked)
    monkeypatch.setenv("LOCAL_SIZE", "4")  # else DeepSpeed counts CPU accelerators with a process
    theirs = node_launch([*asked, "keeper", "x=1"], monkeypatch)
    monkeypatch.setattr("sys.argv", [module, *ours, "keeper", "x=1"])
    assert module == launch.__name__ and vars(launch.parse_args()) == vars(theirs)


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ([], ""),
        (["--num_gpus", "2", "--no_ssh_check"], ""),
        (["--num_gpus", "2"], "2,3"),
        (["-i", "localhost:1"], ""),
    ],
)
def test_what_the_node_launcher_does_not_know_is_left_to_the_runner(
    options: list[str], devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    words = arguments.parse([*options, "train.py"])
    assert arguments.launcher(words, words.runner) == ["deepspeed.launcher.runner", *options]


def test_the_rank_is_started_as_the_launcher_would() -> None:
    start = rank_keeper.command
    assert start(["--local_rank=1", "script", "a.py", "x=1"])[1:] == ["-u", "a.py", "--local_rank=1", "x=1"]
    assert start(["module", "pkg.run", "x"])[1:] == ["-u", "-m", "pkg.run", "x"]
    assert start(["--local_rank=0", "program", "./a.out", "x"]) == ["./a.out", "--local_rank=0", "x"]


def test_a_program_that_cannot_be_started_is_told_and_has_the_code_127(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        env = {rank_keeper.SOCKET: str(tmp_path / "s"), rank_keeper.LOG_DIR: str(tmp_path), "LOCAL_SIZE": "1"}
        keeper = subprocess.Popen(
            [sys.executable, "-m", "remat.launch.rank_keeper", "program", "/no/such", "x"],
            env=os.environ | env | {"RANK": "0", "LOCAL_RANK": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        link, _ = listener.accept()
        link.sendall(b"leave\n")
        _, said = keeper.communicate(timeout=60)
        link.close()
    assert keeper.returncode == rank_keeper.EXIT_NOT_STARTED == 127 and "rank 0 cannot be started" in said


def test_a_log_keeps_what_a_terminal_would_have_kept() -> None:
    lines = rank_keeper._Lines()
    drawn = b"\r\x1b[2K\x1b[31mstep 1\x1b[0m\n\r\x1b[2Kbar 1%\r\x1b[2Kbar 2%\r\x1b[2Kstep 2\r\n"
    pieces = [drawn[i : i + 5] for i in range(0, len(drawn), 5)]
    assert b"".join(lines.plain(piece) for piece in pieces) == b"step 1\nstep 2\n"


def test_a_kill_is_told_with_what_speaks_for_it() -> None:
    gib = 2**30
    said = supervisor.killed(1, peak_bytes=21 * gib, together_bytes=40 * gib, limit_bytes=42 * gib, oom_kills=1)
    assert "rank 1 was killed (SIGKILL). Host out of memory?" in said
    assert (
        "21.0 of 42.0 GiB, 40.0 GiB with the other ranks" in said
        and "counts 1 out-of-memory kill since" in said
    )
    said = supervisor.killed(0, peak_bytes=0, together_bytes=0, limit_bytes=gib, oom_kills=None)
    assert "an unknown part of 1.0 GiB" in said and "does not tell" in said


def test_only_the_shared_buffers_of_this_run_go(tmp_path: Path) -> None:
    user = os.getuid()
    mine, other = (tmp_path / f"deepspeed_allreduce_buffer_{user}_127.0.0.1_{port}_0" for port in (4001, 4002))
    mine.touch()
    other.touch()
    processes.remove_shared_buffers(4001, tmp_path)
    assert not mine.exists() and other.exists()


UNHEARD = """
import sys
from pathlib import Path
from remat import cli
from remat.launch import node_agent, supervisor
supervisor.say("SIGINT sent to 2 ranks")
supervisor.show_tail(1, Path(sys.argv[1]))
node_agent._tell(began=2)
sys.exit(cli._tell(ValueError("it ends"), 75))
"""


def test_a_launch_goes_on_when_nobody_listens(tmp_path: Path) -> None:
    """As after Ctrl-C in `remat launch ... 2>&1 | tee log`: tee is gone first, while ranks still save."""
    (tmp_path / "rank-1.log").write_text("its last line\n")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", UNHEARD, str(tmp_path / "rank-1.log")]
    assert subprocess.run(command, stdout=writer, stderr=writer, timeout=120, check=False).returncode == 75
    os.close(writer)


@pytest.mark.parametrize("length", [77, 78, 200])
def test_a_socket_has_room_where_temporary_files_lie_deep(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    deep = base / ("x" * (length - len(f"{base}/")))
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = Path(supervisor._make_folder())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "keepers"))
    assert (folder.parent == deep) is (length == 77)
    for made in (folder, base):
        shutil.rmtree(made, ignore_errors=True)


@pytest.mark.parametrize(("command", "shared"), [("launch", False), ("plan", True)])
def test_ranks_share_the_cores_themselves(command: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of threads that the supervisor had chosen for itself would be each rank's."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("sys.argv", ["remat", command, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert ("OMP_NUM_THREADS" in os.environ) is shared
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_a_free_port_is_none_that_a_connection_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert processes.PORTS[-1] < first_of_connections
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", taken := processes.free_port()))
        monkeypatch.setattr(processes, "PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match=f"each port from {taken} to {taken} is taken"):
            processes.free_port()
