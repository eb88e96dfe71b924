"""What really happened in each layer since the last reset, and where the computation is right now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

PLACE = "remat_place"  # of an exception that left a layer: (layer, recomputing)


class NotInEffect(RuntimeError):
    """A policy promised something that did not happen; the text names the option and the cause."""


@dataclass
class Counts:
    """Of one layer. `expected` and `recomputations` are calls of its recomputed regions (the layer, its modules)."""

    forwards: int = 0
    expected: int = 0
    recomputations: int = 0
    abandoned: int = 0  # calls of micro-batches before this one that backward never came to
    kept_outputs: int = 0  # results that a selective policy stored
    reused_outputs: int = 0  # and handed back in the recomputation
    kept_linears: dict[str, int] = field(default_factory=dict)  # stored results of each named Linear that ran
    discarded_bytes: int = 0
    moved_bytes: int = 0  # to host memory
    partitioned_bytes: int = 0  # given to the other ranks of a tensor-parallel group
    contiguous_bytes: int = 0  # kept in DeepSpeed's list of buffers
    output_bytes: int = 0  # of the layer's own result, in its last forward

    def clear(self) -> None:
        fresh = Counts()
        for item in fields(self):
            setattr(self, item.name, getattr(fresh, item.name))


class Scope:
    """Which layer runs, and whether it runs for the second time."""

    def __init__(self) -> None:
        self.layer: int | None = None
        self.recomputing = False
        self.keeping = False  # no policy may act: a layer is run as it is without one

    @contextmanager
    def inside(self, layer: int, *, recomputing: bool = False) -> Iterator[None]:
        before = self.layer, self.recomputing
        self.layer, self.recomputing = layer, self.recomputing or recomputing
        try:
            yield
        except Exception as error:
            if not hasattr(error, PLACE):
                setattr(error, PLACE, (self.layer, self.recomputing))
            raise
        finally:
            self.layer, self.recomputing = before
