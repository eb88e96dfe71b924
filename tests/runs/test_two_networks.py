"""Two nodes with a network each, whose own names mean 127.0.1.1, as on Debian: gloo finds the way between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launcher import ROOT
from tests.support.pool import CPU_ONLY, free_port

RANK = """
import os, torch, torch.distributed as dist
from remat.machine import distributed
from remat.training import same_launch
from remat.config.options import RunConfig
found = same_launch.join(RunConfig(), {}, {}, print)
distributed.init(2.0)
one = torch.ones(1)
dist.all_reduce(one)
dist.all_reduce(one, group=distributed.cpu_group())
print(found.hosts, os.environ["GLOO_SOCKET_IFNAME"], one.item())
dist.barrier()
dist.destroy_process_group()
"""


def able() -> bool:
    """Whether this machine lets a test make networks of its own."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip", "pgrep"))):
        return False
    make = "ip link add rmprobe type veth peer name rmprobe2"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", make], capture_output=True, check=False
    )
    return tried.returncode == 0


@pytest.mark.launch
@pytest.mark.skipif(not able(), reason="needs root, unshare and iproute2 with veth")
def test_nodes_whose_names_mean_themselves_find_each_other(tmp_path: Path) -> None:
    """It took a silent half hour on one of them, and an error without the cause on the other."""
    (tmp_path / "rank.py").write_text(RANK)
    script = str(ROOT / "tests/support/two_nodes.sh")
    done = subprocess.run(
        ["bash", script, str(tmp_path), str(free_port()), sys.executable, str(tmp_path / "rank.py")],
        cwd=ROOT,
        env=os.environ | CPU_ONLY | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    outputs = [(tmp_path / f"out{node}").read_text() for node in (1, 2)]
    assert done.returncode == 0, outputs
    assert all("['remat1', 'remat2'] eth0 4.0" in text for text in outputs), outputs
