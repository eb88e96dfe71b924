"""Choose which values of a layer to keep: the fewest seconds of recomputation for a number of bytes.

For a price per byte the best choice is a minimum cut (Ford and Fulkerson 1956; as in project selection, Picard 1976):
an operation that runs again costs its time and needs its inputs, and a value that is held while its operation does not
run again costs its bytes. Cuts at the right prices give every corner of the convex frontier of time over bytes. All
capacities are integers, so every rank and machine finds the same cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remat.activation_checkpointing.mechanisms.tables.graph import Graph

PREFER_BYTES = 10**30  # a price that no time outweighs


@dataclass(frozen=True)
class Point:
    """A choice for one layer: the values it keeps by number, of which it moves `move` to the host.

    `bytes` are those on the device, `cost` is that of the operations that run again and of the link.
    """

    keep: frozenset[int]
    bytes: int
    cost: int
    move: frozenset[int] = frozenset()


def cut(
    graph: Graph,
    costs: Sequence[int],
    *,
    byte_price: int,
    cost_price: int = 1,
    held: frozenset[int] = frozenset(),
) -> Point:
    """Return the choice with the least `byte_price` x bytes + `cost_price` x cost. `costs`: of each operation.

    Values in `held` are kept whatever they cost. Of equal choices it returns the same one every time.
    """
    import networkx  # a third of a second, which a rank that chooses nothing does not spend

    net = networkx.DiGraph()
    source, sink = "needed", "not needed"
    net.add_node(source)
    net.add_node(sink)
    for number in graph.saved():
        net.add_edge(source, ("value", number))
    for number, op in enumerate(graph.ops):
        if op.fixed:
            net.add_edge(("op", number), sink)
        else:
            net.add_edge(("op", number), sink, capacity=cost_price * (costs[number] + 1))
        for needed_value in op.ins:
            if not graph.values[needed_value].free:
                net.add_edge(("op", number), ("value", needed_value))
    for value in graph.values:
        if value.free:
            continue
        end = ("op", value.op) if value.op >= 0 else sink
        if value.id in held:
            net.add_edge(("value", value.id), sink, capacity=0)
        elif value.can_be_kept:
            net.add_edge(("value", value.id), end, capacity=byte_price * value.nbytes + 1)
        else:
            net.add_edge(("value", value.id), end)
    _, (needed, _) = networkx.minimum_cut(net, source, sink, flow_func=networkx.algorithms.flow.preflow_push)
    again = {node[1] for node in needed if node[0] == "op"}
    keep = {
        value.id
        for value in graph.values
        if not value.free and ("value", value.id) in needed and value.op not in again
    }
    return Point(
        frozenset(keep),
        sum(graph.values[value].nbytes for value in keep),
        sum(costs[number] + 1 for number in again),
    )


def least(graph: Graph, held: frozenset[int] = frozenset()) -> Point:
    """Return the choice with the fewest bytes besides those of `held`."""
    return cut(graph, [op.flops + op.moved_bytes for op in graph.ops], byte_price=PREFER_BYTES, held=held)


def frontier(graph: Graph, costs: Sequence[int]) -> list[Point]:
    """Return the corners of the frontier, from the fewest bytes to no recomputation. `costs`: integers."""
    few = cut(graph, costs, byte_price=PREFER_BYTES)
    fast = cut(graph, costs, byte_price=1, cost_price=PREFER_BYTES)
    return corners(few, fast, lambda height, width: cut(graph, costs, byte_price=height, cost_price=width))


def corners(few: Point, fast: Point, solve: Callable[[int, int], Point]) -> list[Point]:
    """Return the corners from `few` to `fast`. `solve(height, width)`: the least height x bytes + width x cost."""
    if fast.cost >= few.cost:
        return [few]

    def between(low: Point, high: Point) -> list[Point]:
        width, height = high.bytes - low.bytes, low.cost - high.cost
        if width <= 0 or height <= 0:
            return []
        found = solve(height, width)
        if height * found.bytes + width * found.cost >= height * low.bytes + width * low.cost:
            return []
        return [*between(low, found), found, *between(found, high)]

    return [few, *between(few, fast), fast]
