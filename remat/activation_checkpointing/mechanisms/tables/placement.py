"""Choose which values of a layer to keep on the device, which to move over a link to the host, which to recompute.

A minimum cut cannot express how much a link carries, so this is an integer program, solved exactly by HiGHS (Huangfu
and Hall 2018). Its variables say of each value whether it is on the device and whether it is on the host, and of each
operation whether it runs again. What backward needs is kept or made, and so are the inputs of operations that run
again. Host bytes beyond those that are free cost the link's time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy

from remat.activation_checkpointing.mechanisms.tables.frontier import Point, corners
from remat.activation_checkpointing.mechanisms.tables.graph import Graph

UNITS = 1000.0  # into which the sum of all bytes that a layer can move is divided
SLACK = 0.5  # of a limit: the solver's numbers are floats, sizes and costs are whole


@dataclass(frozen=True)
class Link:
    """What one layer may move to the host and back. `host_bytes`: of each value that can be moved, by number.

    `free_bytes` of them cost nothing, those beyond cost `cost_per_byte`, and there is room for `most_bytes`.
    """

    host_bytes: Mapping[int, int] = field(default_factory=dict)
    free_bytes: int = 0
    most_bytes: int = 0
    cost_per_byte: float = 0.0

    def cost(self, move: Iterable[int]) -> int:
        """Return the cost of moving the values `move`: the link's, and 1 for each, so that none moves in vain."""
        sizes = [self.host_bytes[value] for value in move]
        return len(sizes) + round(max(0, sum(sizes) - self.free_bytes) * self.cost_per_byte)


def frontier_with_link(graph: Graph, costs: list[int], link: Link) -> list[Point]:
    """Return the corners of the frontier of time over bytes on the device, from the fewest bytes on.

    The last keeps everything and moves nothing. `costs`: of each operation.
    """
    program = _Program(graph, costs, link)
    few = program.solve(0, 1, most_bytes=program.solve(1, 0).bytes)
    fast = program.solve(1, 0, most_cost=program.solve(0, 1).cost)
    return _convex(corners(few, fast, program.solve))


def _convex(points: Iterable[Point]) -> list[Point]:
    """Return `points` without those that are above a line between two others, by the rounding of the solver."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bytes, point.cost)):
        if found and point.cost >= found[-1].cost:
            continue
        while len(found) > 1 and _is_above(found[-1], found[-2], point):
            found.pop()
        found.append(point)
    return found


def _is_above(middle: Point, low: Point, high: Point) -> bool:
    saved, beyond = low.cost - middle.cost, low.cost - high.cost
    return saved * (high.bytes - low.bytes) <= beyond * (middle.bytes - low.bytes)


class _Program:
    """The integer program of one layer. Columns: on the device, on the host, operations, and the bytes beyond free."""

    def __init__(self, graph: Graph, costs: list[int], link: Link) -> None:
        self._graph, self._costs, self._link = graph, costs, link
        held = [value.id for value in graph.values if not value.free and value.can_be_kept]
        moved = [value for value in held if value in link.host_bytes]
        again = [number for number, op in enumerate(graph.ops) if not op.fixed]
        keys = [("device", v) for v in held] + [("host", v) for v in moved] + [("op", n) for n in again]
        self._column = {key: place for place, key in enumerate(keys)}
        self._beyond = len(keys)
        self._bytes = numpy.zeros(len(keys) + 1)
        self._cost = numpy.zeros(len(keys) + 1)
        for (kind, number), place in self._column.items():
            if kind == "device":
                self._bytes[place] = graph.values[number].nbytes
            else:
                self._cost[place] = 1 if kind == "host" else costs[number] + 1
        # bytes in one unit: the solver needs numbers of similar size
        self._unit = max(1.0, sum(link.host_bytes.values()) / UNITS)
        self._cost[self._beyond] = link.cost_per_byte * self._unit
        self._solver = self._build()

    def _build(self) -> Any:
        import highspy  # a tenth of a second, which a rank that chooses nothing does not spend

        solver, infinite = highspy.Highs(), highspy.kHighsInf
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", 0.0)
        for place in range(self._beyond):
            solver.addVar(0.0, 1.0)
            solver.changeColIntegrality(place, highspy.HighsVarType.kInteger)
        solver.addVar(0.0, infinite)

        def add(low: float, high: float, terms: Mapping[int, float]) -> None:
            solver.addRow(low, high, len(terms), list(terms), list(terms.values()))

        for value in self._graph.saved():
            add(1.0, infinite, self._found(value))
        for number, op in enumerate(self._graph.ops):
            if ("op", number) in self._column:
                for needed in {value for value in op.ins if not self._graph.values[value].free}:
                    terms = self._found(needed)
                    if self._column["op", number] not in terms:
                        add(0.0, infinite, terms | {self._column["op", number]: -1.0})
        sizes = {
            self._column["host", v]: n / self._unit
            for v, n in self._link.host_bytes.items()
            if ("host", v) in self._column
        }
        add(-infinite, self._link.most_bytes / self._unit, sizes)
        add(-infinite, self._link.free_bytes / self._unit, sizes | {self._beyond: -1.0})
        for amounts in (self._bytes, self._cost):  # the last two rows, which `solve` bounds
            scaled = amounts / (amounts.max() or 1.0)
            add(0.0, infinite, {place: float(amount) for place, amount in enumerate(scaled) if amount})
        return solver

    def _found(self, value: int) -> dict[int, float]:
        """Return the columns of which at least one must be 1 if `value` is needed in backward."""
        keys = ("device", value), ("host", value), ("op", self._graph.values[value].op)
        return {self._column[key]: 1.0 for key in keys if key in self._column}

    def solve(
        self, byte_price: int, cost_price: int, most_bytes: float = math.inf, most_cost: float = math.inf
    ) -> Point:
        """Return the choice with the least `byte_price` x bytes on the device + `cost_price` x cost."""
        import highspy

        prices = byte_price * self._bytes + cost_price * self._cost
        prices /= prices.max() or 1.0
        count = len(prices)
        self._solver.changeColsCost(count, numpy.arange(count, dtype=numpy.int32), prices)
        rows = self._solver.getNumRow()
        for row, most, amounts in ((rows - 2, most_bytes, self._bytes), (rows - 1, most_cost, self._cost)):
            self._solver.changeRowBounds(row, 0.0, (most + SLACK) / (amounts.max() or 1.0))
        self._solver.run()
        if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"HiGHS: {self._solver.getModelStatus()} for the table of a layer")
        chosen = self._solver.getSolution().col_value
        taken = {key for key, place in self._column.items() if chosen[place] > 0.5}
        there = frozenset(value for kind, value in taken if kind == "host")
        here = frozenset(value for kind, value in taken if kind == "device") - there
        again = [number for kind, number in taken if kind == "op"]
        return Point(
            here | there,
            sum(self._graph.values[value].nbytes for value in here),
            sum(self._costs[number] + 1 for number in again) + self._link.cost(there),
            there,
        )
