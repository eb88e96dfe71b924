"""Check that all ranks of a launch were started alike; say what a resume changes in its run.

The options, the code and the library versions are compared before any data is read.

A node that was started differently spoils the gradients of all ranks without an error. Or its tensors have another
size, and a collective fails far from the cause. Options that may differ from node to node are in MAY_DIFFER.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from remat.config import resumed
from remat.config.options import ConfigError, OptimConfig, RunConfig, Schedule
from remat.config.redact import redact
from remat.data.batches import steps_of
from remat.machine import distributed, peers
from remat.machine.peers import Peers, Wait
from remat.model import optimizer
from remat.report import run_dir
from remat.saving.manifest import SavedState

MAY_DIFFER = {  # folders on a node's own disks, and what its terminal shows
    "data.cache_dir",
    "hardware.nvme_path",
    "log_level",
}
VERSIONS = ("torch", "deepspeed", "transformers", "tokenizers", "peft", "numpy")
PACKAGE = Path(__file__).resolve().parents[1]
MOST_LINES = 12
SHOWN = 80  # characters of a value
REMEDIES = {
    "options": "give every node the same command line, and the same files that it names",
    "code": "check out the same commit on every node, or share one folder",
    "versions": "install requirements.lock on every node, or share one environment",
    "ranks": "start every node with the same number of ranks, nodes and devices",
}


@dataclass(frozen=True)
class Verdict:
    """The findings of rank 0.

    `hosts` are by rank, `addresses` those of ranks towards rank 0. `problem` says why the launch is refused, if it is.
    """

    hosts: list[str]
    addresses: list[str]
    problem: str | None


def join(
    cfg: RunConfig, rendered: Mapping[str, Any], fields: Mapping[str, Any], say: Callable[[str], None]
) -> Peers | None:
    """Wait for all ranks, compare how they were started, and choose gloo's network interface if needed. Collective.

    Returns None for a single process. `rendered` is the DeepSpeed config, `fields` the model's. Raises
    ConfigError on every rank with the same words, LostPeer when ranks do not come within
    train.deadlines.build_s.
    """
    wait = Wait(cfg.train.deadlines.build_s, f"train.deadlines.build_s={cfg.train.deadlines.build_s:g}", say)
    found = peers.connect(wait)
    if found is None:
        return None
    mine = collect_facts(cfg, rendered, fields)
    verdict = Verdict(**found.agree("facts", mine, lambda everyone: asdict(judge(everyone)), wait))
    found.hosts, problem = verdict.hosts, verdict.problem
    if problem is None:
        interface, own = distributed.choose_interface(verdict.addresses, os.environ)
        problem = found.agree("network", {"problem": own}, lambda e: _network(e, verdict.hosts), wait)
        if interface:
            os.environ[distributed.INTERFACE] = interface
    if problem:
        found.refuse_together()
        raise ConfigError(problem)
    return found


def collect_facts(cfg: RunConfig, rendered: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's host and address and, by kind, {name: (digest of the value, text that may be shown)}."""
    options = _shown(asdict(cfg))
    # contents of files beside the options; nvme_path may differ here as in MAY_DIFFER
    options |= {f"deepspeed.config: {k}": v for k, v in _shown(rendered).items() if "nvme_path" not in k}
    options |= {f"model config: {k}": v for k, v in _shown(fields).items()}
    size, device = str(distributed.world_size_from_env()), "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "host": socket.gethostname(),
        "address": distributed.own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        "options": {name: told for name, told in options.items() if name not in MAY_DIFFER},
        "code": {key: (value, value) for key, value in digest_code().items()},
        "commit": run_dir.commit(),
        "versions": {key: (value, value) for key, value in _versions().items()},
        "ranks": {"ranks": (size, size), "device": (device, device)},
    }


def judge(everyone: list[dict[str, Any]]) -> Verdict:
    """Compare every rank with rank 0."""
    hosts = [each["host"] for each in everyone]
    addresses = [each["address"] for each in everyone if each["address"]]
    lines: list[str] = []
    for kind, remedy in REMEDIES.items():
        differ = _differences(everyone, kind)
        if not differ:
            continue
        if kind == "code":
            commits = sorted({str(each["commit"]) for each in everyone})
            differ = [f"files of remat: {line}" for line in differ] + [f"commits: {', '.join(commits)}"]
        more = [f"and {len(differ) - MOST_LINES} more"] if len(differ) > MOST_LINES else []
        lines += [f"  {line}" for line in [*differ[:MOST_LINES], *more]] + [f"  remedy: {remedy}"]
    text = "\n".join(["the ranks were not started alike:", *lines]) if lines else None
    return Verdict(hosts, addresses, text)


