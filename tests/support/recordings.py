"""Runs that one process makes one after another share what their plans record, as the plans of a search do."""

from __future__ import annotations

from remat.planning import plan


def share() -> None:
    """Have every later plan of this process that brings no recordings of its own use the same."""
    known = plan.Recordings()
    plan.Recordings = lambda: known  # type: ignore[assignment,misc]
