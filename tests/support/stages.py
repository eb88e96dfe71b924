"""Count what a stage of a pipeline holds: live bytes after each forward of a step."""

from __future__ import annotations

from typing import Any

from remat.parallel.pipeline_parallel import PipelineParallel
from tests.support.live_bytes import LiveBytes


def count_held(pipeline: PipelineParallel) -> list[list[int]]:
    """Return a list that gets one of live bytes for each pass of the schedule that `pipeline` makes from now on."""
    passes: list[list[int]] = []
    original = pipeline.train

    def train(*args: Any, forward_done: Any = lambda output: None, **how: Any) -> None:
        held: list[int] = []
        passes.append(held)
        with LiveBytes() as live:

            def note(output: Any) -> None:
                forward_done(output)
                held.append(live.live_bytes)

            original(*args, forward_done=note, **how)

    pipeline.train = train  # type: ignore[method-assign]
    return passes
