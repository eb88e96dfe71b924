"""How inputs are fuzzed: few examples of a fixed seed by default, many new ones with HYPOTHESIS_PROFILE=long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from remat.config.options import ConfigError

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
LONG_FACTOR = 10
HANGS_AFTER_S = 60  # far beyond what any example takes: an endless loop becomes a failure with its stack


def budget(examples: int) -> settings:
    """`examples` inputs that are the same in every run, or ten times as many new ones."""
    return settings(
        max_examples=examples * (LONG_FACTOR if LONG else 1),
        derandomize=not LONG,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=LONG,
    )


class Hangs(BaseException):
    """Not an Exception: no handler for bad input may take it for one."""


@contextlib.contextmanager
def ends() -> Iterator[None]:
    """Fail with the stack of whatever is still running after HANGS_AFTER_S."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"still running after {HANGS_AFTER_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def assert_clear(error: ConfigError, *names: str) -> None:
    """One of `names` (option, file, key) is in the text, which is short enough to be read and no traceback."""
    text = str(error)
    assert any(name in text for name in names), f"names none of {names}: {text}"
    assert "Traceback" not in text
    assert len(text) < 20_000, f"{len(text)} characters: {text[:500]}"


def json_values(max_leaves: int = 6) -> st.SearchStrategy[Any]:
    """Anything JSON can say, NaN and lone surrogates among it, small."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=12)
        | st.sampled_from([0, 1, -1, 2**31, 2**63, 1e308, "", "auto", "none", "\ud800", "0", "true"])
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=max_leaves,
    )


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def torn(text: str) -> st.SearchStrategy[bytes]:
    """A file cut short, with a byte changed, or of nothing but noise."""
    raw = text.encode("utf-8", "surrogatepass")
    cut = st.integers(0, len(raw)).map(lambda at: raw[:at])
    flipped = st.tuples(st.integers(0, max(0, len(raw) - 1)), st.binary(min_size=1, max_size=1)).map(
        lambda change: raw[: change[0]] + change[1] + raw[change[0] + 1 :]
    )
    nested = st.just(b"[" * 100_000)
    return cut | flipped | nested | st.binary(max_size=64) | st.just(as_json(text))
