"""Build DeepSpeed's compiled ops once per environment, with visible progress; then load them in milliseconds.

torch's build lock is a file. An interrupted build leaves it behind, and the next load then waits for ever in
silence. Here a finished build is imported without that lock, and every build happens under an flock, which the kernel
frees when its owner ends. Whoever holds the flock and finds torch's lock file removes it as stale, unless a build is
still going on: by a program that does not use this module, or on another node that the flock may not reach. Such a
build is recognised by a live process that has the lock open, or by changes in the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from remat.config.options import OptimName
from remat.config.units import MIB
from remat.machine.owner_lock import current_process

BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "async_io": "AsyncIOBuilder",
    "pin_memory": "PinMemoryBuilder",
}
RARE = ("cpu_lion",)  # built only where a run asks for it
LINKED_TO = {"async_io": ["pin_memory"]}  # op -> ops whose symbols it needs when it is loaded
HEARTBEAT_S = 5.0
LOOK_AGAIN_S = 0.2
QUIET_S = 600.0  # without a change in a folder for so long, nobody builds there
SILENT_S = 90.0  # a builder on another node writes every HEARTBEAT_S, which is seen up to a minute late
# Replaces torch/extension.h, which includes all of torch's C++ interface: the ops need only this, in half the time.
LIGHT_HEADER = "#pragma once\n#include <torch/types.h>\n#include <torch/csrc/utils/pybind.h>\n"
NOW = ".now-"  # prefix of files that are written only to learn the file system's time


class OpError(RuntimeError):
    """Failure to build an op, with the last lines of the compiler's output and the remedy."""


def use_environment_folder() -> Path:
    """Point torch at the ninja of this Python environment, and at a build folder in it unless the user chose one.

    All builds use one ninja: another version discards the build log of the first and compiles everything again.
    """
    tools = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != tools:
        os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        folder = Path(sys.prefix) / "torch_extensions"
        if not os.access(sys.prefix, os.W_OK):
            key = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
            folder = Path.home() / ".cache" / "remat" / "torch_extensions" / key
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    return Path(os.environ["TORCH_EXTENSIONS_DIR"])


def needed(optimizer_device: str | None, param_device: str | None, optimizer: OptimName) -> list[str]:
    """Return the ops a memory strategy needs, given where it puts optimizer state and parameters (None, cpu, nvme)."""
    ops = []
    if optimizer_device:
        ops.append("cpu_lion" if optimizer is OptimName.lion else "cpu_adam")
    if "nvme" in (optimizer_device, param_device):
        ops.append("async_io")
    return ops


def ensure(name: str, say: Callable[[str], None]) -> float:
    """Load op `name`, building it first if this environment has no build of it; return the seconds it took.

    Safe from any number of processes at once. Raises OpError with the cause when it cannot be built.
    """
    start = time.perf_counter()
    for other in LINKED_TO.get(name, []):
        ensure(other, say)
    folder = use_environment_folder()
    folder.mkdir(parents=True, exist_ok=True)
    marker, library, lock = folder / f"{name}.built.json", folder / name / f"{name}.so", folder / name / "lock"
    identity = _identity()
    if _load_ready(name, marker, library, identity):
        _tidy(name, folder, say)
        return time.perf_counter() - start
    with _alone(name, folder / f"{name}.flock", say):
        if not _load_ready(name, marker, library, identity):
            _clear_lock(name, lock, say)
            marker.unlink(missing_ok=True)
            with _as_builder(_builder_file(lock)):
                _build(name, folder / name, say)
            marker.write_text(json.dumps(_record(library, identity)))
    return time.perf_counter() - start


def _tidy(name: str, folder: Path, say: Callable[[str], None]) -> None:
    """Remove torch's lock file if nobody holds it: other programs would wait for it."""
    lock = folder / name / "lock"
    if not lock.exists() or _live(lock) is not None:
        return
    with contextlib.suppress(Timeout, OpError), FileLock(folder / f"{name}.flock", timeout=0):
        if _live(lock) is None:
            _remove(lock, say)


