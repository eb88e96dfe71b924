"""`hangs_soon.py SPEC.json`: as faulty_runs.py, where the watchdog's clock stands until the fault, then runs double.

So no deadline is over before the fault, however slow the machine, and a rank that never reports is not long waited for.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.support import faulty_runs  # noqa: I001 (first: it settles what this rank may see)

from remat.launch import signals
from remat.training import watchdog


def main(argv: list[str]) -> int:
    fault, over = Path(argv[-1]).with_suffix(".fault.json"), watchdog.Watchdog.over

    def over_since_the_fault(self: watchdog.Watchdog, now_s: float) -> bool:
        return over(self, self._looked_at + (2 * watchdog.POLL_S if fault.exists() else 0.0))

    watchdog.Watchdog.over = over_since_the_fault  # type: ignore[method-assign]
    watchdog.BEAT_S, watchdog.LISTEN_S, watchdog.REPORTS_S = 1.0, 0.5, 3.0
    return faulty_runs.main(argv)


if __name__ == "__main__":
    sys.exit(signals.around(main, sys.argv[1:]))