def _differences(everyone: list[dict[str, Any]], kind: str) -> list[str]:
    """Return a line for each name that differs.

    Example: `train.seq_len=32 on node-2 (rank 1), 64 on node-1 (rank 0)`.
    """
    first, lines = everyone[0][kind], []
    others: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(everyone):
        if each[kind] == first:
            continue
        for name in first.keys() | each[kind].keys():
            value = each[kind].get(name, ("", "nothing"))
            if list(value) != list(first.get(name, ("", "nothing"))):
                others.setdefault((name, str(value[1])), []).append(rank)
    for (name, shown), ranks in sorted(others.items()):
        was = first.get(name, ("", "nothing"))[1]
        who = f"{everyone[ranks[0]]['host']} (rank {', '.join(map(str, ranks[:8]))}{' ...' * (len(ranks) > 8)})"
        secret = " (what may be shown of it is the same)" * (shown == was)
        lines.append(f"{name}={shown} on {who}, {was} on {everyone[0]['host']} (rank 0){secret}")
    return lines


def _network(everyone: list[dict[str, Any]], hosts: list[str]) -> str:
    """Return the problems of all ranks with their network interfaces; "" without any."""
    problems = [
        f"rank {rank} on {hosts[rank]}: {each['problem']}"
        for rank, each in enumerate(everyone)
        if each["problem"]
    ]
    return "\n".join(problems[:MOST_LINES])


def digest_code(folder: Path = PACKAGE) -> dict[str, str]:
    """Return a digest of each source file of the package by its name.

    The commit alone is not enough: it may be missing, or files of the checkout changed.
    """
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted(folder.rglob("*.py"))
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _shown(values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return (digest, what may be shown) of each leaf by its dotted name."""
    may_show = resumed.flat(redact(values))
    found = {}
    for name, value in resumed.flat(values).items():
        digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
        text = may_show.get(name, "***")
        text = text if isinstance(text, str) else json.dumps(text, default=str)
        found[name] = digest, text[:SHOWN] + "..." * (len(text) > SHOWN)
    return found


BITS = "it changes what training computes from here on, not only where things live"
OF_STEPS = ("train.steps", "train.epochs", "train.global_batch_size")  # how many steps a run has
EFFECTS = {  # beginning of an option's name -> what a change of the option does
    "train.precision": "a state of another precision cannot be loaded",
    "train.micro_batch_size": "accumulation follows; sums are taken in another order",
    "train.loss": "the same loss, in another order of sums",
    "optim.": BITS,
    "peft.": BITS,
    "model.": BITS,
    "data.": BITS,
    "deepspeed.": "where states live; the ZeRO stage must stay",
    "checkpointing.": "memory and speed, not the losses",
}


def describe_changes(state: SavedState, asked: RunConfig, cfg: RunConfig, blocks: int) -> list[str]:
    """Return a line for each option that differs from the launch which wrote `state`, and one for the learning rate.

    `asked` has the options as given, like the record of that launch. `cfg` also has values that follow from the data,
    such as the steps for `blocks` blocks. Returns [] when nothing differs, or when the run has no configuration to
    compare with.
    """
    try:
        before = resumed.read_config(resumed.find_config(state.path))
    except ConfigError:
        return []
    changed = resumed.changes(before, asdict(asked))
    lines = [
        f"changed: {name}: {_option_value(old)} -> {_option_value(new)}{_effect(name)}"
        for name, old, new in changed
    ]
    if any(name in OF_STEPS or name.startswith("optim.") for name, _, _ in changed):
        lines += _learning_rate(before, cfg, state.step, blocks)
    return lines


def _steps(train: Mapping[str, Any], blocks: int) -> int:
    """Return the steps of a launch from its recorded options; epochs are converted to steps for `blocks` blocks."""
    if train["epochs"] is None:
        return int(train["steps"])
    return steps_of(train["epochs"], blocks, train["global_batch_size"])


def _effect(name: str) -> str:
    text = next((text for start, text in EFFECTS.items() if name.startswith(start)), "")
    return f" ({text})" if text else ""


def _option_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "nothing" if value is None else str(value)


def _learning_rate(before: Mapping[str, Any], cfg: RunConfig, step: int, blocks: int) -> list[str]:
    """Return the learning rate of the next step under both schedules; `step` counts those that are done."""
    known = {item.name for item in fields(OptimConfig)}
    options = {name: value for name, value in before.get("optim", {}).items() if name in known}
    try:
        if "schedule" in options:
            options["schedule"] = Schedule(options["schedule"])
        old_steps = _steps(before["train"], blocks)
        old = optimizer.lr_at(step, OptimConfig(**options), old_steps)
    except (KeyError, TypeError, ValueError):  # a configuration of another version
        return []
    assert cfg.train.steps is not None, "the data is open, so the steps are known"
    new = optimizer.lr_at(step, cfg.optim, cfg.train.steps)
    if old == new:
        return [f"lr at step {step + 1}: {new:.3g}, as before"]
    longer = old_steps != cfg.train.steps and cfg.optim.schedule is not Schedule.constant
    why = f" (optim.schedule={cfg.optim.schedule} spans train.steps={cfg.train.steps})" if longer else ""
    return [f"lr at step {step + 1}: {old:.3g} -> {new:.3g}{why}"]
