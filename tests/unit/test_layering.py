"""The rules of the house: which module may import which, how long functions may grow, what is banned."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "remat"
FILES = [*sorted(PACKAGE.rglob("*.py")), ROOT / "train.py"]
MAX_FUNCTION_LINES = 60

LEVELS = [
    {
        "config",
        "choices",
        "checks",
        "hardware",
        "ds_config",
        "ds_keys",
        "ds_problems",
        "flops",
        "cores",
        "host_memory",
        "rank_keeper",
        "stop_signals",
        "redact",
        "versions",
    },
    {"compose"},
    {
        "distributed",
        "memory",
        "throughput",
        "tracking",
        "console",
        "loss",
        "optim",
        "data",
        "model",
        "small_copy",
        "ops",
        "run_dir",
        "saving",
        "unfinished",
        "reload",
        "save_room",
        "saved_weights",
        "reshard",
        "manifest",
        "export",
        "hf_files",
        "rng",
        "op_flops",
        "frozen",
        "adapter_files",
        "lora",
        "qlora",
        "nvme_state",
        "placement",
        "activation_checkpointing",
        "tensor_parallel",
        "planning",
        "held",
        "stopping",
        "watchdog",
    },
    {
        "node",
        "profiling",
        "nvml",
        "snapshots",
        "preflight",
        "launch_plan",
        "supervise",
        "processes",
        "launch_words",
        "launch_report",
        "out_of_memory",
        "packing",
        "packed_inputs",
        "parts",
        "resuming",
        "setup",
        "evaluation",
        "run_saves",
        "rehearsal",
        "ledger",
        "ending",
        "nonfinite",
        "proof",
        "strategy",
        "summary",
        "trainer",
        "doctor",
        "report",
        "compare_policies",
        "lab",
        "claims",
        "planner",
        "recordings",
        "screening",
        "advice",
        "advice_options",
        "sweep",
        "plan_charts",
        "plan_page",
        "calibrate",
        "report_page",
        "report_charts",
        "report_snapshots",
    },
    {"train", "cli"},
]
EVERYWHERE_IN_L2 = {"distributed", "op_flops", "rng"}
ONE_ROOM = [
    {
        "saving",
        "unfinished",
        "reload",
        "save_room",
        "saved_weights",
        "reshard",
        "manifest",
        "export",
        "hf_files",
        "adapter_files",
        "rng",
        "frozen",
        "nvme_state",
    },
]
STDLIB_ONLY_BANNED = {"torch", "hydra", "omegaconf", "transformers", "deepspeed", "numpy", "wandb", "rich"}


def room(path: Path) -> str:
    """`remat/data/cache.py` -> data, `remat/model.py` -> model."""
    if path == ROOT / "train.py":
        return "train"
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def level(name: str) -> int:
    found = [index for index, names in enumerate(LEVELS) if name in names]
    assert found, f"remat/{name} has no level: add it to LEVELS in this test and to docs"
    return found[0]


def imports(path: Path) -> set[str]:
    """Top-level names of all imports; `remat.x` for our own, at any depth of the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "remat":
                names |= {f"remat.{alias.name}" for alias in node.names}
            else:
                names.add(node.module)
    return names


def own(path: Path) -> set[str]:
    return {
        name.split(".")[1]
        for name in imports(path)
        if name.startswith("remat.") and name != "remat.__version__"
    }


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return
    for target in own(path) - {here, "__version__"}:
        same_room = any({here, target} <= group for group in ONE_ROOM)
        if level(here) == 2 and level(target) == 2:
            assert target in EVERYWHERE_IN_L2 or same_room, f"{path.name} imports its sibling remat.{target}"
        else:
            assert level(target) <= level(here), f"{path.name} (L{level(here)}) imports remat.{target} above it"


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p) != "__init__" and level(room(p)) == 0], ids=lambda p: p.name
)
def test_lowest_level_is_standard_library_only(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & STDLIB_ONLY_BANNED


def test_one_importer_of_hydra_and_one_of_wandb() -> None:
    for library, owner in (("hydra", {"compose"}), ("omegaconf", {"compose"}), ("wandb", {"tracking"})):
        users = {room(p) for p in FILES if any(n.split(".")[0] == library for n in imports(p))}
        assert users == owner, f"{library} is imported by {users}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_stay_small(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path.name}: {node.name} has {length} lines"


def test_train_py_is_short() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_todo_and_ascii_only(path: Path) -> None:
    text = path.read_text()
    assert text.isascii()
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
