"""Detect lost nodes by a connection from each node to rank 0's. Once it is made, only keep-alive packets use it.

A collective notices a lost node only after its time-out, which is longer than any step may take. The kernel of a live
node answers keep-alive packets even while its ranks compute, hold the GIL, or are stopped. So silence on this
connection means that the machine or the network is down, and never that a rank is slow. When a rank's process ends, the
kernel closes its end at once. Standard library only.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

HELLO_S = 10.0  # time for the other end to connect and name itself
PROBES = 3  # keep-alive packets without an answer, after which a connection is cut
ASK_EVERY_S = 0.5
OnBreak = Callable[[int, bool], None]


class Store(Protocol):
    """Key-value store of the ranks (remat/machine/peers.py)."""

    rank: int

    def put(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> Any | None: ...


class NodeLink(threading.Thread):
    """Thread that watches the connections, in rank 0 and in the first rank of each other node.

    It calls `on_break(rank, cut)` when the other end, `rank`, is lost. `cut` is true when that end did not answer for
    `silent_s` seconds, false when its process ended. `say` gets a message when a connection cannot be made.
    """

    def __init__(
        self, store: Store, host: str, silent_s: float, *, on_break: OnBreak, say: Callable[[str], None]
    ) -> None:
        super().__init__(name="remat-node-link", daemon=True)
        self._store, self._host, self._silent_s = store, host, silent_s
        self._on_break, self._say = on_break, say
        self._open: list[socket.socket] = []  # kept until this process ends: a closed one counts as lost

    def run(self) -> None:
        if self._store.rank == 0:
            self._keep_all()
        else:
            self._keep_one()

    def _keep_all(self) -> None:
        """Accept the connection of each other node, and watch all."""
        token = secrets.token_hex(16)
        listener = _listen()
        self._store.put("link", {"port": listener.getsockname()[1], "token": token})
        with selectors.DefaultSelector() as events:
            events.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in events.select():
                    if key.fileobj is listener:
                        if (found := self._accept(listener, token)) is not None:
                            events.register(found[0], selectors.EVENT_READ, found[1])
                    elif (cut := _broken(key.fileobj)) is not None:
                        events.unregister(key.fileobj)
                        self._on_break(key.data, cut)

    def _accept(self, listener: socket.socket, token: str) -> tuple[socket.socket, int] | None:
        """Return a connection and the rank at its other end; None when that end fails or does not send `token`."""
        link, _ = listener.accept()
        link.settimeout(HELLO_S)
        try:
            hello, _, rank = link.makefile("rb").readline(128).strip().partition(b" ")
            if not hmac.compare_digest(hello, token.encode()):
                raise ValueError
            self._watch(link)
            return link, int(rank)
        except (OSError, ValueError):
            link.close()
            return None

    def _keep_one(self) -> None:
        try:
            while (told := self._store.get("link")) is None:
                time.sleep(ASK_EVERY_S)
            link = socket.create_connection((self._host, told["port"]), HELLO_S)
            link.sendall(f"{told['token']} {self._store.rank}\n".encode())
            self._watch(link)
        except RuntimeError:  # the store is gone, and its rank with it
            return
        except OSError as error:
            self._say(
                f"rank {self._store.rank} on {socket.gethostname()} cannot watch the node of rank 0, {self._host} "
                f"({error.strerror or error}): a network that fails in a step is found after train.deadlines.step_s. "
                "Allow connections between nodes on all ports"
            )
            return
        while (cut := _broken(link)) is None:
            pass
        self._on_break(0, cut)

    def _watch(self, link: socket.socket) -> None:
        """Have the kernel probe the other end every quarter of `silent_s`, and cut the connection after `silent_s`."""
        link.settimeout(None)
        every_s = max(1, round(self._silent_s / (PROBES + 1)))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * self._silent_s))
        self._open.append(link)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _broken(link: Any) -> bool | None:
    """Return True for a connection that was cut, False for one that the other end closed, None for an intact one."""
    try:
        return None if link.recv(64) else False
    except ConnectionResetError:
        return False
    except OSError:
        return True
