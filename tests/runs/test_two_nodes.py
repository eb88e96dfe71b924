"""Launches over two nodes that have a network, host name, disk and process ids each (tests/support/nodes.py)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from remat.launch.processes import free_port
from remat.saving import manifest
from tests.support import tiny
from tests.support.launcher import ROOT, deepspeed
from tests.support.nodes import Nodes, Started, lacking, stand_in_for_ssh, two_nodes, until

pytestmark = [pytest.mark.launch, pytest.mark.skipif(bool(lacking()), reason=str(lacking()))]
TRAIN = str(ROOT / "train.py")
SAVES = ["train.steps=4", "save.export=true", "save.at_end=true", "resume=auto_or_start"]


FIND_EACH_OTHER = """
import os, torch, torch.distributed as dist
from remat.config.options import RunConfig
from remat.machine import distributed
from remat.training import same_launch
found = same_launch.join(RunConfig(), {}, {}, print)
distributed.init(2.0)
one = torch.ones(1)
dist.all_reduce(one)
dist.all_reduce(one, group=distributed.cpu_group())
print(found.hosts, os.environ["GLOO_SOCKET_IFNAME"], one.item())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with two_nodes(tmp_path / "nodes") as made:
        yield made


def on_two(nodes: Nodes, *words: str) -> list[Started]:
    port = free_port()
    return [nodes.fork(node, TRAIN, *words, port=port) for node in (1, 2)]


def ended(started: list[Started]) -> list[int]:
    codes = [each.code() for each in started]
    print(*(each.out[-3000:] for each in started), sep="\n=====\n")
    return codes


def history(run: Path) -> list[tuple[float, float]]:
    return [(row["step"], row["loss/train"]) for row in tiny.rows(run)]


def weights(run: Path) -> dict[str, bytes]:
    """What was exported, bit by bit. The metadata of a file has no order."""
    exported = load_file(run / "export" / "model.safetensors")
    return {name: value.numpy().tobytes() for name, value in exported.items()}


def test_two_nodes_train_as_one_and_a_state_goes_from_one_to_two_and_back(tmp_path: Path, nodes: Nodes) -> None:
    workshop = tiny.make_workshop(tmp_path)
    whole, parts = (tiny.words(workshop, name, *SAVES) for name in ("whole", "parts"))
    one = deepspeed(*whole)
    assert one.code == 0, one.out[-4000:]
    assert ended(on_two(nodes, *parts, "train.stop_at=2")) == [75, 75]
    first = workshop / "out/parts/run/saved/step-000002"
    assert manifest.verify(first) == []
    assert deepspeed(*parts, "train.stop_at=3").code == 75
    assert ended(on_two(nodes, *parts)) == [0, 0]
    runs = [workshop / "out" / name / "run" for name in ("whole", "parts")]
    assert history(runs[0]) == history(runs[1])
    assert weights(runs[0]) == weights(runs[1]) != {}
    nodes.until_empty()


@pytest.mark.exhaustive
def test_nodes_whose_names_mean_themselves_find_each_other(tmp_path: Path) -> None:
    """As on Debian. It took a silent half hour on one of them, and an error without the cause on the other."""
    script = tmp_path / "rank.py"
    script.write_text(FIND_EACH_OTHER)
    port = free_port()
    with two_nodes(tmp_path / "nodes", own_name="127.0.1.1") as nodes:
        started = [nodes.fork(node, str(script), port=port) for node in (1, 2)]
        assert ended(started) == [0, 0]
        assert all("['node1', 'node2'] eth0 4.0" in each.out for each in started)


def test_a_link_that_is_cut_in_mid_step_is_found_in_seconds(tmp_path: Path, nodes: Nodes) -> None:
    """Nothing closes a connection here: without the link between nodes both would wait for train.deadlines.step_s."""
    workshop = tiny.make_workshop(tmp_path)
    words = tiny.words(workshop, "cut", *tiny.ENDLESS, "train.deadlines.link_s=4")
    started, run = on_two(nodes, *words), workshop / "out/cut/run"
    until(lambda: (run / "saved/step-000004").is_dir(), lambda: started[0].out)
    nodes.cut()
    cut_at = time.monotonic()
    assert ended(started) == [70, 70]
    assert time.monotonic() - cut_at < 60
    for each, other, rank in zip(started, ("node2", "node1"), (1, 0), strict=True):
        said = f"no answer from {other} for 4 s (train.deadlines.link_s): that node (rank {rank} on {other}) is"
        assert said in each.out and "Traceback" not in each.out
    states = list((run / "saved").glob("step-*"))
    assert states and all(manifest.verify(path) == [] for path in states)
    nodes.until_empty()


