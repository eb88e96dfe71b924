"""A real SLURM on the two nodes of tests/support/nodes.py: Debian's munged, slurmctld and slurmd, on own files."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

from tests.support.launcher import ROOT, environment
from tests.support.nodes import Nodes, until

DAEMONS = "/usr/sbin"
CONFIG = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
GresTypes=gpu
ReturnToService=2
MinJobAge=3600
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=node[1-2] CPUs=2 RealMemory=1000 Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str | None:
    """Why SLURM cannot run here; None where it can."""
    missing = [name for name in ("slurmctld", "slurmd", "munged") if not shutil.which(name, path=DAEMONS)]
    return f"SLURM is not installed: {', '.join(missing)} (scripts/install_cluster.sh)" if missing else None


class Slurm:
    """`folder` is where jobs are submitted from: a checkout by links, and what jobs write."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self._config = folder / "slurm.conf"
        folder.mkdir()
        for name in (".venv", "train.py", "scripts"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "state").mkdir()
        self._config.write_text(CONFIG.format(folder=folder))
        (folder / "gres.conf").write_text("Name=gpu Count=1 File=/dev/null\n")
        key = folder / "munge.key"
        key.write_bytes(bytes(range(256)) * 4)
        key.chmod(0o400)
        folder.chmod(0o755)  # munged refuses a socket that others may replace
        words = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        words.append(f"--socket={folder}/munge.sock")
        self._run(1, f"{DAEMONS}/munged", "--force", *words)
        self._run(1, f"{DAEMONS}/slurmctld", "-f", str(self._config), "-c")
        for node in (1, 2):
            self._run(node, f"{DAEMONS}/slurmd", "-f", str(self._config))
        until(lambda: self._idle() == 2, lambda: self._log())

    def _run(self, node: int, *command: str) -> str:
        """Run a command on `node`. What it says goes to a file: a daemon keeps its ends of pipes open."""
        output = self.folder / "said.txt"
        with output.open("wb") as out:
            code = subprocess.run(
                [*self.nodes.inside(node)[:-1], f"--wd={self.folder}", *command],
                env=environment() | {"SLURM_CONF": str(self._config)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=60,
                check=False,
            ).returncode
        assert code == 0, f"{command}: {output.read_text()}{self._log()}"
        return output.read_text()

    def _idle(self) -> int:
        return self._run(1, "sinfo", "-h", "-N", "-o", "%t").split().count("idle")

    def _log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))

    def submit(self, *words: str, options: tuple[str, ...] = ()) -> int:
        """Submit scripts/slurm.sbatch with words for train.py, on nodes of one GPU; the job's number."""
        said = self._run(1, "sbatch", "--gpus-per-node=1", *options, "scripts/slurm.sbatch", *words)
        return int(said.split()[-1])

    def scontrol(self, *words: str) -> None:
        self._run(1, "scontrol", *words)

    def cancel(self, job: int) -> None:
        self._run(1, "scancel", str(job))

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        return dict(
            re.findall(r"(\w[\w:/]*)=(\S*)", self._run(1, "scontrol", "show", "job", "-d", str(number)))
        )

    def until(self, number: int, *states: str) -> dict[str, str]:
        """Wait until the job is in one of `states`; what is known of it then."""
        found: dict[str, str] = {}

        def there() -> bool:
            nonlocal found
            time.sleep(0.5)
            found = self.job(number)
            return found["JobState"] in states

        until(there, lambda: f"{found}\n{self.out(number)[-3000:]}\n{self._log()}")
        return found

    def out(self, number: int) -> str:
        path = self.folder / f"slurm-{number}.out"
        return path.read_text(errors="replace") if path.exists() else ""
