"""One `remat launch` above those of all nodes: stops, first causes and exit codes, with a shell in the place of ssh.

Real nodes: tests/runs/test_two_nodes.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.config.options import ConfigError
from remat.launch import arguments, nodes

BEGAN = r"""printf '\x1e{"began": 1}\x1e\n'"""
FAILED = r"""printf '\x1e{"failed": "rank 1 was killed", "code": 137}\x1e\n'"""


class Launch:
    """`remat launch` on hosts a and b. `agents` are what their shells run; `$1` is the folder, `$host` their name."""

    def __init__(self, folder: Path, a: str, b: str) -> None:
        self.folder = folder
        for name, body in (("a", a), ("b", b)):
            (folder / f"{name}.sh").write_text(f'read -r task\necho "$task" >{folder}/task-{name}\n{body}\n')
        (folder / "ssh").write_text(
            f'#!/bin/bash\nhost="${{@: -2:1}}"; cd {folder}; echo "$@" >ssh-$host; . {folder}/$host.sh\n'
        )
        (folder / "ssh").chmod(0o755)
        (folder / "hosts").write_text("# two\na slots=2\n\nb slots=2 # the other\n")
        words = [
            "--hostfile",
            str(folder / "hosts"),
            "--master_port",
            "4321",
            "--log-dir",
            str(folder / "logs"),
        ]
        self.process = subprocess.Popen(
            ["remat", "launch", *words, "--no_python", "true", "its words"],
            env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "NCCL_DEBUG": "WARN"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self, word: str) -> str:
        """The next line with `word`."""
        assert self.process.stdout is not None
        return next(line.strip() for line in self.process.stdout if word in line)

    def finish(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=120)
        return self.process.returncode, out


@pytest.fixture
def started() -> Iterator[list[Launch]]:
    made: list[Launch] = []
    yield made
    for launch in made:
        launch.process.kill()


def start(started: list[Launch], folder: Path, a: str, b: str) -> Launch:
    started.append(Launch(folder, a, b))
    return started[0]


def test_a_stop_reaches_every_node_and_their_exit_code_is_the_launchs(
    started: list[Launch], tmp_path: Path
) -> None:
    stops = f"{BEGAN}; echo ready; read -r order; echo $order >order-$host; exit 75"
    launch = start(started, tmp_path, stops, stops)
    ready = {launch.line("ready"), launch.line("ready")}
    assert ready == {"ready", "b: ready"}
    launch.process.send_signal(signal.SIGTERM)
    code, out = launch.finish()
    assert [(tmp_path / f"order-{host}").read_text().strip() for host in "ab"] == ["SIGTERM", "SIGTERM"]
    assert code == 75 and "SIGTERM sent to 2 nodes" in out
    options = (tmp_path / "ssh-b").read_text()
    assert (
        "-o ServerAliveInterval=5" in options and "-o ControlPath=none" in options
    )  # not the user's shared one
    tasks = [json.loads((tmp_path / f"task-{host}").read_text()) for host in "ab"]
    assert all(
        task["hosts"] == {"a": 2, "b": 2} and task["environment"]["NCCL_DEBUG"] == "WARN" for task in tasks
    )
    words = arguments.parse(["--hostfile", "h", *tasks[1]["words"]])
    place = ["--no_ssh", "--node_rank", "1", "--master_addr", "a", "--master_port", "4321"]
    assert words.runner == ["--hostfile", "h", *place] and not words.of_all_nodes
    assert (words.kind, words.target, words.words) == ("program", "true", ["its words"])


def test_the_first_failure_is_the_cause_and_the_exit_code(started: list[Launch], tmp_path: Path) -> None:
    follows = f"{BEGAN}; while [ ! -e failed ]; do sleep 0.05; done; echo 'it is gone'; exit 70"
    launch = start(
        started, tmp_path, follows, f"{BEGAN}; {FAILED}; echo 'cut here' >&2; sleep 0.5; touch failed; exit 137"
    )
    code, out = launch.finish()
    assert code == 137 and "first cause, on b: rank 1 was killed" in out, out
    assert "\nit is gone\n" in out and "\nb: cut here\n" in out and "\x1e" not in out


def test_a_node_that_cannot_be_reached_ends_the_launch_with_the_remedy(
    started: list[Launch], tmp_path: Path
) -> None:
    waits = f"{BEGAN}; read -r order; echo $order >order; exit 75"
    launch = start(started, tmp_path, waits, "echo 'Connection refused' >&2; exit 255")
    code, out = launch.finish()
    assert code == 3 and "on b: ssh could not start a launch there" in out and "b: Connection refused" in out
    assert (tmp_path / "order").read_text().strip() == "KILL"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no node"),
        ("a slots=2\nb 2\n", "line 2: 'b 2' should be `NAME slots=N`"),
        ("a slots=2\na slots=2\n", "line 2: 'a slots=2' names that node again"),
    ],
)
def test_a_hostfile_that_is_none_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=said):
        nodes.read_hostfile(tmp_path / "hosts", None)


def test_some_of_the_nodes_and_the_file_for_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    assert nodes.read_hostfile(tmp_path / "hosts", "1") == {"a": 2}
    for number in ("0", "3", "two", "-1"):
        with pytest.raises(
            ConfigError, match=rf"^--num_nodes {number}: .*/hosts names a, b; give 1 to 2, or leave"
        ):
            nodes.read_hostfile(tmp_path / "hosts", number)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("HF_HOME=/shared/hf\n\n")
    found = nodes.exported({"NCCL_IB_HCA": "mlx5", "SECRET": "x"})
    assert found["HF_HOME"] == "/shared/hf" and found["NCCL_IB_HCA"] == "mlx5" and "SECRET" not in found
