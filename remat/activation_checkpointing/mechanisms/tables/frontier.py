"""Which values of a layer to keep, and where: the least seconds of recomputation and link for a number of bytes.

For a price per byte the best choice is a minimum cut (Ford and Fulkerson 1956; as in project selection, Picard 1976):
an operation that runs again costs its time, a value that is held while its operation does not run again costs its
bytes, and whoever runs again needs its inputs. Cuts at the right prices give every corner of the frontier of time over
bytes. All capacities are integers, so every rank and machine finds the same cut.

With a link to the host there are three choices for a value. What is held is found by cuts in which a byte that can be
moved has a part of the price of another (`PARTS`); which of it is moved is a knapsack (Bellman 1957) of what the link
carries while the layer computes, or of all that the host has room for, at the link's seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from remat.activation_checkpointing.mechanisms.tables.graph import Graph

PREFER_BYTES = 10**30  # a price that no time outweighs
PARTS = (4, 2, 0)  # quarters of a byte's price on the device that a byte on the host may have
QUARTERS = 4
GRAIN = 1024  # of what a layer may move: the knapsack rounds sizes up to one in so many


@dataclass(frozen=True)
class Point:
    """A choice for one layer: the values it keeps by number, of which it moves `move` to the host.

    `bytes` are those on the device, `cost` is of what runs again and of the link.
    """

    keep: frozenset[int]
    bytes: int
    cost: int
    move: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Link:
    """What one layer may move to the host and back. `host_bytes`: of each value that can be moved, by number.

    `free_bytes` of them cost nothing, those beyond cost `cost_per_byte`, and there is room for `most_bytes`.
    """

    host_bytes: Mapping[int, int] = field(default_factory=dict)
    free_bytes: int = 0
    most_bytes: int = 0
    cost_per_byte: Fraction = Fraction(0)

    def cost(self, move: Iterable[int]) -> int:
        size = sum(self.host_bytes[value] for value in move)
        return round(max(0, size - self.free_bytes) * self.cost_per_byte)


def cut(
    graph: Graph,
    costs: Sequence[int],
    *,
    byte_price: int,
    cost_price: int = 1,
    held: frozenset[int] = frozenset(),
    sizes: Mapping[int, int] | None = None,
) -> Point:
    """Return the choice with the least `byte_price` x bytes + `cost_price` x cost. `costs`: of each operation.

    Values in `held` are kept whatever they cost. Of equal choices it returns the same one every time. `sizes`: what
    counts as the bytes of values, where that is not their bytes.
    """

    def size(value: int) -> int:
        return graph.values[value].nbytes if sizes is None else sizes.get(value, graph.values[value].nbytes)

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
            net.add_edge(("value", value.id), end, capacity=byte_price * size(value.id) + 1)
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
        sum(map(size, keep)),
        sum(costs[number] + 1 for number in again),
    )


def least(graph: Graph, held: frozenset[int] = frozenset()) -> Point:
    """Return the choice with the fewest bytes beside those `held`."""
    return cut(graph, [op.flops + op.moved_bytes for op in graph.ops], byte_price=PREFER_BYTES, held=held)


def frontier(graph: Graph, costs: Sequence[int], sizes: Mapping[int, int] | None = None) -> list[Point]:
    """Return the corners of the frontier, from the fewest bytes to no recomputation. `costs`: integers."""
    few = cut(graph, costs, byte_price=PREFER_BYTES, sizes=sizes)
    fast = cut(graph, costs, byte_price=1, cost_price=PREFER_BYTES, sizes=sizes)
    if fast.cost >= few.cost:
        return [few]

    def between(low: Point, high: Point) -> list[Point]:
        width, height = high.bytes - low.bytes, low.cost - high.cost
        if width <= 0 or height <= 0:
            return []
        found = cut(graph, costs, byte_price=height, cost_price=width, sizes=sizes)
        if height * found.bytes + width * found.cost >= height * low.bytes + width * low.cost:
            return []
        return [*between(low, found), found, *between(found, high)]

    return [few, *between(few, fast), fast]


def frontier_with_link(graph: Graph, costs: Sequence[int], link: Link) -> list[Point]:
    """Return the corners of the frontier of three choices for each value, from the fewest bytes on the device.

    The last keeps everything and moves nothing.
    """
    held: set[Point] = set()
    for part in PARTS:
        sizes = {value.id: QUARTERS * value.nbytes for value in graph.values}
        sizes |= {value: part * graph.values[value].nbytes for value in link.host_bytes}
        held.update(frontier(graph, costs, sizes))
    return _corners(placed for point in held for placed in _place(graph, point, link))


def _place(graph: Graph, point: Point, link: Link) -> Iterator[Point]:
    """Yield what `point` holds with nothing moved, what is free to move, and all that there is room for."""
    here = sum(graph.values[value].nbytes for value in point.keep)
    for limit in {0, min(link.free_bytes, link.most_bytes), link.most_bytes}:
        move = _fill(graph, point.keep, link, limit)
        there = sum(graph.values[value].nbytes for value in move)
        # A little for each that moves: none is moved in vain.
        yield Point(point.keep, here - there, point.cost + link.cost(move) + len(move), move)


def _fill(graph: Graph, held: Iterable[int], link: Link, limit: int) -> frozenset[int]:
    """Return the values whose leaving frees the most of the device, within `limit` bytes of the host."""
    grain = -(-limit // GRAIN) or 1
    best: dict[int, tuple[int, frozenset[int]]] = {0: (0, frozenset())}  # by grains: bytes that are freed
    for value in sorted(link.host_bytes.keys() & held):
        grains, freed = -(-link.host_bytes[value] // grain), graph.values[value].nbytes
        for taken, (size, move) in list(best.items()):
            total = taken + grains
            if total * grain <= limit + grain - 1 and best.get(total, (-1,))[0] < size + freed:
                best[total] = size + freed, move | {value}
    fitting = [
        (freed, sorted(move)) for freed, move in best.values() if sum(link.host_bytes[v] for v in move) <= limit
    ]
    return frozenset(max(fitting)[1])


def _corners(points: Iterable[Point]) -> list[Point]:
    """Return the corners of the lower left of the convex hull, from the fewest bytes to the least cost."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bytes, point.cost, sorted(point.move))):
        if found and point.cost >= found[-1].cost:
            continue
        while len(found) > 1 and _is_above(found[-1], found[-2], point):
            found.pop()
        found.append(point)
    return found


def _is_above(middle: Point, low: Point, high: Point) -> bool:
    """Return whether `middle` lies on the line from `low` to `high`, or above it."""
    return (low.cost - middle.cost) * (high.bytes - low.bytes) <= (low.cost - high.cost) * (
        middle.bytes - low.bytes
    )
