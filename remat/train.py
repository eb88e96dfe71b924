"""Train: `deepspeed --module remat.train recipe=NAME [option=value ...]`, or `train.py` of a checkout.

Also runs under torchrun and as a single process. From Python, `run(["recipe=NAME", ...])` returns the `Outcome`, with
the last value of each metric: `outcome.metrics["loss/eval"]`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from remat.config.redact import redact_text
from remat.launch import exit_codes, signals
from remat.machine import allocator
from remat.machine.start_up import hide_gpus_from_cpu_ranks, share_cores, without_garbage

if TYPE_CHECKING:
    from remat.config.options import RunConfig
    from remat.training.loop import Outcome

SILENCE_S = 20  # longer than closing W&B may take on rank 0


def main(argv: list[str]) -> int:
    """Train as `argv` asks and return the exit code; print errors that have an exit code."""
    try:
        import remat.config.compose  # noqa: F401
    except ModuleNotFoundError as error:
        return fail(exit_codes.CONFIG, _lacking(error))
    try:
        outcome = run(argv)
    except Exception as error:
        return _failed(error)
    return 0 if outcome.finished else exit_codes.STOPPED


def run(argv: list[str]) -> Outcome:
    """Compose the config, build the run and train. Slow imports come after the checks that do without them.

    Raises ConfigError, DoesNotFit or OpError for what cannot run, and what `loop.train` raises.
    """
    share_cores()
    hide_gpus_from_cpu_ranks()
    from remat.config import compose, validation
    from remat.launch import retreat

    validation.check_environment(os.environ)
    composed = compose.from_command_line(argv)
    compose.check_launch(composed, int(os.environ.get("WORLD_SIZE", "1")))
    retreat.check(composed.run)
    _check_what_is_there(composed.run)
    allocator.settle(composed.run.allocator)
    from remat.report import console

    console.quiet_libraries(composed.run.log_level == "debug", os.environ.get("RANK", "0") == "0")
    with without_garbage():
        from remat.training import build, loop, lost_peer

    outcome = loop.train(build.build(composed))
    lost_peer.leave_together()
    return outcome


def _check_what_is_there(cfg: RunConfig) -> None:
    """Check on rank 0, without torch, that the saved state and the data files are there. Raises ConfigError.

    With several nodes this is checked once all ranks have joined, because the others would wait for this rank.
    """
    from remat.config import paths
    from remat.config.options import ConfigError
    from remat.data import first_look

    ranks = os.environ.get("WORLD_SIZE", "1")
    here = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or ranks
    if os.environ.get("RANK", "0") != "0" or here != ranks:
        return
    if problems := paths.state_problems(cfg) + first_look.file_problems(cfg.data, cfg.model):
        raise ConfigError("\n".join(problems))


def _failed(error: Exception) -> int:
    """Print the error and return its exit code. Raises an `error` that has none."""
    from remat.config.options import ConfigError

    if isinstance(error, ConfigError):
        return fail(exit_codes.CONFIG, error)
    from remat.machine import ops
    from remat.planning.preflight import DoesNotFit
    from remat.training import loop, out_of_memory

    if isinstance(error, (DoesNotFit, ops.OpError)):
        return fail(exit_codes.NOT_ABLE, error)
    if isinstance(error, loop.FAILURES):
        return fail(exit_codes.FAILED, error)
    if isinstance(error, out_of_memory.OutOfMemory):
        return out_of_memory.tell(error, exit_codes.FAILED)
    raise error


def _lacking(error: ModuleNotFoundError) -> Exception:
    """Return an error that says what to type when a library is missing. Raises `error` if the module is remat's."""
    activate = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "activate"
    remedy = f". {activate}" if activate.exists() else "make setup && . .venv/bin/activate"
    if (error.name or "remat").split(".")[0] == "remat":
        raise error
    return RuntimeError(f"{sys.executable} has no module {error.name}: type `{remedy}`, then the same again")


def fail(code: int, error: Exception) -> int:
    """Print why and return `code`.

    Ranks other than 0 first wait for rank 0 to print, unless it is lost: the launcher ends them once it has left.
    """
    if (rank := os.environ.get("RANK", "0")) != "0" and 0 not in getattr(error, "lost", []):
        signals.let_end()
        time.sleep(SILENCE_S)
    print(redact_text(f"\nremat{f' (rank {rank})' * (rank != '0')}: {error}\n"), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(signals.around(main, sys.argv[1:]))
