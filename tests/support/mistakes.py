"""Start a rank for each of many command lines: `python mistakes.py SPEC.json`, from a process that has imported all.

The spec is [{"words": [...], "folder": "..."}]. Each rank is a fork of this one, in that folder, and says in OUT of the
folder's name what a terminal would show. SPEC.done.json holds the exit codes, in order.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from remat import train
from remat.config import compose

OUT = ".out"
CRASHED = 1


def start(words: list[str], folder: Path) -> int:
    """The exit code of `train.py WORDS` in `folder`."""
    folder.mkdir()
    out = os.open(folder.with_suffix(OUT), os.O_CREAT | os.O_WRONLY, 0o666)
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = CRASHED
        try:
            code = train.main(words)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(out)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(spec: Path) -> None:
    compose.compose_run(["recipe=finetune", "model.path=gpt2"])  # what Hydra loads once is not counted again
    done = [start(each["words"], Path(each["folder"])) for each in json.loads(spec.read_text())]
    spec.with_suffix(".done.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
