"""The oldest versions of the libraries that this code was checked against. Standard library only."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

FLOORS = {
    "torch": "2.11",
    "deepspeed": "0.19.8",
    "transformers": "5.23",
    "hydra-core": "1.3.2",
    "wandb": "0.31",
}
REMEDY = "pip install -r requirements.lock"


def found(
    installed: Callable[[str], str] = importlib.metadata.version,
) -> list[tuple[str, str, str]]:
    """Return (library, installed version, problem or "") for each library in FLOORS."""
    lines = []
    for name, floor in FLOORS.items():
        try:
            version = installed(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append((name, "not installed", f"needs {floor} or newer: {REMEDY}"))
            continue
        old = numbers(version) < numbers(floor)
        lines.append((name, version, f"needs {floor} or newer: {REMEDY}" if old else ""))
    return lines


def too_old(installed: Callable[[str], str] = importlib.metadata.version) -> list[str]:
    """Return one line for each library below its floor. W&B is left out: training works without it."""
    return [
        f"{name} {version}: {wrong}" for name, version, wrong in found(installed) if wrong and name != "wandb"
    ]


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers: 2.13.0+cu130 -> (2, 13, 0). Parts that are not numbers (0rc1, dev) are left out."""
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
