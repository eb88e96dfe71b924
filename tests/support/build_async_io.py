"""Build DeepSpeed's async_io for the tests: as one unit and without symbols for a debugger, a sixth of the CPU time.

`python -m tests.support.build_async_io`, called by `make test`. The build lies where remat looks for its own, from
the same sources; where it cannot be built the tests of NVMe are skipped.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from remat.machine import ops


def make_one_unit(builder: Any, folder: Path) -> None:
    """Have `builder` compile what includes torch's headers once: in copies, for not all own headers may come twice."""
    own = builder()
    csrc = folder / "csrc"
    if not csrc.exists():
        shutil.copytree(own.deepspeed_src_path("csrc"), csrc)
        for header in csrc.rglob("*.h"):
            header.write_text(f"#pragma once\n{header.read_text()}")
    unit = folder / f"{own.name}.cpp"
    sources = [folder / path for path in own.sources()]
    light = [str(path) for path in sources if path.parent.name == "common"]
    unit.write_text("".join(f'#include "{path}"\n' for path in sources if str(path) not in light))
    includes = [str(folder / path) for path in own.include_paths()]
    flags = [flag for flag in own.cxx_args() if flag != "-g"]
    builder.sources = lambda self: [str(unit), *light]
    builder.include_paths = lambda self: includes
    builder.cxx_args = lambda self: flags


def main() -> int:
    import deepspeed.ops
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    if not deepspeed.ops.__compatible_ops__.get("async_io"):
        print("async_io cannot be built here: the tests of NVMe offload are skipped")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for builder in (AsyncIOBuilder, PinMemoryBuilder):
            make_one_unit(builder, Path(folder))
        ops.ensure("async_io", print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
