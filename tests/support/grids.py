"""Grids of which `make test` runs a sample: what is left to `make test-all`, and what a shared launch has to run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(names: Iterable[str], rest: Collection[str]) -> list[Any]:
    """The parameters `names`, those of `rest` for `make test-all` alone."""
    return [pytest.param(name, marks=pytest.mark.exhaustive) if name in rest else name for name in names]


def chosen(request: pytest.FixtureRequest, parameter: str = "name") -> set[Any]:
    """The values of `parameter` that the chosen tests of this file have: a fixture launches no others."""
    items = [item for item in request.session.items if item.path == request.node.path]
    calls = [item.callspec for item in items if hasattr(item, "callspec")]
    return {call.params[parameter] for call in calls if parameter in call.params}
