"""Ranks that talk over a store: who is missing, what was agreed, who left; and what the watchdog makes of it."""

from __future__ import annotations

import datetime
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from remat.config.options import ConfigError, DeadlinesConfig
from remat.launch.processes import free_port
from remat.machine import peers
from remat.machine.peers import LostPeer, Peers, Wait
from remat.training import lost_peer, watchdog


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=30), wait_for_workers=False)


def ranks(store: Any, size: int) -> list[Peers]:
    found = []
    for rank in range(size):
        own = dist.TCPStore(
            "127.0.0.1", store.port, 1, False, datetime.timedelta(seconds=30), wait_for_workers=False
        )
        found.append(Peers(dist.PrefixStore("test", own), rank, size, holder="rank 0"))
        found[-1].hosts = [f"node-{each}" for each in range(size)]
    return found


def patience(within_s: float = 60.0) -> Wait:
    return Wait(within_s, f"train.deadlines.build_s={within_s:g}", lambda text: None)


def test_all_ranks_get_rank_0s_verdict_on_what_all_have_put(store: Any) -> None:
    """Payloads of any size: collectives of tensors that differ in size abort the process."""
    three, verdicts = ranks(store, 3), {}

    def meet(found: Peers) -> None:
        mine = {"rank": found.rank, "text": "x" * 100_000 * found.rank}
        verdicts[found.rank] = found.agree(
            "facts", mine, lambda everyone: [len(each["text"]) for each in everyone], patience()
        )

    threads = [threading.Thread(target=meet, args=(each,)) for each in three]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert verdicts == {rank: [0, 100_000, 200_000] for rank in range(3)}