def command(how: str, node: int, port: int, hosts: Path, logs: Path) -> list[str]:
    """What starts one rank on `node` by hand."""
    place = ["--node_rank", str(node - 1), "--master_addr", "node1", "--master_port", str(port)]
    if how == "torchrun":
        return ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", *place, TRAIN]
    by_hand = ["--hostfile", str(hosts), "--no_ssh", *place]
    return (
        ["deepspeed", *by_hand, TRAIN]
        if how == "deepspeed"
        else ["remat", "launch", "--log-dir", str(logs), *by_hand, TRAIN]
    )


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    return tmp_path / "hosts"


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["deepspeed", "torchrun", "remat launch"])
def test_every_launcher_trains_two_nodes_as_one(tmp_path: Path, nodes: Nodes, hosts: Path, how: str) -> None:
    """A launcher on each node, none over ssh."""
    workshop, port = tiny.make_workshop(tmp_path), free_port()
    assert deepspeed(*tiny.words(workshop, "one")).code == 0
    words = tiny.words(workshop, "two")
    lines = [command(how, node, port, hosts, tmp_path / "logs") for node in (1, 2)]
    started = [nodes.start(node, *line, *words) for node, line in zip((1, 2), lines, strict=True)]
    assert ended(started) == [0, 0]
    assert history(workshop / "out/two/run") == history(workshop / "out/one/run")
    nodes.until_empty()


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not shutil.which("sshd", path="/usr/sbin"), reason="needs openssh-server (scripts/install_cluster.sh)"
)
@pytest.mark.parametrize("how", ["remat launch", "deepspeed"])
def test_one_command_trains_both_nodes_over_real_ssh(tmp_path: Path, hosts: Path, how: str) -> None:
    """DeepSpeed's goes over pdsh. Exit code, losses and nothing left, on either."""
    if how == "deepspeed" and not shutil.which("pdsh"):
        pytest.skip("needs pdsh (scripts/install_cluster.sh)")
    workshop = tiny.make_workshop(tmp_path)
    assert deepspeed(*tiny.words(workshop, "one")).code == 0
    with two_nodes(tmp_path / "nodes", own_folders=[Path("/etc/ssh")]) as nodes:
        serve_ssh(nodes)
        line = ["deepspeed"] if how == "deepspeed" else ["remat", "launch", "--log-dir", str(tmp_path / "logs")]
        env = {"PDSH_RCMD_TYPE": "ssh"}
        started = nodes.start(1, *line, "--hostfile", str(hosts), TRAIN, *tiny.words(workshop, "two"), env=env)
        assert ended([started]) == [0]
        assert history(workshop / "out/two/run") == history(workshop / "out/one/run")
        if how == "remat launch":
            fails_over_ssh(nodes, hosts, workshop)


def fails_over_ssh(nodes: Nodes, hosts: Path, workshop: Path) -> None:
    """A killed rank of the other node is the cause that is told on the first, with its exit code."""
    words = tiny.words(workshop, "killed", *tiny.ENDLESS)
    started = nodes.start(
        1, "remat", "launch", "--log-dir", str(workshop / "logs"), "--hostfile", str(hosts), TRAIN, *words
    )
    until(lambda: (workshop / "out/killed/run/saved/step-000002").is_dir(), lambda: started.out)
    nodes.rank(2).kill()
    assert ended([started]) == [137]
    assert "first cause, on node2: rank 1 was killed (SIGKILL)" in started.out


FAULTS = ["stop", "rank", "agent", "head", "link"]


