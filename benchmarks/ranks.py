"""What grows with the number of ranks, besides the training itself: the project's own calls at up to 1024 ranks.

No model and no GPU. Ranks that only talk to the store are threads, spread over a few processes, which make the calls of
a real rank: they agree on the options, meet, say where they are, and report a hang. Ranks of the stop vote are
processes, because a process has one gloo group. Files of a saved state are small, but as many as that number of ranks
writes. All of it shares the cores of one machine, so seconds are upper bounds, without the delay of a network.

    python benchmarks/ranks.py [--ranks 8 64 256 1024] [--votes 2 8 32 64]     # benchmarks/results/ranks.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat.launch.processes import free_port  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "ranks.json"
HOST = "127.0.0.1"
CLIENT_PROCESSES = 8
WATCHED_S = 20.0  # of a steady run
VOTES = 100
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning for each connection
BLOCKS = 10_000_000  # of the data whose order each rank computes
REPORT = {"phase": "step", "step": 1234, "seconds": 1801.0, "deadline_s": 1800.0, "host": "node-0123", "pid": 4711,
          "where": "all_reduce (distributed_c10d.py:2810) < reduce_gradients (stage3.py:1430)"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--votes", type=int, nargs="+", default=[2, 8, 32, 64])
    args = parser.parse_args()
    from benchmarks.environment import environment

    result: dict[str, Any] = {"store": {}, "vote": {}, "save": {}, "plan": {}}
    measure_plan(8)  # imports
    for ranks in args.ranks:
        result["store"][ranks] = measure_store(ranks)
        result["save"][ranks] = measure_save(ranks)
        result["plan"][ranks] = measure_plan(ranks)
        print(ranks, {part: result[part][ranks] for part in ("store", "save", "plan")}, flush=True)
    for ranks in args.votes:
        result["vote"][ranks] = measure_vote(ranks)
        print(ranks, result["vote"][ranks], flush=True)
    result["data"] = measure_order()
    result["load_average"] = os.getloadavg()
    result["environment"] = environment("cpu")
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


# Threads that talk to the store


def measure_store(ranks: int) -> dict[str, float]:
    """Let `ranks` ranks meet, say where they are for WATCHED_S, and report a hang, as the watchdog does."""
    from torch.distributed import TCPStore

    port, fork = free_port(), multiprocessing.get_context("fork")
    processes = min(CLIENT_PROCESSES, ranks - 1)
    gate = fork.Barrier(processes + 1)
    clients = [
        fork.Process(target=_clients, args=(port, ranks, range(1 + place, ranks, processes), gate))
        for place in range(processes)
    ]
    for client in clients:  # before this process has a thread
        client.start()
    server = TCPStore(HOST, port, ranks, True, wait_for_workers=False)
    result: dict[str, float] = {}
    for name, act in _acts(server, 0, ranks).items():
        gate.wait()
        began, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        act()
        gate.wait()
        result[f"{name}_s"] = round(time.perf_counter() - began, 3)
        served = time.process_time() - cpu - (time.thread_time() - own)
        result[f"{name}_served_in_cpu_s"] = round(served, 3)
    for client in clients:
        client.join()
    return result


def _clients(port: int, ranks: int, mine: range, gate: Any) -> None:
    """Be the ranks `mine`, a thread each."""
    from torch.distributed import TCPStore

    together = threading.Barrier(len(mine) + 1)

    def be(rank: int) -> None:
        store = TCPStore(HOST, port, ranks, False, wait_for_workers=False)
        together.wait()
        for act in _acts(store, rank, ranks).values():
            together.wait()
            act()
            together.wait()

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in mine]
    time.sleep(1.0)  # until the store is open
    for thread in threads:
        thread.start()
    together.wait()
    for _ in range(ACTS):
        gate.wait()
        together.wait()
        together.wait()
        gate.wait()


ACTS = 4


def _acts(store: Any, rank: int, ranks: int) -> dict[str, Callable[[], None]]:
    """Return what a rank does, in order."""
    from remat.machine.peers import Peers, Wait
    from remat.training.watchdog import BEAT_S, LISTEN_S

    peers = Peers(store, rank, ranks, holder="rank 0")
    options = {f"train.option_{number}": number for number in range(60)} | {"host": f"node-{rank // 8:04d}"}

    def agree() -> None:
        wait = Wait(0.0, "", lambda text: None)
        peers.agree("options", options, lambda everyone: len({str(o) for o in everyone}), wait)

    def meet() -> None:
        peers.meet("step", lambda text: None)

    def watch() -> None:
        end, beaten_at = time.monotonic() + WATCHED_S, 0.0
        time.sleep(LISTEN_S * (rank % 97) / 97)  # ranks do not look all at once
        while (now := time.monotonic()) < end:
            if now - beaten_at >= BEAT_S:
                peers.put_own("beat", {"phase": "step", "step": 1, "marks": 1, "left_s": 1800.0, "beats": 1})
                beaten_at = now
            peers.get("call")
            time.sleep(LISTEN_S)

    def report() -> None:
        peers.put_own("report", REPORT | {"rank": rank})
        while rank == 0 and len(peers.each("report")) < ranks:
            time.sleep(0.2)

    return {"agree": agree, "meet": meet, f"watch_{WATCHED_S:.0f}_s": watch, "report_a_hang": report}


# Processes that vote


def measure_vote(ranks: int) -> dict[str, float]:
    """Measure the stop vote of `ranks` processes, the median of VOTES, and the connections of one for it."""
    fork = multiprocessing.get_context("fork")
    answers, port = fork.Queue(), free_port()
    voters = [fork.Process(target=_vote, args=(rank, ranks, port, answers)) for rank in range(ranks)]
    for voter in voters:
        voter.start()
    found = [answers.get() for _ in voters]
    for voter in voters:
        voter.join()
    return {
        "vote_ms": round(1000 * max(seconds for seconds, _ in found), 3),
        "connections_of_a_rank": max(count for _, count in found),
    }


def _vote(rank: int, ranks: int, port: int, answers: Any) -> None:
    import psutil
    import torch
    import torch.distributed as dist

    from remat.machine import distributed

    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, ranks, rank == 0)
    os.environ["TORCH_GLOO_LAZY_INIT"] = (
        "1"  # the group of all ranks is NCCL's on GPUs: only the vote's counts here
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    del os.environ["TORCH_GLOO_LAZY_INIT"]
    group, process = distributed.cpu_group(), psutil.Process()

    def connections() -> int:
        return sum(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp"))

    dist.barrier()
    before, seconds = connections(), []
    for _ in range(VOTES):
        words = torch.tensor([rank, 0, 0])
        began = time.perf_counter()
        dist.all_reduce(words, dist.ReduceOp.MAX, group)
        seconds.append(time.perf_counter() - began)
    answers.put((statistics.median(seconds), connections() - before))
    dist.barrier()
    dist.destroy_process_group()


# Files, plans and data


@contextmanager
def timed(result: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    result[name] = round(time.perf_counter() - began, 4)


def measure_save(ranks: int) -> dict[str, float]:
    """Measure what rank 0, or any rank, does for a saved state with the files of `ranks` ranks, besides their bytes."""
    from remat.saving import manifest

    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for rank in range(ranks):
            for name in (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
                         f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"):  # fmt: skip
                (folder / name).write_bytes(b"x" * 4096)
        result["files"] = 2 * ranks
        with timed(result, "list_files_s"):
            names = manifest.files_in(folder)
        entries = {
            name: manifest.FileEntry(10**10 + place, f"{place:064x}") for place, name in enumerate(names)
        }
        info = manifest.Manifest(100, 1, ranks, 3, "bf16", "digest", False, "2026", {}, {}, entries)
        own = {name: entry for name, entry in entries.items() if info.rank_of(name) == 0}
        result["told_to_each_rank_bytes"] = ranks * len(pickle.dumps(own))
        with timed(result, "write_manifest_s"):
            manifest.write(folder, info)
        result["manifest_bytes"] = (folder / manifest.FILE).stat().st_size
        with timed(result, "read_manifest_s"):
            manifest.read(folder)
        with timed(result, "share_out_check_s"):
            manifest.share(info, 0, ranks)
        with timed(result, "share_out_check_of_fewer_ranks_s"):
            manifest.share(info, 0, ranks // 2)
    return result


def measure_plan(ranks: int) -> dict[str, float]:
    from remat.config import compose
    from remat.planning.plan import make_plan

    nodes = max(1, ranks // 8)
    words = ["recipe=llama8b_full_8x80", f"train.global_batch_size={8 * ranks}", f"hardware.num_nodes={nodes}"]
    result: dict[str, float] = {}
    with timed(result, "plan_s"):
        planned = make_plan(compose.from_command_line(words).run)
    return result | {"ranks": planned.world_size}


def measure_order() -> dict[str, float]:
    """Measure the order of an epoch: every rank computes all of it, whatever the number of ranks is."""
    from remat.data.blocks import epoch_order

    result: dict[str, float] = {"blocks": BLOCKS}
    with timed(result, "order_s"):
        order = epoch_order(BLOCKS, 0, 0, True)
    return result | {"order_bytes": order.nbytes}


if __name__ == "__main__":
    main()
