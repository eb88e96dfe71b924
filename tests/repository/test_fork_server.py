"""Launches whose ranks are forks behave as those of `deepspeed`: environment, arguments, output, exit codes, ends."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher import deepspeed

ABOUT = """
import atexit, json, logging, os, random, sys, threading
rank = os.environ["RANK"]
found = {
    "env": dict(os.environ), "argv": sys.argv, "folder": os.getcwd(), "path": sys.path[0], "name": __name__,
    "file": __file__, "input": sys.stdin.read(), "tty": sys.stdout.isatty(), "threads": threading.active_count(),
    "handlers": len(logging.getLogger().handlers), "stdout": sys.stdout.write_through,
    "own": os.path.dirname(sys.executable),
}
if "torch" in sys.modules:
    import torch, torch.distributed
    assert not torch.distributed.is_initialized() and torch.get_num_threads() == 1
    assert not torch.cuda.is_initialized()
print(f"said by rank {rank}")
print(f"error of rank {rank}", file=sys.stderr)
random_values = [random.random()]
if "torch" in sys.modules:
    import numpy
    random_values += [torch.initial_seed(), numpy.random.rand()]
def last(): open(sys.argv[-1] + "/about-" + rank, "w").write(json.dumps(found | {"random": random_values}))
atexit.register(last)
"""
ENDS = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, what = Path(sys.argv[-2]), sys.argv[-1]
if os.environ["RANK"] == "0":
    child = subprocess.Popen(["sleep", "1000"])
    def stop(signum, _):
        (folder / "got").write_text(signal.Signals(signum).name)
        sys.exit(3)
    signal.signal(signal.SIGTERM, stop)
    (folder / "child").write_text(str(child.pid))
    print("rank 0 waits", flush=True)
    (folder / "ready").touch()
    time.sleep(1000)
while not (folder / "ready").exists():
    time.sleep(0.01)
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "raise":
    raise KeyError("nothing there")
elif what == "wait":
    time.sleep(1000)
sys.exit(int(what))
"""

BY_THE_LAUNCHER = {"_", "PWD", "PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}
BY_QUIETER_IMPORTS = {
    "TORCH_CPP_LOG_LEVEL",
    "DATASETS_VERBOSITY",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "TRANSFORMERS_VERBOSITY",
}


def about(folder: Path, *, real: bool) -> tuple[list[dict[str, Any]], str]:
    folder.mkdir()
    script = folder / "about.py"
    script.write_text(ABOUT)
    done = deepspeed("one=1", str(folder), script=str(script), cwd=folder, real=real)
    assert done.code == 0, done.out[-4000:]
    return [json.loads((folder / f"about-{rank}").read_text()) for rank in (0, 1)], done.out


def test_a_fork_has_what_a_rank_of_the_real_launcher_has(tmp_path: Path) -> None:
    ranks, out = about(tmp_path / "own", real=False)
    theirs, said = about(tmp_path / "own2", real=True)
    for mine, real in zip(ranks, theirs, strict=True):
        env, expected = mine.pop("env"), real.pop("env")
        port = (env.pop("MASTER_PORT"), expected.pop("MASTER_PORT"))
        assert port[0] != port[1]
        own = {name for name in env.keys() | expected.keys() if env.get(name) != expected.get(name)}
        assert own <= BY_THE_LAUNCHER | BY_QUIETER_IMPORTS
        assert mine.pop("random") != real.pop("random")
        assert mine == {
            key: json.loads(json.dumps(value).replace(str(tmp_path / "own2"), str(tmp_path / "own")))
            for key, value in real.items()
        }
    for rank in "01":
        for text in (f"said by rank {rank}", f"error of rank {rank}"):  # lines of ranks may run into each other
            assert text in out and text in said


def test_forks_do_not_share_random_numbers(tmp_path: Path) -> None:
    (one, other), _ = about(tmp_path / "own", real=False)
    assert len(one["random"]) == 3 and not set(one["random"]) & set(other["random"])
    assert (one["env"]["RANK"], other["env"]["RANK"]) == ("0", "1")


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("7", 7, ""),
        pytest.param("75", 75, "", marks=pytest.mark.exhaustive),
        ("kill", 247, ""),
        ("raise", 1, "KeyError: 'nothing there'"),
    ],
)
def test_the_first_failure_is_the_exit_code_and_the_others_get_sigterm(
    tmp_path: Path, what: str, code: int, said: str
) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    done = deepspeed(str(tmp_path), what, script=str(script))
    assert done.code == code
    assert said in done.out and "rank 0 waits" in done.out
    assert (tmp_path / "got").read_text() == "SIGTERM"
    assert ended(int((tmp_path / "child").read_text())), "a process that a rank started"


def test_a_time_out_ends_the_whole_group_and_tells_what_was_said(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    with pytest.raises(AssertionError, match=r"took longer than 3 s:\n.*rank 0 waits"):
        deepspeed(str(tmp_path), "wait", script=str(script), timeout_s=3)
    assert ended(int((tmp_path / "child").read_text()))
    assert not (tmp_path / "got").exists()


def test_what_only_an_import_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(ValueError, match=r"\['HF_HUB_OFFLINE'\].*real=True"):
        deepspeed("--help")


def ended(pid: int) -> bool:
    """Whether it is gone, or will be as soon as somebody asks for its exit code."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, 9)
    return False