@pytest.mark.slow_fault
@pytest.mark.parametrize("fault", FAULTS)
def test_one_command_ends_both_nodes_whatever_happens(
    tmp_path: Path, nodes: Nodes, hosts: Path, fault: str
) -> None:
    """SIGTERM to the command, kill -9 of a rank, of the other node's launcher, of the command; a cut link."""
    workshop = tiny.make_workshop(tmp_path)
    words = tiny.words(workshop, "run", *tiny.ENDLESS, "train.deadlines.link_s=8")
    saved = workshop / "out/run/run/saved"
    line = [
        "remat",
        "launch",
        "--log-dir",
        str(tmp_path / "logs"),
        "--hostfile",
        str(hosts),
        "--grace-s",
        "60",
        TRAIN,
    ]
    started = nodes.start(0, *line, *words, env=stand_in_for_ssh(nodes, tmp_path / "bin"))
    until(lambda: (saved / "step-000002").is_dir(), lambda: started.out)
    if fault == "stop":
        os.kill(started.pid, signal.SIGTERM)
    elif fault == "rank":
        nodes.rank(2).kill()
    elif fault == "agent":
        next(p for p in nodes.processes(2, "remat.launch.node_agent") if "nsenter" not in p.cmdline()[0]).kill()
    elif fault == "head":
        os.kill(started.pid, signal.SIGKILL)
    else:
        nodes.cut()
    expected = {"stop": (75,), "rank": (137,), "agent": (70, 137), "head": (-9,), "link": (70,)}[fault]
    assert ended([started])[0] in expected
    nodes.until_empty()
    states = list(saved.glob("step-*"))
    assert all(manifest.verify(path) == [] for path in states)
    if fault == "stop":
        assert "SIGTERM sent to 2 nodes" in started.out and "stopping after step" in started.out
    if fault == "rank":
        assert "first cause, on node2: rank 1 was killed (SIGKILL)" in started.out
    if fault == "link":
        assert "no answer from node" in started.out


def serve_ssh(nodes: Nodes) -> None:
    """A real sshd on each node, which lets this user in by a key; /etc/ssh is each node's own folder."""
    first, second = (nodes.own(node, 0) for node in (1, 2))
    key = first / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (first / "authorized").write_text(key.with_suffix(".pub").read_text())
    (first / "ssh_config").write_text(
        "IdentityFile /etc/ssh/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    (first / "sshd_config").write_text(
        "HostKey /etc/ssh/key\nAuthorizedKeysFile /etc/ssh/authorized\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\nUsePAM no\nStrictModes no\nPidFile none\n"
    )
    for path in first.iterdir():
        shutil.copy2(path, second)
    for node in (1, 2):
        nodes.start(node, "sh", "-c", "mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e")


@pytest.mark.slow_fault
def test_a_folder_for_outputs_that_each_node_has_for_itself_is_refused(tmp_path: Path, nodes: Nodes) -> None:
    """It trained up to the first save, which then lacked the other node's files."""
    workshop = tiny.make_workshop(tmp_path)
    words = tiny.words(workshop, "local", f"output_dir={nodes.local}", f"data.cache_dir={tmp_path}/cache")
    started = on_two(nodes, *words)
    assert ended(started) == [2, 2]
    assert f"output_dir={nodes.local}: the folder must be shared by all nodes" in started[0].out
    assert "on node2 (rank 1)" in started[0].out and "Traceback" not in started[0].out


@pytest.mark.slow_fault
def test_a_cache_on_each_nodes_own_disk_changes_nothing(tmp_path: Path, nodes: Nodes) -> None:
    workshop = tiny.make_workshop(tmp_path)
    assert deepspeed(*tiny.words(workshop, "one")).code == 0
    assert ended(on_two(nodes, *tiny.words(workshop, "two", f"data.cache_dir={nodes.local}/cache"))) == [0, 0]
    assert history(workshop / "out/two/run") == history(workshop / "out/one/run")
    assert not (nodes.local / "cache").exists()  # it is on the nodes


AN_HOUR_AHEAD = """
import runpy, sys, time
now = time.time
time.time = lambda: now() + 3600
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
"""


@pytest.mark.slow_fault
def test_a_clock_an_hour_ahead_changes_nothing(tmp_path: Path, nodes: Nodes) -> None:
    """Of the second node, for what Python reads; it saves, and another launch resumes."""
    workshop = tiny.make_workshop(tmp_path)
    script = tmp_path / "ahead.py"
    script.write_text(AN_HOUR_AHEAD.format(train=TRAIN))
    assert deepspeed(*tiny.words(workshop, "one")).code == 0
    words = tiny.words(workshop, "two", *SAVES)
    for stop, code in (("train.stop_at=2", 75), ("train.stop_at=0", 0)):
        port = free_port()
        started = [
            nodes.fork(node, file, *words, stop, port=port) for node, file in ((1, TRAIN), (2, str(script)))
        ]
        assert ended(started) == [code, code]
    assert history(workshop / "out/two/run") == history(workshop / "out/one/run")
