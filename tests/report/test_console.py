"""What is printed, in a log file and on a terminal of 80 and 120 columns."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing

import pytest

from remat.report import console
from remat.report.console import Console, final_rows, quiet_libraries

ROW = {
    "loss/train": 3.21456,
    "optim/lr": 3e-4,
    "optim/grad_norm": 0.857,
    "throughput/tokens_per_s": 45_210.0,
    "time/step_s": 2.0,
    "time/data_s": 0.02,
    "time/forward_s": 0.5,
    "time/backward_s": 1.0,
    "time/optimizer_s": 0.4,
    "memory/host_rss_gib": 1.434,
}
GPU_ROW = ROW | {"memory/gpu_allocated_peak_gib": 61.2, "memory/host_rss_gib": 104.2, "throughput/mfu": 0.412}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def full_run(out: Console, row: dict[str, float] = ROW) -> None:
    with closing(out):
        out.header("remat tiny", {"model": "llama, 6 layers", "run": "outputs/tiny/" + "x" * 90})
        for step in range(1, 26):
            out.progress(step, 500)
            out.line(step, 500, row)
        out.eval_line(25, 3.0, 12.4)
        out.note("saved step-000025")
        out.warning("careful")
        out.final_table("finished", {"tokens/s": "45,210"})


def test_log_file_has_plain_short_lines() -> None:
    file = io.StringIO()
    full_run(Console(True, file=file))
    text = file.getvalue()
    assert not CONTROL.search(text)
    assert text.isascii()
    table = [line for line in text.splitlines() if "/500" in line or "tok/s" in line]
    assert len(table) == 25 + 2  # the heading comes back after 20 lines
    assert all(len(line) <= 80 for line in table)
    heading, row = (" ".join(line.split()) for line in table[:2])
    assert heading == "step loss lr grad tok/s s/step data fwd bwd opt RSS GiB left"
    assert row == "1/500 3.2146 3.0e-4 0.857 45.21k 2.00 1% 25% 50% 20% 1.43 0:16:38"
    assert "eval at step 25: loss 3.0000, perplexity 20.09 in 12.4 s" in text
    assert "warning: careful" in text


def test_gpu_memory_takes_the_place_of_host_memory_in_80_columns() -> None:
    file = io.StringIO()
    Console(True, file=file).line(1, 500, GPU_ROW)
    heading, row = file.getvalue().splitlines()
    assert "GPU GiB" in heading
    assert "RSS" not in heading
    assert "61.20" in row


def test_long_runs_still_fit_80_columns() -> None:
    file = io.StringIO()
    Console(True, file=file).line(100_000, 1_000_000, GPU_ROW | {"throughput/tokens_per_s": 1.5e6})
    heading, row = file.getvalue().splitlines()
    assert max(len(heading), len(row)) <= 80
    assert row.split()[0] == "100000"
    assert "1.50M" in row
    assert row.split()[-1] == "20d20h"


def test_absent_and_broken_figures_are_shown_as_such() -> None:
    file = io.StringIO()
    Console(True, file=file).line(3, 10, {"loss/train": math.nan})
    row = file.getvalue().splitlines()[1].split()
    assert row == ["3/10", "nan", "-", "-", "-", "-", "-"]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    full_run(Console(False, file=file))
    assert file.getvalue() == ""
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("columns", [80, 120])
def test_terminal_lines_fit(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    full_run(Console(True, file=terminal), GPU_ROW)
    text = plain(terminal.getvalue())
    assert all(len(line) <= columns for line in re.split(r"[\r\n]", text))
    assert "model" in text
    assert "45,210" in text
    assert ("MFU" in text) == (columns == 120)


def test_terminal_has_a_bar_with_the_time_left_and_gives_the_cursor_back(terminal: Terminal) -> None:
    out = Console(True, file=terminal)
    with closing(out):
        out.progress(10, 20)
        out.line(10, 20, ROW)
        out.progress(11, 20, doing="evaluating")
    text = terminal.getvalue()
    assert re.search(r"evaluating .* 11/20 55% .*0:00:(19|20) left", plain(text))
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_bar_goes_away_when_training_raises(terminal: Terminal) -> None:
    before = sys.stdout
    with pytest.raises(ZeroDivisionError), closing(Console(True, file=terminal)) as out:
        out.progress(1, 2)
        raise ZeroDivisionError
    assert "\x1b[?25h" in terminal.getvalue()
    assert sys.stdout is before


def test_text_is_never_read_as_markup(terminal: Terminal) -> None:
    out = Console(True, file=terminal)
    out.note("[red]path[/red] [/nothing]")
    out.header("[bold]", {"[a]": "[b]"})
    assert "[red]path[/red] [/nothing]" in plain(terminal.getvalue())
    assert "[b]" in plain(terminal.getvalue())


def test_dumb_terminal_gets_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    full_run(Console(True, file=terminal))
    assert not CONTROL.search(terminal.getvalue())


def test_final_rows() -> None:
    summary = ROW | {"throughput/mfu": 0.407, "throughput/hfu": 0.512}
    peaks = {"memory/gpu_allocated_peak_gib": 61.5, "memory/gpu_allocated_peak_gib_min": 59.0}
    rows = final_rows(summary, peaks, {"record": "metrics.jsonl"})
    assert final_rows({}, {"loss/eval": 1.23456}, {}) == {"held-out loss": "1.2346 (the last evaluation)"}
    assert rows == {
        "tokens/s": "45,210  (MFU 40.7%, HFU 51.2%)",
        "step time": "2.00 s  (data 1%, fwd 25%, bwd 50%, opt 20%)",
        "peak GPU": "61.50 GiB per rank  (59.00 on the lowest rank)",
        "record": "metrics.jsonl",
    }


def test_maxima_over_ranks_that_exceed_the_step_share_it() -> None:
    rows = final_rows({"time/step_s": 1.0, "time/forward_s": 1.0, "time/backward_s": 1.0}, {}, {})
    assert rows["step time"] == "1.00 s  (fwd 50%, bwd 50%)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (0.0123, "0.0123"), (0.5, "0.500"), (9.876, "9.88"), (98.76, "98.8"), (987.6, "988"),
     (98765.0, "98765"), (123456.0, "1.2e5"), (0.00012, "1.2e-4"), (math.nan, "-"), (math.inf, "inf")],
)  # fmt: skip
def test_short_numbers(value: float, text: str) -> None:
    assert console._short(value) == text
    assert len(text) <= 6


@pytest.fixture
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = (
        "compilers",
        "distutils",
        "py.warnings",
        "torch.distributed",
        "filelock",
        "transformers",
        "datasets",
    )
    levels = {name: logging.getLogger(name).level for name in names}
    filters = list(logging.getLogger("DeepSpeed").filters)
    for key in (
        "TRANSFORMERS_VERBOSITY",
        "DATASETS_VERBOSITY",
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_DATASETS_DISABLE_PROGRESS_BARS",
    ):
        monkeypatch.setenv(key, "x")
        monkeypatch.delenv(key)
    with warnings.catch_warnings():
        yield
    logging.getLogger("DeepSpeed").filters[:] = filters
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_quiet_keeps_errors_and_drops_the_rest(process_state: None) -> None:
    quiet_libraries(debug=False)
    quiet_libraries(debug=False)
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)  # what its import does
    assert not logger.filter(logger.makeRecord("DeepSpeed", logging.WARNING, "", 0, "noise", (), None))
    assert logger.filter(logger.makeRecord("DeepSpeed", logging.ERROR, "", 0, "trouble", (), None))
    assert logger.filters.count(console._errors_only) == 1
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit("noise", FutureWarning, "f.py", 1, module="torch.distributed.c10d_logger")
        warnings.warn_explicit("ours", FutureWarning, "f.py", 1, module="remat.training.loop")
        warnings.warn_explicit("near", FutureWarning, "f.py", 1, module="deepspeedy")
    assert [str(warning.message) for warning in seen] == ["ours", "near"]


def test_debug_changes_nothing(process_state: None) -> None:
    before = list(warnings.filters)
    quiet_libraries(debug=True)
    assert list(warnings.filters) == before
    assert "TRANSFORMERS_VERBOSITY" not in os.environ


def test_progress_bars_stay_on_a_terminal_of_rank_0_only(
    process_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    quiet_libraries(debug=False)
    assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    quiet_libraries(debug=False, is_main=False)
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"


def test_a_long_line_breaks_between_words(terminal: Terminal) -> None:
    text = "proven: 32 of 32 layers recomputed, 0.1 MiB kept on the device; optimizer state on cpu, all as asked for"
    with closing(Console(is_main=True, file=terminal)) as out:
        out.note(text)
    lines = plain(terminal.getvalue()).split("\n")
    assert max(map(len, lines)) <= 80 and " ".join(line.strip() for line in lines).strip() == text
