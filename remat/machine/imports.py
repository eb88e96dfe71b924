"""Import what is heavy, faster. Standard library only."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage() -> Iterator[None]:
    """Look for no garbage while modules are imported, and never again among what they made.

    All of it stays, and looking through it again and again costs a sixth of the CPU time of the imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
