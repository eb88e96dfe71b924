"""The interface for gloo is the one that the route to the other nodes takes; nothing is chosen where none is needed."""

from __future__ import annotations

import pytest

from remat.machine import distributed

HERE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.77.0.1", "fe80::1%eth0"], "ib0": ["10.99.0.1"]}


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The address from which this machine sends to another one."""
    found: dict[str, str] = {}
    monkeypatch.setattr(distributed, "_interfaces", lambda: HERE)
    monkeypatch.setattr(distributed, "own_address", lambda host, port: found.get(host))
    return found


def test_the_kernels_route_tells_the_own_address() -> None:
    assert distributed.own_address("127.0.0.1", 29500) == "127.0.0.1"
    assert distributed.own_address("no-such-host.invalid", 29500) is None
    assert distributed.is_loopback("127.0.1.1") and not distributed.is_loopback("10.0.0.1")
    assert distributed.interface_of("127.0.0.1") == "lo"


def test_an_address_may_be_written_with_its_interface(routes: dict[str, str]) -> None:
    assert distributed.interface_of("fe80::1") == "eth0"


def test_a_node_whose_name_means_itself_finds_the_way_to_another(routes: dict[str, str]) -> None:
    """Debian: node-1 is 127.0.1.1 on node-1; the other node knows it as 10.77.0.1 and sends from 10.77.0.2."""
    routes["10.77.0.2"] = "10.77.0.1"
    assert distributed.choose_interface(["127.0.1.1", "10.77.0.2"], {}) == ("eth0", None)
    routes["10.99.0.2"] = "10.99.0.1"
    assert distributed.choose_interface(["127.0.1.1", "10.99.0.2"], {}) == ("ib0", None)


def test_ranks_of_one_node_choose_nothing(routes: dict[str, str]) -> None:
    for addresses in (["127.0.0.1"] * 2, ["127.0.1.1"] * 2, ["10.77.0.1"] * 8, [None, None]):
        assert distributed.choose_interface(addresses, {}) == (None, None)


def test_the_users_choice_stands_and_a_wrong_one_is_named(routes: dict[str, str]) -> None:
    assert distributed.choose_interface(["127.0.1.1", "10.77.0.2"], {distributed.INTERFACE: "ib0"}) == (
        None,
        None,
    )
    _, problem = distributed.choose_interface(["127.0.1.1", "10.77.0.2"], {distributed.INTERFACE: "eth7"})
    assert problem == "GLOO_SOCKET_IFNAME=eth7: there is no eth7 (there is lo, eth0, ib0)"


def test_a_node_without_a_way_is_refused_with_the_remedy(routes: dict[str, str]) -> None:
    _, problem = distributed.choose_interface(["127.0.1.1", "10.77.0.2"], {})
    assert problem is not None and "10.77.0.2" in problem and "set GLOO_SOCKET_IFNAME" in problem
