"""How a run ends: the export, the ledger, the final table; and what is still written of one that failed."""

from __future__ import annotations

from collections.abc import Mapping

from remat.config.units import format_size
from remat.machine import distributed
from remat.report import run_dir, summary
from remat.report.console import final_rows
from remat.saving import export
from remat.training import ledger, out_of_memory
from remat.training.run import Parts


def finish(parts: Parts, step: int, metrics: Mapping[str, float], *, finished: bool) -> None:
    """Export when the run reached its end; write the ledger; close the record; print the table."""
    parts.watchdog.enter("export", step)
    if finished and parts.cfg.save.export:
        _export(parts, step)
    distributed.barrier()  # no rank still reads its swap files when they are removed
    whole = distributed.max_min(parts.window.summary(), parts.world.device)
    lines = _write_ledger(parts, whole, finished=finished) if parts.proven else []
    parts.tracker.summarise(ledger.metrics(lines))
    parts.tracker.finish(0)
    how = "finished" if finished else f"stopped at step {step}, resumable with resume=auto"
    parts.console.final_table(
        f"{parts.cfg.name} {how}",
        final_rows(whole, dict(metrics) | parts.peaks, ledger.in_words(lines) | summary.files(parts.folder)),
    )


def failed(parts: Parts, error: BaseException) -> None:
    """What is known when a run fails: the allocator's history if memory ran out and `profile.memory` is on; the
    ledger, once there was a first step. No collectives; raises nothing."""
    if isinstance(error, out_of_memory.OutOfMemory) and (path := parts.profiler.out_of_memory()):
        parts.console.warning(f"the allocator's history: {path} (pytorch.org/memory_viz)")
    if not parts.proven:
        return
    try:
        _write_ledger(parts, {}, finished=False)
    except Exception as second:  # it would hide why the run failed
        parts.console.warning(f"no ledger: {type(second).__name__}: {second}")


def _export(parts: Parts, step: int) -> None:
    parts.console.progress(step, parts.cfg.train.steps, doing="exporting")
    with out_of_memory.named("export", parts.plan):
        result = export.export(
            parts.engine,
            parts.folder / "export",
            tokenizer=parts.tokenizer,
            max_shard_size=parts.cfg.save.max_shard_size,
        )
    parts.take_memory_peaks()
    parts.console.note(f"exported {result.path} ({format_size(result.bytes)}, {result.seconds:.1f} s)")


def _write_ledger(parts: Parts, whole: Mapping[str, float], *, finished: bool) -> list[ledger.Row]:
    if not parts.world.is_main:
        return []
    lines = ledger.rows(parts, whole)
    content = ledger.record(parts, lines, finished=finished)
    run_dir.write_json(parts.record_folder / "ledger.json", content)
    return lines
