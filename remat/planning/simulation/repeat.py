"""Make the record of a deep model from the record of a few of its layers, if equal layers follow one another.

Of a sequence of equal layers a few periods are recorded: two in the middle, and on each side `reach` more, as far as
layers affect their neighbours. The record is cut where the forward of a layer begins and where its backward begins.
What lies between two cuts is a piece, written relative to its own layer. If the pieces of the two middle periods are
the same, in forward and in backward, then all further periods would be the same too, and the piece is inserted as often
as the whole model has it. Otherwise NotRepeated is raised.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import nn

from remat.planning.simulation.timeline import Mark, Part, Place, Ready, Record, Snapshot
from remat.planning.simulation.types import OpCost, Phase
from remat.planning.simulation.zero3 import Event, Parameters

REACHES = (1, 2)
REACHES_OF_MOVES = (3, 4)  # moved values leave while two other layers run, and come back before their backward
LONGEST_PERIOD = 12
WORTH_IT = 0.75  # largest share of the layers that is recorded: a larger share saves too little


class NotRepeated(Exception):
    """Error: layers that were taken to be equal do not all do the same."""


class Repeat(NamedTuple):
    """A sequence of equal layers: two periods of `period` layers, `reach` more on each side, from layer `first` on.

    `copies` periods are missing in the middle.
    """

    first: int
    period: int
    copies: int
    reach: int = 1

    @property
    def periods(self) -> int:
        return 2 + 2 * self.reach


def shorten(keys: Sequence[Hashable], reach: int = 1) -> tuple[list[int], list[Repeat]]:
    """Return the layers to record and the repeats that they stand for. Layers with equal `keys` are equal.

    If there are no repeats, all layers are recorded.
    """
    recorded = 2 + 2 * reach
    layers: list[int] = []
    repeats: list[Repeat] = []
    start = 0
    while start < len(keys):
        saved, period, periods = max(
            ((periods - recorded) * period, -period, periods)
            for period in range(1, LONGEST_PERIOD + 1)
            for periods in [_count_periods(keys, start, period)]
        )
        if saved <= 0:
            layers.append(start)
            start += 1
            continue
        size, half = -period, -period * recorded // 2
        end = start + size * periods
        repeats.append(Repeat(len(layers), size, periods - recorded, reach))
        layers += [*range(start, start + half), *range(end - half, end)]
        start = end
    if len(layers) > WORTH_IT * len(keys):
        return list(range(len(keys))), []
    return layers, repeats


def _count_periods(keys: Sequence[Hashable], start: int, period: int) -> int:
    """Return how many equal periods follow one another from `start` on."""
    end = start + period
    while end < len(keys) and keys[end] == keys[end - period]:
        end += 1
    return (end - start) // period


def sources(repeats: Sequence[Repeat], num_recorded: int) -> list[int]:
    """Return for each layer of the whole model the recorded layer that stands for it."""
    return [layer for unit in _units(repeats, num_recorded) for _ in range(unit.times) for layer in unit.layers]


def lengthen_sizes(
    sizes: Mapping[int, Sequence[int]], repeats: Sequence[Repeat], num_recorded: int
) -> list[int]:
    """Return the sizes of all layers of the whole model, in order, from those of each recorded layer.

    Raises NotRepeated where the two middle periods of a sequence differ.
    """
    units = _units(repeats, num_recorded)
    for unit, following in pairwise(units):
        one, other = ([sizes.get(layer) for layer in each.layers] for each in (unit, following))
        if unit.is_template and following.is_template and unit.run == following.run and one != other:
            raise NotRepeated(f"recorded layers {unit.layers} and those after them do not do the same")
    return [size for layer in sources(repeats, num_recorded) for size in sizes.get(layer, ())]


@dataclass(frozen=True)
class _Unit:
    """Recorded layers that stay together: a period of a run of equal layers, or a single layer outside such runs.

    `times` is how often the whole model has the unit.
    """

    layers: range
    run: int | None = None
    times: int = 1
    reach: int = 0  # of its run
    is_template: bool = False  # one of the two in the middle


def _units(repeats: Sequence[Repeat], num_layers: int) -> list[_Unit]:
    found: list[_Unit] = []
    starts = {repeat.first: (run, repeat) for run, repeat in enumerate(repeats)}
    layer = 0
    while layer < num_layers:
        if layer not in starts:
            found.append(_Unit(range(layer, layer + 1)))
            layer += 1
            continue
        run, repeat = starts[layer]
        for place in range(repeat.periods):
            times = 1 + repeat.copies * (place == repeat.reach)
            in_middle = repeat.reach <= place <= repeat.reach + 1
            found.append(_Unit(range(layer, layer + repeat.period), run, times, repeat.reach, in_middle))
            layer += repeat.period
    return found


class _Numbers:
    """The numbers of parameters or modules: those before the layers, those of each layer, and those after them."""

    def __init__(self, owners: Sequence[int | None], units: Sequence[_Unit]) -> None:
        num_layers = units[-1].layers.stop
        inside = [place for place, owner in enumerate(owners) if owner is not None]
        self.before = inside[0] if inside else len(owners)
        self.sizes = [0] * num_layers
        for owner in owners:
            if owner is not None:
                self.sizes[owner] += 1
        expected = [layer for layer, size in enumerate(self.sizes) for _ in range(size)]
        if list(owners[self.before : self.before + len(expected)]) != expected or len(inside) != len(expected):
            raise NotRepeated("layers are not next to each other in the model")
        self.owners = owners
        self.starts = [self.before, *(self.before + end for end in accumulate(self.sizes))]
        self.source = [layer for unit in units for _ in range(unit.times) for layer in unit.layers]
        whole = accumulate(self.sizes[layer] for layer in self.source)
        self.whole_starts = [self.before, *(self.before + end for end in whole)]

    def split(self, number: int) -> tuple[int | None, int]:
        """Return the layer of a recorded number and the number in it; outside the layers None, and one for `join`."""
        layer = self.owners[number]
        if layer is not None:
            return layer, number - self.starts[layer]
        return None, number if number < self.before else number - self.starts[-1] - len(self.owners)

    def join(self, layer: int | None, number: int) -> int:
        """Return the number in the whole model of what `split` returned, given the layer in the whole model."""
        if layer is not None:
            return self.whole_starts[layer] + number
        return number if number >= 0 else number + self.whole_starts[-1] + len(self.owners)

    def lengthen(self, values: Sequence[Any]) -> list[tuple[Any, int]]:
        """Return (value, layer) for each number of the whole model: the recorded value, and the whole model's layer."""
        found = [(value, 0) for value in values[: self.before]]
        for layer, source in enumerate(self.source):
            found += [(value, layer) for value in values[self.starts[source] : self.starts[source + 1]]]
        return [*found, *((value, 0) for value in values[self.starts[-1] :])]


