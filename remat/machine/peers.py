"""Exchange messages between ranks over a key-value store, which answers even while collectives hang.

The store is torch's TCPStore, in rank 0's process (under torchrun in its agent). A rank that was killed cannot
answer. A rank that waits in a collective can, through its watchdog's thread. The store is polled, and nothing here
blocks in it, so a rank always knows how long it has waited for which ranks.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from remat.config.options import ConfigError
from remat.machine import distributed

TELL_EVERY_S = 30.0  # between two messages on who is missing
ANSWER_S = 30.0  # time for the store to answer
ASK_EVERY_S = 0.2
SAME_WORD_S = 10.0  # time for the ranks to read why the launch is refused, before the rank with the store exits
SILENT_S = 60.0  # a rank that lives says so every 10 s
MOST_NAMED = 8
CONNECTIONS_OF_A_RANK = 2  # to the store: for these messages, and for torch's process groups
OTHER_FILES = 512  # that rank 0 may have open: weights, data, libraries

_launches = 0  # how many runs this process has connected, one after another
_present: Peers | None = None


class LostPeer(RuntimeError):
    """Failure because a rank did not come or is gone (exit 70). `lost` are the ranks known to be gone."""

    def __init__(self, text: str, lost: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.lost = list(lost)


class Peers:
    """The ranks of this launch, and their key-value store. `hosts` by rank is filled once the ranks have met.

    Any thread may use the store.
    """

    def __init__(self, store: Any, rank: int, size: int, *, holder: str) -> None:
        self.rank, self.size, self.holder = rank, size, holder
        self.hosts: list[str] = ["?"] * size
        self._store = store

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any | None:
        """Return the value put under `key`; None when there is none."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def each(self, key: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return what the ranks have put under `key`, by rank; ranks that have put nothing are left out."""
        wanted = list(range(self.size) if ranks is None else ranks)
        if self._store.check([f"{key}/{rank}" for rank in wanted]):
            texts = self._store.multi_get([f"{key}/{rank}" for rank in wanted])
            return {rank: json.loads(text) for rank, text in zip(wanted, texts, strict=True)}
        found = {rank: self.get(f"{key}/{rank}") for rank in wanted}
        return {rank: value for rank, value in found.items() if value is not None}

    def put_own(self, key: str, value: Any) -> None:
        self.put(f"{key}/{self.rank}", value)

    def add(self, key: str) -> int:
        """Return how often all ranks have called this for `key`, this call included."""
        return int(self._store.add(key, 1))

    def agree(
        self, name: str, mine: dict[str, Any], judge: Callable[[list[dict[str, Any]]], Any], wait: Wait
    ) -> Any:
        """Return on every rank the verdict of rank 0's `judge` on all ranks' values. Raises as `wait` does.

        Use a name once. The values may differ in size between ranks, which no collective allows.
        """
        self.put_own(name, mine)
        if self.rank == 0:
            wait.until(self, name, lambda: self._all_have(name))
            everyone = self.each(name)
            self.put(f"{name}/verdict", judge([everyone[rank] for rank in range(self.size)]))
        wait.until(self, name, lambda: self._store.check([f"{name}/verdict"]))
        return self.get(f"{name}/verdict")

    def meet(self, name: str, say: Callable[[str], None]) -> None:
        """Wait without a limit until every rank has called this; a collective would time out. Use a name once.

        Raises LostPeer when a missing rank has ended, or has given no sign of life for SILENT_S.
        """
        self.put_own(name, True)
        if self.add(f"{name}/come") == self.size:
            self.put(f"{name}/all", True)
        wait, rose_at = Wait(0.0, "", say), time.monotonic()
        beats: dict[int, Any] = {}
        while self.get(f"{name}/all") is None:
            now = time.monotonic()
            if now - rose_at > SILENT_S:
                missing = self.missing(name)
                latest = self.each("beat", missing)
                silent = [rank for rank in missing if latest.get(rank) == beats.get(rank)]
                if beats and silent:
                    raise LostPeer(f"{self.named(silent)} gave no sign of life for {SILENT_S:g} s", silent)
                beats, rose_at = latest, now
            if left := self.get("left"):
                raise LostPeer(f"{self.named([left['rank']])} ended: {left['why']}", [left["rank"]])
            wait.pause(lambda: f"{self.named(self.missing(name))} in {name}")

    def missing(self, key: str) -> list[int]:
        """Return the ranks that have put nothing under `key`."""
        return [rank for rank in range(self.size) if not self._store.check([f"{key}/{rank}"])]

    def _all_have(self, key: str) -> bool:
        return bool(self._store.check([f"{key}/{rank}" for rank in range(self.size)]))

    def refuse_together(self) -> None:
        """Wait on rank 0, which may hold the store, until every rank has read the verdict, for at most SAME_WORD_S."""
        readers = self.add("read")
        end = time.monotonic() + SAME_WORD_S
        while self.rank == 0 and readers < self.size and time.monotonic() < end:
            time.sleep(ASK_EVERY_S)
            readers = int(self._store.add("read", 0))

    def named(self, ranks: Iterable[int]) -> str:
        """Return the ranks in words: `rank 3 on node-2, rank 5 on node-3`."""
        listed = list(ranks)
        words = [f"rank {rank}" + f" on {self.hosts[rank]}" * (self.hosts[rank] != "?") for rank in listed]
        more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
        return ", ".join(words[:MOST_NAMED]) + more


