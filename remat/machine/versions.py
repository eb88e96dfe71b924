"""The oldest versions of the libraries that this code was checked against, line by line. Standard library only."""

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
    """(library, its version, what is wrong with it or "") for each floor."""
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
    """One line for each library below its floor; W&B is no reason not to train."""
    return [
        f"{name} {version}: {wrong}" for name, version, wrong in found(installed) if wrong and name != "wandb"
    ]


def numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cu130 -> (2, 13, 0); what follows a word (rc1, dev) does not count."""
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