class _Reference(NamedTuple):
    """How a piece refers to a layer: within a run `unit` is relative to the piece's own, else it is as recorded."""

    relative: bool
    unit: int
    layer: int  # in its unit


class _Layout:
    """Where the units of the recorded model are in the whole one."""

    def __init__(self, units: Sequence[_Unit]) -> None:
        self.units = units
        self.whole = [place for place, unit in enumerate(units) for _ in range(unit.times)]
        self.first_layer = [0, *accumulate(len(units[place].layers) for place in self.whole)]
        self._unit_of = {layer: place for place, unit in enumerate(units) for layer in unit.layers}
        self._at = {unit: place for place, unit in reversed(list(enumerate(self.whole)))}

    def refer(self, layer: int, origin: int | None) -> _Reference:
        """Return how a piece of unit `origin` (None: outside the layers) refers to `layer`."""
        place = self._unit_of[layer]
        return _Reference(*self.relate(place, origin), layer - self.units[place].layers.start)

    def relate(self, place: int, origin: int | None) -> tuple[bool, int]:
        unit = self.units[place]
        if unit.run is not None and origin is not None and self.units[origin].run == unit.run:
            if abs(place - origin) > unit.reach:
                raise NotRepeated("a layer reaches further than is recorded around it")
            return True, place - origin
        if unit.is_template:
            raise NotRepeated("something outside of equal layers reaches into their middle")
        return False, place

    def unit_at(self, relative: bool, unit: int, position: int) -> int:
        """Return the place of a unit in the whole model for a piece that is at `position` there."""
        return position + unit if relative else self._at[unit]

    def layer_at(self, reference: _Reference, position: int) -> int:
        return self.first_layer[self.unit_at(reference.relative, reference.unit, position)] + reference.layer


@dataclass(frozen=True)
class _Piece:
    """A part of a record, relative to the unit that it belongs to (None: none) and to the bytes where it begins.

    Pieces are equal if they do the same, whatever their units. `trace` has (0, bytes) for an allocation, (1, which) for
    a free in the same piece, (2, owner, which) for a free of what another piece allocated, and (3, index) for a part.
    """

    unit: int | None = field(compare=False)
    parts: list[Any]
    trace: list[tuple[Any, ...]]
    ops: list[OpCost]
    num_allocations: int
    change: tuple[int, int, int]  # of the bytes of each kind, from its begin to its end


