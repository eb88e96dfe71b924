"""Chats of varied lengths from real text: sentences of the standard library's documentation, in jsonl."""

from __future__ import annotations

import ast
import inspect
import json
import sysconfig
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np

MODULES = ("argparse", "datetime", "difflib", "heapq", "inspect", "random", "statistics", "string", "textwrap")
MEAN_LOG, SPREAD = 4.2, 0.8  # of a chat's length: 92 on average, one in a hundred above 430


def words() -> list[str]:
    """The words of the docstrings of a few modules, in order."""
    found: list[str] = []
    for name in MODULES:
        tree = ast.parse((Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text())
        nodes = [
            node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        ]
        for node in nodes:
            found += inspect.cleandoc(ast.get_docstring(node) or "").split()
    return found


def lengths(count: int, seed: int = 0) -> np.ndarray:
    """Lengths of chats, int [count]: log-normal, as people's are."""
    draw = np.random.Generator(np.random.PCG64(seed))
    return np.maximum(12, np.round(np.exp(draw.normal(MEAN_LOG, SPREAD, count)))).astype(int)


def chats(count: int, seed: int = 0) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Question and answer, of as many characters together as `lengths` says, but for a word."""
    text = cycle(words())
    for length in lengths(count, seed):
        said: list[str] = []
        while sum(map(len, said)) + len(said) < length:
            said.append(next(text))
        question = max(1, len(said) // 4)
        parts = {"user": said[:question], "assistant": said[question:] or ["yes"]}
        yield {"messages": [{"role": role, "content": " ".join(part)} for role, part in parts.items()]}


def make_chats(path: Path, count: int = 2000) -> Path:
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats(count)))
    return path