@contextmanager
def _alone(name: str, flock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold `flock` inside the block; `say` so when another process has it."""
    lock = FileLock(flock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for another process to build DeepSpeed op {name} ({flock})")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _clear_lock(name: str, lock: Path, say: Callable[[str], None]) -> None:
    """Wait until no live build holds the lock file, then remove it. Raises OpError when it may not be removed."""
    told = None
    while (holder := _live(lock)) is not None:
        if holder != told:
            say(f"waiting for {holder}, which builds DeepSpeed op {name} and holds {lock}")
            told = holder
        time.sleep(LOOK_AGAIN_S)
    _remove(lock, say)


def _live(lock: Path) -> str | None:
    """Return who holds `lock`, in words; None when nobody does.

    Called under the flock, so the holder is no process on this node that uses this module.
    """
    try:
        if not lock.exists():
            return None
        if pid := lock_holder(lock):
            return f"process {pid}"
        now = _file_time(lock.parent)
        builder = _builder_file(lock)
        if builder.exists():
            place, host = json.loads(builder.read_text())
            if place == _place() or now - builder.stat().st_mtime > SILENT_S:
                return None
            return f"a process on {host}"
        changed = max(p.stat().st_mtime for p in lock.parent.iterdir() if not p.name.startswith(NOW))
    except (FileNotFoundError, ValueError):  # files change right now: the build goes on, or has just ended
        return "a process" if lock.exists() else None
    left_s = QUIET_S - (now - changed)
    return None if left_s <= 0 else f"an unknown process, perhaps on another node (at most {QUIET_S:.0f} s)"


def _remove(lock: Path, say: Callable[[str], None]) -> None:
    try:
        status = lock.stat()
    except FileNotFoundError:
        return
    age = max(0.0, time.time() - status.st_mtime)
    try:
        lock.unlink(missing_ok=True)
        _builder_file(lock).unlink(missing_ok=True)
    except OSError as error:
        raise OpError(
            f"{lock} was left by user {status.st_uid} {age / 60:.0f} min ago and cannot be removed ({error.strerror}): "
            "remove it, or set TORCH_EXTENSIONS_DIR to a folder of your own"
        ) from error
    say(f"removed {lock}: {age / 60:.0f} min old, its process is gone")


@contextmanager
def _as_builder(file: Path) -> Iterator[None]:
    """Write to `file` who builds, every HEARTBEAT_S: fresh writes show other nodes that the builder is alive."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content, done = json.dumps([_place(), socket.gethostname()]), threading.Event()
    file.write_text(content)

    def write() -> None:
        while not done.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                file.write_text(content)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()
        file.unlink(missing_ok=True)


def _builder_file(lock: Path) -> Path:
    return lock.with_name("builder.json")


def _place() -> str:
    """Return an id of this host, kernel and process namespace: processes with the same id can see each other."""
    here = current_process()
    return f"{here.host} {here.boot} {here.namespace}"


def _file_time(folder: Path) -> float:
    """Return the present time by the file system's clock, from which a node's clock may differ."""
    probe = folder / f"{NOW}{socket.gethostname()}-{os.getpid()}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink(missing_ok=True)
        return now
    except OSError:  # another user's folder
        return time.time()


def lock_holder(lock: Path) -> int | None:
    """Return the id of a process that has `lock` open, as torch does while it builds; None when none is visible."""
    target = lock.resolve()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # closed meanwhile, or another user's
            if link.readlink() == target:
                return int(link.parent.parent.name)
    return None


def _identity() -> dict[str, str]:
    """Return what a build depends on: ops are compiled for one CPU, interpreter and set of library versions."""
    import deepspeed
    import torch

    cpu = Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", cpu.read_text(), re.M) if cpu.exists() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "cpu": hashlib.sha256((flags.group(1) if flags else platform.processor()).encode()).hexdigest()[:16],
        "cuda": str(torch.version.cuda) if torch.cuda.is_available() else "none",
    }


def _load_ready(name: str, marker: Path, library: Path, identity: dict[str, str]) -> bool:
    """Import a finished build as torch does after building one, but without its lock and without ninja.

    Returns False when there is no finished build for this `identity`. A lock that a killed process left does not
    stop it, and another path to the same sources does not cause a new build.
    """
    try:
        found = json.loads(marker.read_text())
    except (FileNotFoundError, ValueError):  # no build, or the marker's writer was killed
        return False
    if found != _record(library, identity):
        return False
    from deepspeed.ops.op_builder.builder import OpBuilder

    if name not in OpBuilder._loaded_ops:
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        OpBuilder._loaded_ops[name] = module
        _builder(name).load(verbose=False)  # here pin_memory makes its symbols visible to other ops
    return True


def _record(library: Path, identity: dict[str, str]) -> dict[str, Any]:
    """Return the content of the marker of a finished build."""
    return {"identity": identity, "library_bytes": library.stat().st_size if library.exists() else None}


def _builder(name: str) -> Any:
    import deepspeed.ops.op_builder as op_builder

    return getattr(op_builder, BUILDERS[name])()


