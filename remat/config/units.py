"""Sizes in bytes, and how they and counts are written. GiB is 1024**3 bytes, GB is 1e9."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB = 1e9


def format_size(size_bytes: float) -> str:
    """Write a size in the largest unit it fills: `13.2 GiB`, `15.3 MiB`, `0.4 KiB`."""
    unit, one = ("GiB", GIB) if size_bytes >= GIB else ("MiB", MIB) if size_bytes >= MIB else ("KiB", KIB)
    return f"{size_bytes / one:,.1f} {unit}"


def format_count(count: int, noun: str) -> str:
    """Write a count with its noun: `1 rank`, `3 ranks`."""
    return f"{count} {noun}{'s' * (count != 1)}"