@dataclass(frozen=True)
class Owners:
    """Which layer, if any, each parameter and each module of a model is in, in the model's own order."""

    of_parameters: list[int | None]
    of_modules: list[int | None]

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[nn.Module]) -> Owners:
        owns = {id(p): index for index, layer in enumerate(layers) for p in layer.parameters()}
        inside = {id(m): index for index, layer in enumerate(layers) for m in layer.modules()}
        return cls([owns.get(id(p)) for p in model.parameters()], [inside.get(id(m)) for m in model.modules()])

    @property
    def num_layers(self) -> int:
        return 1 + max((owner for owner in self.of_modules if owner is not None), default=-1)


class Lengthening:
    """The record and the parameters of a whole model, from those of one with few layers.

    `places` are where the parts of `record` begin.
    """

    def __init__(
        self,
        record: Record,
        places: Sequence[Place],
        parameters: Parameters,
        owners: Owners,
        repeats: Sequence[Repeat],
    ) -> None:
        self._record, self._places, self._parameters = record, places, parameters
        self._units = _units(repeats, owners.num_layers)
        self._layout = _Layout(self._units)
        self._of_parameters = _Numbers(owners.of_parameters, self._units)
        self._of_modules = _Numbers(owners.of_modules, self._units)

    @cached_property
    def _begins(self) -> list[int]:
        """Return the parts at which pieces begin.

        They are the start, each unit's forward, the head, the loss' backward, each unit's backward, the embedding's.
        """
        parts, backward = self._record.parts, self._record.backward_begins_at
        forward = {p.cut.layer: at for at, p in enumerate(parts[:backward]) if isinstance(p.cut, Mark)}
        marks = sum(isinstance(p.cut, Mark) for p in parts)
        backwards: dict[int, int] = {}
        last = backward
        for at in range(backward, len(parts)):
            layer = self._layer_of(parts[at].cut)
            if layer is not None:
                backwards.setdefault(layer, at)
                last = at
        num_layers = self._units[-1].layers.stop
        found = [
            0,
            *(forward.get(unit.layers.start, -1) for unit in self._units),
            forward.get(num_layers, -1),
            backward,
            *(backwards.get(unit.layers.stop - 1, -1) for unit in reversed(self._units)),
            last + 1,
        ]
        if found != sorted(set(found)) or marks != num_layers + 1:
            raise NotRepeated("layers do not run one after another, once")
        return found

    def _layer_of(self, cut: Any) -> int | None:
        if isinstance(cut, Ready):
            return self._of_parameters.split(cut.parameter)[0]
        return self._of_modules.split(cut.module)[0] if isinstance(cut, Event) else None

    @cached_property
    def _owners(self) -> list[int | None]:
        """Return the unit of each piece."""
        order = range(len(self._units))
        return [None, *order, None, None, *reversed(order), None]

    @cached_property
    def _pieces(self) -> list[_Piece]:
        ends = [*self._begins[1:], len(self._record.parts)]
        return [
            self._cut_out(number, begin, end)
            for number, (begin, end) in enumerate(zip(self._begins, ends, strict=True))
        ]

    def _cut_out(self, number: int, begin: int, end: int) -> _Piece:
        record, unit = self._record, self._owners[number]
        start, stop = self._places[begin], self._place(end)
        parts = [self._relative(part, unit, start.by_kind) for part in record.parts[begin:end]]
        trace: list[tuple[Any, ...]] = []
        seen = start.allocations
        for at in range(start.trace, stop.trace, 2):
            name, size = record.trace[at], record.trace[at + 1]
            if name < 0:
                trace.append((3, -1 - name - begin))
            elif size >= 0:
                seen += 1
                trace.append((0, size))
            elif start.allocations < name <= stop.allocations:
                trace.append((1, name - start.allocations))
            else:
                trace.append((2, *self._allocated_by(name, unit)))
        change = tuple(after - before for before, after in zip(start.by_kind, stop.by_kind, strict=True))
        return _Piece(
            unit,
            parts,
            trace,
            record.ops[start.ops : stop.ops],
            stop.allocations - start.allocations,
            change,  # type: ignore[arg-type]
        )

    def _place(self, part: int) -> Place:
        if part < len(self._places):
            return self._places[part]
        record = self._record
        allocations = sum(
            name >= 0 and size >= 0 for name, size in zip(record.trace[::2], record.trace[1::2], strict=True)
        )
        return Place(len(record.trace), len(record.ops), allocations, record.parts[-1].at_cut.by_kind)

    def _allocated_by(self, name: int, origin: int | None) -> tuple[Any, ...]:
        """Return the piece that made an allocation, relative to unit `origin`, and the allocation's number there."""
        number = max(n for n, begin in enumerate(self._begins) if self._places[begin].allocations < name)
        which = name - self._places[self._begins[number]].allocations
        unit = self._owners[number]
        if unit is None:
            return None, number, which
        return self._layout.relate(unit, origin), number > len(self._units), which

    def _relative(self, part: Part, unit: int | None, base: tuple[int, int, int]) -> tuple[Any, ...]:
        """Return a part relative to its unit."""
        snapshots = [part.at_cut, part.peak, *part.of_place.values()]
        return (
            self._say_cut(part.cut, unit),
            tuple(part.of_place),
            [self._say(snapshot, unit, base) for snapshot in snapshots],
        )

    def _say(self, snapshot: Snapshot, unit: int | None, base: tuple[int, int, int]) -> tuple[Any, ...]:
        if snapshot.total < 0:  # of a mark: nothing yet
            base = snapshot.by_kind
        kinds = tuple(size - before for size, before in zip(snapshot.by_kind, base, strict=True))
        where = None if snapshot.layer is None else self._layout.refer(snapshot.layer, unit)
        return kinds, where, snapshot.total < 0, snapshot.phase, snapshot.operation, snapshot.module

    def _say_cut(self, cut: Any, unit: int | None) -> Any:
        if isinstance(cut, Ready):
            return Ready, self._say_number(self._of_parameters, cut.parameter, unit)
        if isinstance(cut, Event):
            pinned = frozenset(self._say_number(self._of_parameters, p, unit) for p in cut.pinned)
            return (
                Event,
                self._say_number(self._of_modules, cut.module, unit),
                cut._replace(module=0, pinned=frozenset()),
                pinned,
            )
        return Mark if isinstance(cut, Mark) else None

    def _say_number(self, numbers: _Numbers, number: int, unit: int | None) -> tuple[_Reference | None, int]:
        layer, inside = numbers.split(number)
        return None if layer is None else self._layout.refer(layer, unit), inside

    def _check(self) -> None:
        """Raise NotRepeated unless the periods of each run that stand for others are the same."""
        kept = self._record.kept_bytes
        for number, unit in enumerate(self._units):
            if unit.times == 1:
                continue
            one, other = number + 1, number + 2
            if any(pieces[one] != pieces[other] for pieces in (self._pieces, self._pieces[::-1])):
                raise NotRepeated(f"recorded layers {unit.layers} and those after them do not do the same")
            after = self._units[number + 1].layers
            if [kept.get(layer) for layer in unit.layers] != [kept.get(layer) for layer in after]:
                raise NotRepeated(f"recorded layers {unit.layers} and those after them do not keep the same")

    def run(self) -> tuple[Record, Parameters]:
        """Check the pieces, and put them together as the whole model has them.

        Raises NotRepeated if equal layers do not do the same.
        """
        self._check()
        made = _Assembly(self)
        whole = self._layout.whole
        count = len(self._units)
        made.add(self._pieces[0], 0, 0)
        for position, unit in enumerate(whole):
            made.add(self._pieces[1 + unit], position, False)
        made.add(self._pieces[1 + count], 0, 1 + count)
        backward_begins_at = len(made.parts)
        made.add(self._pieces[2 + count], 0, 2 + count)
        for position, unit in reversed(list(enumerate(whole))):
            made.add(self._pieces[-2 - unit], position, True)
        made.add(self._pieces[-1], 0, len(self._pieces) - 1)
        record, source = self._record, self._of_parameters.source
        flops = dict.fromkeys(Phase, 0)
        for op in made.ops:
            flops[op.phase] += op.flops
        kept = {
            layer: record.kept_bytes[like] for layer, like in enumerate(source) if like in record.kept_bytes
        }
        last = record.num_layers - 1
        num_layers = max((layer + 1 for layer, like in enumerate(source) if like <= last), default=0)
        found = Record(
            made.parts, backward_begins_at, made.trace, made.ops, flops, kept, record.host_bytes, num_layers
        )
        return found, self._lengthened_parameters()

    def _lengthened_parameters(self) -> Parameters:
        numbers, of = self._of_parameters, self._parameters
        owned = []
        for given, layer in self._of_modules.lengthen(list(enumerate(of.owned))):
            module, members = given
            here = self._of_modules.split(module)[0]
            owned.append(tuple(sorted(self._moved(p, here, layer) for p in members)))
        return replace(
            of,
            elements=tuple(value for value, _ in numbers.lengthen(of.elements)),
            item_bytes=tuple(value for value, _ in numbers.lengthen(of.item_bytes)),
            trained=tuple(value for value, _ in numbers.lengthen(of.trained)),
            owned=tuple(owned),
        )

    def _moved(self, parameter: int, here: int | None, layer: int) -> int:
        """Return the number of `parameter` in the whole model, for a module of layer `here`, which is `layer` there."""
        own, inside = self._of_parameters.split(parameter)
        if own is None:
            return self._of_parameters.join(None, inside)
        if own != here:
            raise NotRepeated("a module has parameters of another layer")
        return self._of_parameters.join(layer, inside)