def _make_one_unit(builder: Any, folder: Path) -> None:
    """Have `builder` compile the sources that include torch as one unit, with few headers and no debug symbols.

    That takes a quarter to a tenth of the time. `folder` gets copies of the sources; their headers get `#pragma once`.
    """
    csrc = folder / "csrc"
    shutil.copytree(builder.deepspeed_src_path("csrc"), csrc)
    for header in csrc.rglob("*.h"):
        header.write_text(f"#pragma once\n{header.read_text()}")
    sources = [folder / path for path in builder.sources()]
    alone = [str(path) for path in sources if path.parent.name == "common"]  # without torch's headers
    unit = folder / f"{builder.name}.cpp"
    unit.write_text("".join(f'#include "{path}"\n' for path in sources if str(path) not in alone))
    light = folder / "light" / "torch" / "extension.h"
    light.parent.mkdir(parents=True)
    light.write_text(LIGHT_HEADER)
    includes = [str(folder / "light"), *(str(folder / path) for path in builder.include_paths())]
    flags = [flag for flag in builder.cxx_args() if flag != "-g"]
    builder.sources = lambda: [str(unit), *alone]
    builder.include_paths = lambda: includes
    builder.cxx_args = lambda: flags


def _build(name: str, folder: Path, say: Callable[[str], None]) -> None:
    done = threading.Event()
    beat = threading.Thread(target=_heartbeat, args=(name, folder, say, done), daemon=True)
    say(f"building DeepSpeed op {name} (once per environment)")
    beat.start()
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as sources:
            builder = _builder(name)
            _make_one_unit(builder, Path(sources))
            builder.load(verbose=False)
    except Exception as error:
        raise OpError(f"DeepSpeed op {name} cannot be built: {_cause(error)}\n{_remedy(name)}") from error
    finally:
        done.set()
        beat.join()
    say(f"built {name} in {time.perf_counter() - start:.0f} s")


def _heartbeat(name: str, folder: Path, say: Callable[[str], None], done: threading.Event) -> None:
    start = time.perf_counter()
    while not done.wait(HEARTBEAT_S):
        plan = folder / "build.ninja"
        total = len(re.findall(r"^build \S+\.o:", plan.read_text(), re.M)) if plan.exists() else 0
        ready = len(list(folder.glob("*.o")))
        say(f"  {name}: {ready} of {total or '?'} objects, {time.perf_counter() - start:.0f} s")


def _cause(error: BaseException) -> str:
    """Return the message of the innermost cause, cut to the compiler's last lines."""
    while error.__cause__ is not None:
        error = error.__cause__
    return "\n".join(str(error).strip().splitlines()[-12:]) or type(error).__name__


def _remedy(name: str) -> str:
    if name == "async_io":
        return "remedy: install libaio's headers (Debian: apt-get install libaio-dev), or a config without NVMe"
    return (
        "remedy: install a C++ compiler (Debian: apt-get install g++) and ninja, or keep the optimizer on the "
        "GPU with deepspeed.config=zero3"
    )


def try_op(name: str, folder: Path) -> str:
    """Run op `name` once on real data and return what it did; `folder` is where async_io writes its file."""
    import torch

    if name in ("cpu_adam", "cpu_lion"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.lion import DeepSpeedCPULion

        weight = torch.nn.Parameter(torch.ones(64))
        weight.grad = torch.ones(64)
        optimizer = (DeepSpeedCPUAdam if name == "cpu_adam" else DeepSpeedCPULion)([weight], lr=0.5)
        optimizer.step()
        if not torch.allclose(weight.detach(), torch.full((64,), 0.5), atol=1e-3):
            raise OpError(f"{name} computed {weight[0].item():.4f}, expected 0.5: rebuild with `remat doctor`")
        return f"one {'AdamW' if name == 'cpu_adam' else 'Lion'} step on 64 values"
    return _try_async_io(folder) if name == "async_io" else "async_io uses it"


def _try_async_io(folder: Path) -> str:
    import torch

    handle = _builder("async_io").load(verbose=False).aio_handle(MIB, 8, False, True, 1)
    path = folder / f"remat-aio-{os.getpid()}.bin"
    data = torch.randint(0, 255, (4 << 20,), dtype=torch.uint8)
    back = torch.zeros_like(data)
    try:
        start = time.perf_counter()
        handle.sync_pwrite(data, str(path))
        handle.sync_pread(back, str(path))
        seconds = time.perf_counter() - start
    finally:
        path.unlink(missing_ok=True)
    if not torch.equal(data, back):
        raise OpError(f"async_io read back other bytes than it wrote in {folder}")
    return f"4 MiB written and read back, {8 / seconds / 1024:.1f} GiB/s"
