"""Through which network interface this process talks to the other nodes. Reading only.

gloo listens on the address of this host's name, which Debian and Ubuntu map to 127.0.1.1 in /etc/hosts: no other node
can reach that. The kernel's route to another node tells the right one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

import psutil

INTERFACE = "GLOO_SOCKET_IFNAME"


def own_address(host: str, port: int) -> str | None:
    """The address from which this process would send to `host`; None when it does not resolve or has no route.

    Connecting a datagram socket sends nothing: the kernel looks up the route.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interface_of(address: str, interfaces: Mapping[str, Iterable[str]] | None = None) -> str | None:
    """The interface that has `address`; `interfaces` are addresses by name, None: those of this machine."""
    for name, addresses in (interfaces if interfaces is not None else _interfaces()).items():
        if address in {known.split("%")[0] for known in addresses}:
            return name
    return None


def choose(addresses: Iterable[str | None], env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """(interface for gloo, what is wrong): neither where gloo finds its way alone or the user has chosen.

    `addresses` are those that the ranks have towards the first one, on which nodes can be told apart: one address,
    one node.
    """
    if asked := env.get(INTERFACE):
        have = _interfaces()
        lacking = [name for name in asked.split(",") if name not in have]
        if lacking:
            return None, f"{INTERFACE}={asked}: there is no {', '.join(lacking)} (there is {', '.join(have)})"
        return None, None
    others = sorted({address for address in addresses if address and not is_loopback(address)})
    if not others or len({address for address in addresses if address}) == 1:
        return None, None
    for other in others:
        mine = own_address(other, 1)
        if mine and not is_loopback(mine) and (name := interface_of(mine)):
            return name, None
    return None, (
        f"no network interface leads to {', '.join(others[:3])}: set {INTERFACE} on each node to the one that reaches "
        "the others (`ip route get ADDRESS` names it)"
    )


def use(name: str) -> None:
    """For every gloo group that is made from now on."""
    os.environ[INTERFACE] = name


def _interfaces() -> dict[str, list[str]]:
    return {name: [entry.address for entry in found] for name, found in psutil.net_if_addrs().items()}
