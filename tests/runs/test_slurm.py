"""scripts/slurm.sbatch under a real SLURM on two nodes: one submit line, requeue, time limit, scancel, exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.saving import manifest
from tests.support import nodes, slurm, tiny
from tests.support.launcher import deepspeed
from tests.support.slurm import Slurm

REASON = nodes.lacking() or slurm.lacking()
pytestmark = [pytest.mark.launch, pytest.mark.exhaustive, pytest.mark.skipif(bool(REASON), reason=str(REASON))]
RESUMED = r"resumed +at step (\d+)"
ENDLESS = ["train.steps=100000", "optim.warmup_steps=0", "save.every=2", "save.keep=50", "resume=auto_or_start"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with nodes.two_nodes(folder / "nodes") as made:
        yield Slurm(made, folder / "jobs")


def words(workshop: Path, name: str, *more: str) -> list[str]:
    """As `tiny.words`, but the job names the run and resumes it."""
    return [word for word in tiny.words(workshop, name, *more) if not word.startswith(("run_id=", "resume="))]


def steps(run: Path) -> list[tuple[float, float]]:
    return [(row["step"], row["loss/train"]) for row in tiny.rows(run)]


def resumed(cluster: Slurm, job: int) -> int | None:
    """The step at which the job has resumed."""
    found = re.search(RESUMED, cluster.out(job))
    return int(found[1]) if found else None


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "saved").glob("step-*"))


def test_one_line_serves_first_start_and_requeue_on_another_number_of_nodes(
    cluster: Slurm, tmp_path: Path
) -> None:
    workshop = tiny.make_workshop(tmp_path)
    some = ["train.steps=40", "optim.warmup_steps=0", "save.every=4", "save.keep=50"]
    whole = deepspeed(*tiny.words(workshop, "whole", *some))
    assert whole.code == 0, whole.out[-4000:]
    job = cluster.submit(*words(workshop, "job", *some), options=("--nodes=2",))
    run = workshop / "out/job" / f"slurm-{job}"
    nodes.until(lambda: (run / "saved/step-000004").is_dir(), lambda: cluster.out(job)[-4000:])
    cluster.scontrol("requeue", str(job))
    cluster.until(job, "PENDING")
    step = int(saved(run)[-1].removeprefix("step-"))
    assert 4 <= step < 40 and manifest.verify(run / "saved" / saved(run)[-1]) == []
    cluster.scontrol("update", f"jobid={job}", "numnodes=1-1", "numtasks=1", "numcpus=1")
    found = cluster.until(job, "FAILED", "COMPLETED")
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), cluster.out(job)[-4000:]
    assert resumed(cluster, job) == step and re.search(r"ranks +1 on cpu", cluster.out(job))
    together, expected = steps(run), steps(workshop / "out/whole/run")
    assert together[:step] == expected[:step]  # on one rank sums are taken in another order
    assert [loss for _, loss in together[step:]] == pytest.approx(
        [loss for _, loss in expected[step:]], rel=1e-2
    )


def test_the_end_of_time_saves_requeues_and_resumes_in_one_output(cluster: Slurm, tmp_path: Path) -> None:
    workshop = tiny.make_workshop(tmp_path)
    options = ("--nodes=2", "--time=2", "--signal=B:USR1@60")
    job = cluster.submit(*words(workshop, "timed", *ENDLESS, "save.every=1000"), options=options)
    run = workshop / "out/timed" / f"slurm-{job}"
    found = (
        cluster.until(job, "PENDING", "FAILED", "COMPLETED", "TIMEOUT") if cluster.until(job, "RUNNING") else {}
    )
    assert (found["JobState"], found["Restarts"]) == ("PENDING", "1"), cluster.out(job)[-4000:]
    first = saved(run)
    assert len(first) == 1 and manifest.verify(run / "saved" / first[0]) == []
    step = int(first[0].removeprefix("step-"))
    nodes.until(lambda: resumed(cluster, job) == step, lambda: cluster.out(job)[-4000:])
    nodes.until(lambda: max((row[0] for row in steps(run)), default=0) > step, lambda: cluster.out(job)[-4000:])
    cluster.cancel(job)
    found = cluster.until(job, "CANCELLED")
    out = cluster.out(job)  # of both starts
    assert out.index("goes back to the queue") < re.search(RESUMED, out).start()
    assert "SIGTERM sent to 1 rank" in out and found["DerivedExitCode"] == "75:0"
    assert len(saved(run)) == 2 and all(manifest.verify(run / "saved" / name) == [] for name in saved(run))
    cluster.nodes.until_empty("remat launch")


def test_a_rank_that_is_killed_ends_the_job_with_its_code(cluster: Slurm, tmp_path: Path) -> None:
    workshop = tiny.make_workshop(tmp_path)
    job = cluster.submit(*words(workshop, "killed", *ENDLESS), options=("--nodes=2",))
    run = workshop / "out/killed" / f"slurm-{job}"
    nodes.until(lambda: (run / "saved/step-000002").is_dir(), lambda: cluster.out(job)[-4000:])
    cluster.nodes.rank(2).kill()
    found = cluster.until(job, "FAILED", "COMPLETED")
    assert found["ExitCode"] == "137:0", cluster.out(job)[-4000:]
    assert "rank 1 was killed (SIGKILL)" in cluster.out(job) and "rank 1 on node2 is gone" in cluster.out(job)
    cluster.nodes.until_empty("remat launch")
