"""Train: `deepspeed train.py recipe=NAME [option=value ...]`. Also runs under torchrun and as a single process."""

from __future__ import annotations

import os
import sys
import time

from remat import stop_signals
from remat.cores import hide_gpus_from_cpu_ranks, share_cores
from remat.redact import redact_text

EXIT_CONFIG, EXIT_NOT_ABLE, EXIT_FAILED, EXIT_STOPPED = 2, 3, 70, 75
SILENCE_S = 20  # longer than closing W&B may take on rank 0


def main(argv: list[str]) -> int:
    """Compose, build, train. Returns the exit code; imports grow heavier as the arguments prove right."""
    share_cores()
    hide_gpus_from_cpu_ranks()
    from remat import checks, compose
    from remat.config import ConfigError

    try:
        checks.check_environment(os.environ)
        composed = compose.from_command_line(argv)
    except ConfigError as error:
        return fail(EXIT_CONFIG, error)
    from remat import console

    console.quiet_libraries(composed.run.log_level == "debug", os.environ.get("RANK", "0") == "0")
    from remat import lost_peer, ops, out_of_memory, setup, trainer
    from remat.preflight import DoesNotFit

    try:
        outcome = trainer.train(setup.build(composed.run, composed.yaml, composed.words))
        lost_peer.leave_together()
    except ConfigError as error:
        return fail(EXIT_CONFIG, error)
    except (DoesNotFit, ops.OpError) as error:
        return fail(EXIT_NOT_ABLE, error)
    except trainer.FAILURES as error:
        return fail(EXIT_FAILED, error)
    except out_of_memory.OutOfMemory as error:
        return out_of_memory.tell(error, EXIT_FAILED)
    return 0 if outcome.finished else EXIT_STOPPED


def fail(code: int, error: Exception) -> int:
    """Rank 0 says why; the others wait, for the launcher ends all once one has left, and speak if rank 0 is well."""
    if (rank := os.environ.get("RANK", "0")) != "0" and 0 not in getattr(error, "lost", []):
        stop_signals.let_end()
        time.sleep(SILENCE_S)
    print(redact_text(f"\nremat{f' (rank {rank})' * (rank != '0')}: {error}\n"), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(stop_signals.around(main, sys.argv[1:]))
