"""The connection of each node to rank 0's: whose it is, and what its end means. One that is cut: test_two_nodes.py."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from remat.launch.node_link import NodeLink


class Store:
    """What two ranks share, as rank `rank` sees it."""

    def __init__(self, rank: int, values: dict[str, Any]) -> None:
        self.rank, self._values = rank, values

    def put(self, key: str, value: Any) -> None:
        self._values[key] = value

    def get(self, key: str) -> Any | None:
        return self._values.get(key)


class End:
    """One rank's end of a link, and what it was told."""

    def __init__(self, rank: int, values: dict[str, Any]) -> None:
        self.lost: list[tuple[int, bool]] = []
        self.said: list[str] = []
        self.told = threading.Event()
        self.link = NodeLink(
            Store(rank, values), "127.0.0.1", 4.0, on_break=self._note, say=lambda text: self._hear(text)
        )
        self.link.start()

    def _note(self, rank: int, cut: bool) -> None:
        self.lost.append((rank, cut))
        self.told.set()

    def _hear(self, text: str) -> None:
        self.said.append(text)
        self.told.set()


@pytest.fixture
def first() -> tuple[End, dict[str, Any]]:
    values: dict[str, Any] = {}
    end = End(0, values)
    while "link" not in values:
        end.told.wait(0.01)
    return end, values


def test_a_rank_whose_process_ends_is_gone_and_not_cut(first: tuple[End, dict[str, Any]]) -> None:
    end, values = first
    other = End(4, values)
    while not (end.link._open and other.link._open):
        end.told.wait(0.01)
    other.link._open[0].shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that is killed
    assert end.told.wait(30) and end.lost == [(4, False)]


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n\r\n", "Gr\u00fc\u00dfe 3\n".encode(), b"\xff\xfe\n"])
def test_a_stranger_who_connects_is_sent_away_and_is_no_rank(
    first: tuple[End, dict[str, Any]], hello: bytes
) -> None:
    end, values = first
    with socket.create_connection(("127.0.0.1", values["link"]["port"]), 30) as stranger:
        stranger.sendall(hello)
        assert stranger.recv(10) == b""
    assert end.link.is_alive()
    assert not end.lost and not end.link._open


def test_a_port_that_is_closed_between_nodes_is_told_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = End(1, {"link": {"port": port, "token": "x"}})
    assert other.told.wait(30) and "Connection refused" in other.said[0] and "all ports" in other.said[0]
