"""Launches over two nodes that have a network, host name, disk and process ids each (tests/support/nodes.py)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.saving import manifest
from tests.support import tiny
from tests.support.launcher import ROOT, deepspeed
from tests.support.nodes import Nodes, Started, lacking, two_nodes, until
from tests.support.pool import free_port

pytestmark = [pytest.mark.launch, pytest.mark.skipif(bool(lacking()), reason=str(lacking()))]
TRAIN = str(ROOT / "train.py")
ENDLESS = [
    "train.steps=100000",
    "optim.warmup_steps=0",
    "save.every=2",
    "save.keep=9",
    "deepspeed.config=zero2",
]
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


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


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
    assert digests(runs[0] / "export") == digests(runs[1] / "export") != {}
    nodes.until_empty()


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
    words = tiny.words(workshop, "cut", *ENDLESS, "train.deadlines.link_s=4")
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
