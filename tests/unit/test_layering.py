"""The rules of the house: which module may import which, how long functions may grow, what is banned."""

from __future__ import annotations

import ast
import functools
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
        "cores",
        "host_memory",
        "owner_lock",
        "rank_keeper",
        "stop_signals",
        "redact",
        "versions",
        "network",
        "file_systems",
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
        "safe_load",
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
        "peers",
        "shared_folder",
    },
    {
        "flops",
        "node",
        "same_launch",
        "lost_peer",
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
        "swapping",
        "trainer",
        "doctor",
        "report",
        "compare_policies",
        "lab",
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
EVERYWHERE_IN_L2 = {"distributed", "op_flops", "rng", "peers"}
ONE_ROOM = [
    {
        "saving",
        "unfinished",
        "reload",
        "save_room",
        "saved_weights",
        "safe_load",
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


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    """Top-level names of all imports; `remat.x` for our own, at any depth of the file."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
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


def wrong_imports(path: Path, here: str) -> list[str]:
    """What is wrong with the imports of `path` in room `here`."""
    found = []
    for target in sorted(own(path) - {here, "__version__"}):
        same_room = any({here, target} <= group for group in ONE_ROOM)
        if level(here) == 2 and level(target) == 2:
            if target not in EVERYWHERE_IN_L2 and not same_room:
                found.append(f"{path.relative_to(ROOT)} imports its sibling remat.{target}")
        elif level(target) > level(here):
            found.append(f"{path.relative_to(ROOT)} (L{level(here)}) imports remat.{target} above it")
    return found


def test_imports_point_downwards() -> None:
    rooms = {path: room(path) for path in FILES if room(path) != "__init__"}
    assert len(rooms) > 100
    assert [line for path, here in rooms.items() for line in wrong_imports(path, here)] == []


def test_an_import_upwards_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "memory.py"
    path.write_text("def f():\n    from remat import trainer, loss, distributed\n")
    assert [line.split(" imports ")[1] for line in wrong_imports(path, "memory")] == [
        "its sibling remat.loss",
        "remat.trainer above it",
    ]


def test_lowest_level_is_standard_library_only() -> None:
    lowest = [p for p in FILES if room(p) != "__init__" and level(room(p)) == 0]
    assert lowest
    found = {path.name: {name.split(".")[0] for name in imports(path)} & STDLIB_ONLY_BANNED for path in lowest}
    assert {name: libraries for name, libraries in found.items() if libraries} == {}


def test_one_importer_of_hydra_and_one_of_wandb() -> None:
    for library, owner in (("hydra", {"compose"}), ("omegaconf", {"compose"}), ("wandb", {"tracking"})):
        users = {room(p) for p in FILES if any(n.split(".")[0] == library for n in imports(p))}
        assert users == owner, f"{library} is imported by {users}"


def test_functions_stay_small() -> None:
    functions = [
        (path, node)
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert len(functions) > 500
    lengths = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, node in functions
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_train_py_is_short() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 60


def test_no_todo_and_ascii_only() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
    assert [name for name, text in texts.items() if not text.isascii()] == []
    assert [name for name, text in texts.items() if re.search(r"\b(TODO|FIXME|XXX)\b", text)] == []