class _Assembly:
    """A record that grows piece by piece."""

    def __init__(self, of: Lengthening) -> None:
        self.parts: list[Part] = []
        self.trace = array("q")
        self.ops: list[OpCost] = []
        self._of = of
        self._bytes = (0, 0, 0)
        self._allocations = 0
        self._starts: dict[tuple[int | None, int], int] = {}  # allocations before the piece at a position

    def add(self, piece: _Piece, position: int, which: int | bool) -> None:
        """Add a piece at a position among the units. `which`: whether it is of backward; without a unit, its number."""
        at = None if piece.unit is None else position
        self._starts[at, which] = self._allocations
        numbers = [self._add_part(part, position) for part in piece.parts]
        own, allocations, trace = self._allocations, self._allocations, self.trace
        for entry in piece.trace:
            if entry[0] == 0:
                allocations += 1
                trace.extend((allocations, entry[1]))
            elif entry[0] == 1:
                trace.extend((own + entry[1], -1))
            elif entry[0] == 2:
                trace.extend((self._find(entry[1], entry[2], entry[3], position), -1))
            else:
                trace.extend((-1 - numbers[entry[1]], 0))
        self._allocations += piece.num_allocations
        self.ops += piece.ops
        self._bytes = tuple(a + b for a, b in zip(self._bytes, piece.change, strict=True))  # type: ignore[assignment]

    def _find(self, owner: tuple[bool, int] | None, piece: int, which: int, position: int) -> int:
        at = None if owner is None else self._of._layout.unit_at(*owner, position)
        return self._starts[at, piece] + which

    def _add_part(self, said: tuple[Any, ...], position: int) -> int:
        """Add a part and return its number; a mark is merged into the part before it."""
        cut, places, told = said
        at_cut, peak, *others = (self._hear(snapshot, position) for snapshot in told)
        of_place = dict(zip(places, others, strict=True))
        if cut is not Mark:
            self.parts.append(Part(self._hear_cut(cut, position), at_cut, peak, of_place))
            return len(self.parts) - 1
        last = self.parts[-1]
        if peak.total > last.peak.total:
            last.peak = peak
        for place, snapshot in of_place.items():
            if place not in last.of_place or snapshot.total > last.of_place[place].total:
                last.of_place[place] = snapshot
        return len(self.parts) - 1

    def _hear(self, said: tuple[Any, ...], position: int) -> Snapshot:
        kinds, where, is_nothing, phase, operation, module = said
        if is_nothing:
            return Snapshot(-1, (0, 0, 0), phase, None, operation, module)
        a, b, c = (size + base for size, base in zip(kinds, self._bytes, strict=True))
        layer = None if where is None else self._of._layout.layer_at(where, position)
        return Snapshot(a + b + c, (a, b, c), phase, layer, operation, module)

    def _hear_cut(self, said: Any, position: int) -> Any:
        if said is None:
            return None
        kind, number = said[:2]
        if kind is Ready:
            return Ready(self._number(self._of._of_parameters, number, position))
        pinned = frozenset(self._number(self._of._of_parameters, p, position) for p in said[3])
        return said[2]._replace(module=self._number(self._of._of_modules, number, position), pinned=pinned)

    def _number(self, numbers: _Numbers, said: tuple[_Reference | None, int], position: int) -> int:
        where, inside = said
        return numbers.join(None if where is None else self._of._layout.layer_at(where, position), inside)
