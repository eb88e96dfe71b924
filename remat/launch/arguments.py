"""Parse the command line of `remat launch`: its options, the `deepspeed` runner's, the script and its arguments."""

from __future__ import annotations

import base64
import difflib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from remat.config import paths
from remat.config.options import ConfigError

RUNNER_FLAGS = {
    "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--bind_cores_to_rank", "-q", "--quiet",
    "--no_local_rank", "-h", "--help",
}  # fmt: skip
RUNNER_VALUES = {
    "-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators",
    "--master_port", "--master_addr", "--node_rank", "--launcher", "--launcher_args", "--bind_core_list",
    "--ssh_port", "--venv_script", "--log_level",
}  # fmt: skip
RANKS_OF_A_NODE = ("--num_gpus", "--num_accelerators")
OF_NODE_LAUNCHER = {
    *RANKS_OF_A_NODE, "--master_port", "--no_local_rank", "-q", "--quiet", "--log_level",
    "--bind_cores_to_rank", "--bind_core_list",
}  # fmt: skip
KINDS = {"--module": "module", "--no_python": "program"}
OWN = {"--log-dir", "--grace-s"}
# options of remat.train: the first of them ends the options of remat launch
OF_TRAINING = {"--config-dir", "-cd", "--cfg", "-c", "--version"}
REFUSED = {
    "--enable_each_rank_log": "remat launch keeps a log of every rank: say --log-dir DIR",
    "--autotuning": "DeepSpeed's autotuner starts launches of its own: call deepspeed itself",
}
OWN_MODULE, OWN_SCRIPT = "remat.train", Path(__file__).resolve().parents[2] / "train.py"
USUAL_HOSTFILE = Path("/job/hostfile")  # the deepspeed runner reads it by default
GRACE_S = 600.0  # time for the save of a large state to a shared disk


@dataclass(frozen=True)
class LaunchWords:
    """A parsed command line. `runner` holds the options of the deepspeed runner.

    Each rank runs `target`, whose `kind` is script, module or program, with the arguments `words`.
    """

    runner: list[str]
    kind: str
    target: str
    words: list[str]
    log_dir: Path
    grace_s: float

    @property
    def kind_flag(self) -> list[str]:
        """Return the option that says what `target` is; a script needs none."""
        return [flag for flag, kind in KINDS.items() if kind == self.kind]

    def runner_has(self, *names: str) -> bool:
        return any(word.split("=")[0] in names for word in self.runner)

    @property
    def over_ssh(self) -> bool:
        """Return whether the runner starts the ranks through pdsh or MPI, so that no keeper can start them."""
        return self.runner_has("--force_multi", "--launcher")

    @property
    def of_all_nodes(self) -> bool:
        """Return whether this launch starts a supervisor on each node of a hostfile."""
        return self.runner_has("-H", "--hostfile") and not self.runner_has("--no_ssh") and not self.over_ssh

    @property
    def on_one_node(self) -> bool:
        """Return whether all ranks run on this node, under this supervisor alone."""
        elsewhere = self.runner_has("-H", "--hostfile", "--num_nodes", "--node_rank", "--force_multi")
        return not elsewhere and not USUAL_HOSTFILE.exists()

    @property
    def trains(self) -> bool:
        """Return whether the ranks run this package's own training."""
        if self.kind == "module":
            return self.target == OWN_MODULE
        return self.kind == "script" and Path(self.target).resolve() == OWN_SCRIPT

    @property
    def ranks(self) -> int | None:
        """Return the number of ranks; None when only the runner can determine it."""
        given = [count for name, count in pairwise(self.runner) if name in RANKS_OF_A_NODE]
        if not self.on_one_node or self.runner_has("-i", "--include") or not given:
            return None
        return int(given[-1]) if given[-1].isdigit() and int(given[-1]) else None

    @property
    def needs_no_runner(self) -> bool:
        """Return whether the number of ranks is known, and DeepSpeed's node launcher takes all options."""
        if os.environ.get("CUDA_VISIBLE_DEVICES"):  # the runner says that it ignores these
            return False
        return (
            self.ranks is not None
            and {word for word in self.runner if word.startswith("-")} <= OF_NODE_LAUNCHER
        )

    @property
    def asks_help(self) -> bool:
        return self.runner_has("-h", "--help")


def parse(argv: list[str]) -> LaunchWords:
    """Parse a command line. Options come before the script, which is remat.train by default. Raises ConfigError."""
    runner: list[str] = []
    own: dict[str, str] = {}
    kind = "script"
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if name in OF_TRAINING:
            rest.insert(0, word)
            break
        if name in KINDS:
            kind = KINDS[name]
        elif name in RUNNER_FLAGS:
            runner.append(word)
        elif name in OWN | RUNNER_VALUES:
            if not value and ("=" in word or not rest):  # else an empty variable of a shell takes the next word
                raise ConfigError(f"{name} needs a value")
            value = value or rest.pop(0)
            if name in OWN:
                own[name] = value
            else:
                runner += [name, value]
        else:
            raise ConfigError(_unknown(name))
    if kind == "script" and (not rest or rest[0][:1] == "-" or ("=" in rest[0] and not Path(rest[0]).exists())):
        kind, rest = "module", [OWN_MODULE, *rest]
    if not rest:
        raise ConfigError(f"remat launch: which {kind}? Say its name after the options")
    if kind == "script" and not (rest[0] and Path(rest[0]).exists()):
        raise ConfigError(
            f"{rest[0] or 'an empty word'}: no such script; remat launch [options] [train.py] recipe=NAME option=value "
            "..."
        )
    try:
        grace_s = float(own.get("--grace-s", GRACE_S))
    except ValueError:
        raise ConfigError(f"--grace-s {own['--grace-s']} is not a number of seconds") from None
    log_dir = own.get("--log-dir") or f"outputs/logs/{time.strftime('%Y%m%d-%H%M%S')}"
    return LaunchWords(runner, kind, rest[0], rest[1:], paths.expand(log_dir).absolute(), grace_s)


def launcher(words: LaunchWords, asked: list[str]) -> list[str]:
    """Return the module of DeepSpeed's launcher that starts these ranks, and its arguments, given the runner's.

    On one node the runner only starts the node launcher, for which it imports DeepSpeed once more.
    """
    if not words.needs_no_runner:
        return ["deepspeed.launcher.runner", *asked]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(words.ranks or 0))}).encode()).decode()
    return ["deepspeed.launcher.launch", f"--world_info={world}", *without(asked, RANKS_OF_A_NODE)]


def without(options: list[str], names: Iterable[str]) -> list[str]:
    """Return the runner's options without those of `names`, which have values."""
    kept = list(options)
    for name in names:
        while name in kept:
            at = kept.index(name)
            del kept[at : at + 2]
    return kept


def _unknown(name: str) -> str:
    if name in REFUSED:
        return f"{name}: {REFUSED[name]}"
    close = difflib.get_close_matches(
        name.replace("-", "_"), {w.replace("-", "_") for w in OWN} | RUNNER_VALUES
    )
    hint = f": did you mean {close[0]}?" if close else "."
    return f"{name} is no option of remat launch or of the deepspeed runner{hint} The script's options follow its name"