def test_a_rank_that_does_not_come_is_named_again_and_again_and_ends_the_wait(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TELL_EVERY_S", 0.1)
    monkeypatch.setattr(peers, "ASK_EVERY_S", 0.02)
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    said: list[str] = []
    first, second, _ = ranks(store, 3)
    second.put_own("facts", {})
    with pytest.raises(
        LostPeer, match=r"rank 2 of 3 did not come within 0.5 s \(train.deadlines.build_s=0.5\)"
    ):
        first.agree("facts", {}, lambda everyone: None, Wait(0.5, "train.deadlines.build_s=0.5", said.append))
    assert len(said) >= 2 and said[0].startswith("waiting for rank 2 of 3 since 0 s, at node-0")


def test_a_rank_that_ended_before_it_came_ends_the_wait_at_once(store: Any) -> None:
    first, _ = ranks(store, 2)
    first.put("left", {"rank": 1, "why": "ConfigError: no such file"})
    with pytest.raises(LostPeer, match="rank 1 on node-1 ended: ConfigError: no such file"):
        first.agree("facts", {}, lambda everyone: None, patience())


def test_a_slow_node_is_waited_for_while_it_lives_and_a_dead_one_is_named(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SILENT_S", 1.0)
    monkeypatch.setattr(peers, "ASK_EVERY_S", 0.02)
    monkeypatch.setattr(peers, "TELL_EVERY_S", 0.1)
    said: list[str] = []
    first, second = ranks(store, 2)
    for each in (first, second):
        each.put_own("beat", {"beats": 0})
    met = threading.Event()
    meeting = threading.Thread(target=lambda: (first.meet("data", said.append), met.set()), daemon=True)
    meeting.start()
    for beats in range(25):  # longer than two looks at who is silent: the first knows no beats
        second.put_own("beat", {"beats": beats + 1})
        assert not met.wait(0.1)
    second.meet("data", said.append)
    assert met.wait(30) and "waiting for rank 1 on node-1 in data" in said[0]
    with pytest.raises(LostPeer, match=r"rank 1 on node-1 gave no sign of life for 1 s"):
        first.meet("more data", said.append)


def test_rank_0s_store_takes_more_ranks_than_the_soft_limit_on_open_files(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = 24
    monkeypatch.setattr(peers, "OTHER_FILES", 256)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, before[1]))
    try:
        server = peers._open(holds=True)
        clients = [peers._open(holds=False) for _ in range(ranks - 1)]  # each takes two files of this process
        clients[-1].set("key", "value")
        assert server.get("key") == b"value"
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 2 * ranks + 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_ranks_that_the_hard_limit_on_open_files_does_not_allow_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(
        ConfigError, match=r"2048 ranks.*need 4608 open files.*allows 4096 \(ulimit -Hn\): raise"
    ):
        peers._allow_connections(2048)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    codes: list[int] = []
    monkeypatch.setattr(watchdog, "POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "LISTEN_S", 0.02)
    monkeypatch.setattr(watchdog, "BEAT_S", 0.3)
    monkeypatch.setattr(watchdog, "REPORTS_S", 1.0)
    monkeypatch.setattr(watchdog, "FIRST_SPEAKS_S", 0.0)
    monkeypatch.setattr(watchdog, "_leave_alone", lambda mine: None)
    yield codes


def dogs(found: list[Peers], **deadlines: float) -> list[watchdog.Watchdog]:
    made = [watchdog.Watchdog(DeadlinesConfig(**deadlines), rank=each.rank, size=each.size) for each in found]
    for dog, each in zip(made, found, strict=True):
        dog.meet(each)
    return made


def ends(dog: watchdog.Watchdog, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when it would end its process; its thread ends then."""
    ended, leave = threading.Event(), dog._end

    def end() -> None:
        try:
            leave()
        except SystemExit:
            ended.set()
            dog.close()

    def _exit(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(watchdog.os, "_exit", _exit)
    monkeypatch.setattr(dog, "_end", end)
    return ended


def test_a_rank_that_waits_for_one_behind_it_is_not_ended_by_its_own_deadline(
    store: Any, quick: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node 1 still reads its data, without a deadline; node 0 is past it, and has one."""
    ahead, behind = dogs(ranks(store, 2), build_s=0.2, data_s=0)
    for dog in (ahead, behind):
        dog.enter("data")
    ahead.enter("build")
    ended = ends(ahead, monkeypatch)
    ahead.start()
    behind.start()
    assert not ended.wait(1.5)
    assert "waiting for rank 1 on node-1 in data" in capsys.readouterr().err
    behind.close()  # it beats no more: stopped, or its machine is gone
    assert ended.wait(60)
    said = capsys.readouterr().err
    assert "in build of rank 0 (train.deadlines.build_s=0.2)" in said
    assert "rank 1 on node-1: did not report: it was stopped or hangs itself, and is the suspect" in said


def test_two_ranks_that_hang_alike_are_ended_though_both_beat(
    store: Any, quick: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = dogs(ranks(store, 2), step_s=0.2)
    for dog in (first, second):
        dog.enter("step", 3)
    over = [ends(dog, monkeypatch) for dog in (first, second)]
    first.start()
    second.start()
    assert all(ended.wait(60) for ended in over)
    said = capsys.readouterr().err
    assert said.count("no progress for") == 1  # one rank speaks for all
    assert "rank 0 on node-0: step 3" in said and "rank 1 on node-1: step 3" in said


def test_a_store_that_is_gone_makes_nobody_a_suspect(
    store: Any, quick: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is well, but has no way to say so in time: a shared folder may show its report a minute late."""

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection was likely closed")

    (first, _) = dogs(ranks(store, 2), step_s=0.1)
    first._peers._store = Gone()  # type: ignore[union-attr]
    first.enter("step", 3)
    ended = ends(first, monkeypatch)
    first.start()
    assert ended.wait(60)
    said = capsys.readouterr().err
    assert "rank 1 on node-1: has not reported yet" in said and "is the suspect" not in said


def test_no_rank_looks_into_the_shared_folder_while_the_store_answers(
    store: Any, quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(watchdog.Watchdog, "_reports", lambda self: looked.append(1) or [])
    (first, _) = dogs(ranks(store, 2), step_s=100)
    first.start()
    time.sleep(0.5)
    first.close()
    assert not looked


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.2]:24351",
        "[../gloo/transport/tcp/pair.cc:547] Read error [10.77.0.2]:24351: Connection reset by peer",
        "[../gloo/transport/tcp/pair.cc:598] Write error [10.77.0.2]:24351: Broken pipe",
        "Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
        "Timed out waiting 1800000ms for recv operation to complete",
    ],
)
def test_the_errors_of_gloo_are_recognised(text: str) -> None:
    assert lost_peer.recognised(RuntimeError(text))


def test_the_errors_of_nccl_and_of_the_store_are_recognised_and_others_are_not() -> None:
    assert lost_peer.recognised(dist.DistBackendError("NCCL error in: ..., remote process exited"))
    assert lost_peer.recognised(dist.DistNetworkError("Failed to recv, got 0 bytes"))
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("Broken pipe"),
        KeyError("x"),
    ):
        assert not lost_peer.recognised(error)


def test_the_roll_call_finds_the_ranks_that_do_not_answer(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_peer, "ROLL_S", 0.5)
    four = ranks(store, 4)
    four[2].put_own("beat", {"phase": "step", "step": 7})
    four[1].put_own("alive", ["step", 7])
    assert lost_peer._verdict(four[0], ("step", 8), "Read error") == (
        "rank 2 on node-2, rank 3 on node-3 are gone, last heard of in step 7",
        [2, 3],
    )
    assert four[1].get("call") == "lost"
    assert lost_peer._verdict(four[3], ("step", 8), "Read error")[1] == [2, 3]  # the same word on every rank


def test_a_failure_that_is_no_ones_loss_is_told_to_the_others(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks(store, 2)
    monkeypatch.setattr(peers, "_present", second)
    with pytest.raises(KeyError), lost_peer.named():
        raise KeyError("no such column")
    text, lost = lost_peer._verdict(first, ("step", 2), "Read error")
    assert text == "rank 1 on node-1 ended (KeyError: 'no such column')" and lost == [1]


def test_a_collective_that_fails_becomes_one_sentence_and_a_file(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_peer, "ROLL_S", 0.3)
    first, _ = ranks(store, 2)
    monkeypatch.setattr(peers, "_present", first)
    with pytest.raises(LostPeer) as found, lost_peer.named():
        raise RuntimeError("Read error [10.77.0.2]: Connection reset by peer\nframe #0: ...\n" * 50)
    text = str(found.value)
    assert text.startswith("rank 1 on node-1 is gone; found in end: the run ends") and "\n" not in text
    file = text.split("traceback: ")[1].rstrip(")")
    assert "Connection reset by peer" in open(file).read()  # noqa: PTH123, SIM115