class Wait:
    """A wait for ranks. It `say`s every TELL_EVERY_S which are missing, and ends after `within_s` (0: never)."""

    def __init__(self, within_s: float, option: str, say: Callable[[str], None]) -> None:
        self._began, self._within_s, self._option, self._say = time.monotonic(), within_s, option, say
        self._told = self._began

    def until(self, peers: Peers, key: str, done: Callable[[], bool]) -> None:
        """Wait until `done()`. Raises LostPeer when a rank has told that it ends, or time is over."""
        while not done():
            if left := peers.get("left"):
                raise LostPeer(f"{peers.named([left['rank']])} ended: {left['why']}")
            self.pause(lambda: f"{_numbered(peers.missing(key) or [0], peers.size)} of {peers.size}")

    def pause(self, whom: Callable[[], str]) -> None:
        """Sleep for ASK_EVERY_S; `whom()` names the missing ranks for messages. Raises LostPeer when time is over."""
        now = time.monotonic()
        waited = now - self._began
        if self._within_s and waited > self._within_s:
            raise LostPeer(
                f"{whom()} did not come within {self._within_s:g} s ({self._option}): start it on its node with the "
                f"same MASTER_ADDR, MASTER_PORT ({_master()}) and number of ranks, or look why it ended there"
            )
        if now - self._told > TELL_EVERY_S:
            self._told = now
            self._say(f"waiting for {whom()} since {waited:.0f} s, at {_master()}")
        time.sleep(ASK_EVERY_S)


def connect(wait: Wait) -> Peers | None:
    """Connect to the store of this launch's ranks; return None for a single process.

    Raises LostPeer when nobody opens the store in time. Raises ConfigError when this rank should open it and cannot,
    or was started twice.
    """
    global _launches, _present
    distributed.settle_environment()
    rank, size = distributed.rank_from_env(), distributed.world_size_from_env()
    if size == 1:
        return None
    _launches += 1
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds = rank == 0 and not agent
    while not holds and (why := _unreachable()):
        wait.pause(lambda why=why: f"{'the agent of node 0' if agent else 'rank 0'} ({why})")  # type: ignore[misc]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"remat/{attempt}/{_launches}", _open(holds=holds))
    holder = f"the agent at {_master()}" if agent else "rank 0"
    _present = Peers(store, rank, size, holder=holder)
    if _present.add(f"started/{rank}") > 1:
        raise ConfigError(
            f"rank {rank} was started twice, the second time on {socket.gethostname()}: give each node a --node_rank "
            f"of its own, and each launch a MASTER_PORT of its own ({_master()})"
        )
    return _present


def leave(why: str) -> None:
    """Tell the other ranks, which may wait for this one, that it ends and why. Raises nothing."""
    try:
        peers = _present or _reach()
        if peers is not None and peers.get("left") is None:
            peers.put("left", {"rank": peers.rank, "why": why.splitlines()[0]})
    except (RuntimeError, ValueError):  # the store is gone, or was never there
        return


def _reach() -> Peers | None:
    """Connect to the store from a rank that ends before it joined; None when no other node can be waiting for it."""
    several_nodes = distributed.local_size_from_env() < distributed.world_size_from_env()
    if not several_nodes or distributed.rank_from_env() == 0 or _unreachable():
        return None
    return connect(Wait(ANSWER_S, "", lambda text: None))


def present() -> Peers | None:
    """Return the Peers of the last `connect`."""
    return _present


def _open(*, holds: bool) -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ranks = distributed.world_size_from_env()
    if holds:
        _allow_connections(ranks)
    try:
        return dist.TCPStore(
            host, port, ranks, holds, datetime.timedelta(seconds=ANSWER_S),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        raise ConfigError(
            f"MASTER_ADDR={host} MASTER_PORT={port}: {str(error).splitlines()[0]}; choose a free port "
            "(--master_port) on the node of rank 0"
        ) from error


def _allow_connections(ranks: int) -> None:
    """Raise this process's limit on open files to what a store of `ranks` ranks needs.

    Raises ConfigError when the system does not allow it. At the limit, torch's store would reset the connections of the
    last ranks.
    """
    needed = CONNECTIONS_OF_A_RANK * ranks + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: no limit
    if 0 <= hard < needed:
        raise ConfigError(
            f"{ranks} ranks: rank 0 holds {CONNECTIONS_OF_A_RANK} connections to each, so it may need {needed} open "
            f"files, and {socket.gethostname()} allows {hard} (ulimit -Hn): raise the limit there (limits.conf: "
            "nofile; systemd: LimitNOFILE)"
        )
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _unreachable() -> str | None:
    """Return why the store's address does not answer; None when it does."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), ANSWER_S):
            return None
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _master() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _numbered(ranks: list[int], size: int) -> str:
    """Return the ranks in words: `rank 3`, `ranks 8, 9, 10 and 5 more`."""
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"
