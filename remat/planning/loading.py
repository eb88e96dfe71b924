"""Plan how a run reads its weights: which rank reads how much, in what time, and how much memory that needs.

At ZeRO-3 ranks read their own slices, or their rows of each matrix that is quantised (peft=qlora). Below ZeRO-3 every
rank reads the whole model, and ZeRO-1 and 2 then copy the trained weights into one flat buffer.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from remat.config import ds_config
from remat.config.options import ConfigError, ModelInit, ModelLoad, PeftMethod, RunConfig
from remat.config.units import GB, format_size
from remat.model import adapters, hf_model, own_slices
from remat.model.four_bits.layout_4bit import BLOCK, flat_bytes
from remat.model.layers import decoder_layers
from remat.model.own_slices import BOUNCE_BYTES, Layout, NotSliced
from remat.planning.model_states import WEIGHTS
from remat.planning.plan import capacity_of
from remat.planning.preflight import flattens_on_gpu, reads_onto_device
from remat.planning.step_time import RANGES
from remat.planning.strategy import Strategy, plain_model

WHOLE_MODEL = "below ZeRO-3 every rank has the whole model"
KNOWN_DISK_GBS = RANGES["nvme_read_gbs"][1]  # the fastest of the shipped machines
ASSUMED_WIDTH = 2  # bytes of a value in files that are not here to look at


@dataclass(frozen=True)
class Loading:
    """How weights are read, and what that takes at best. Bytes are of the rank that reads or holds the most.

    `because` says why `way` is not own_slices. `time_s` is for reading alone, from the disks of a node; None if their
    rate is not known. The peaks do not include what a process holds before it loads. They last until the engine has its
    16-bit weights.
    """

    way: ModelLoad
    because: str
    read_bytes: int
    read_bytes_of_all: int
    host_peak_bytes: int
    gpu_peak_bytes: int
    time_s: float | None
    files_seen: bool  # else files are assumed to hold 16 bits a value, in a format that can be sliced
    reading_host_bytes: int  # of host_peak_bytes, while weights are read
    flat_bytes: int = 0  # of the buffer into which ZeRO-1 and 2 copy trained weights
    disk_bytes: int = 0  # that the disks of a node read

    def record(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)

    def line(self) -> str:
        """Return one line: who reads what, how long that takes at best, and the peaks."""
        size, whole = format_size(self.read_bytes), format_size(self.read_bytes_of_all)
        what = f"each rank reads its own {size} of {whole}"
        if self.because == WHOLE_MODEL:
            what = f"each rank reads all {whole} ({self.because})"
        elif self.way is ModelLoad.from_pretrained:
            what = f"rank 0 reads all {whole} ({self.because})"
        time = f"in {(self.time_s or 0):.3g} s at best"
        if self.time_s is None:
            seconds = self.disk_bytes / (KNOWN_DISK_GBS * GB)
            time = f"in {seconds:.3g} s from disks of {KNOWN_DISK_GBS:g} GB/s (hardware.nvme_read_gbs is not known)"
        peaks = [f"{format_size(self.host_peak_bytes)} of host memory"] * (self.host_peak_bytes > 0)
        peaks += [f"{format_size(self.gpu_peak_bytes)} on the GPU"] * (self.gpu_peak_bytes > 0)
        assumed = "" if self.files_seen else "; files not seen, taken to hold 16 bits a value"
        least = "at least " * (self.way is ModelLoad.from_pretrained)
        return f"{what} {time}; peak per rank {least}{', '.join(peaks)}{assumed}"


def plan_loading(cfg: RunConfig, decided: Strategy, *, world_size: int, on_gpu: bool) -> Loading | None:
    """Return how the pretrained weights of a run are read; None if it reads none.

    Reads the headers of the files if model.path is a folder. A plan is made even if files are missing or cut off.
    """
    if cfg.model.init is not ModelInit.pretrained:
        return None
    if decided.zero_stage < 3:
        return _plan_whole(cfg, decided, world_size=world_size, on_gpu=on_gpu)
    quantised = cfg.peft.method is PeftMethod.qlora
    if quantised and (found := _plan_4bit(cfg, decided, world_size=world_size, on_gpu=on_gpu)):
        return found
    skeleton = plain_model(cfg)
    layout, because = _layout(cfg, decided, skeleton)
    sizes = [parameter.numel() for parameter in skeleton.parameters()]
    trained_width = hf_model.DTYPES[cfg.train.precision].itemsize
    whole = layout.model_bytes if layout else ASSUMED_WIDTH * sum(sizes)
    own = layout.read_bytes(0, world_size) if layout else ASSUMED_WIDTH * _shard(sizes, world_size)
    sliced = not because
    shard, largest = trained_width * _shard(sizes, world_size), trained_width * max(sizes)
    if quantised:  # one matrix after another is gathered, once all are read in 16 bits
        largest = max(largest, *(_whole_4bit(size, trained_width) for size in decided.held.quantised_weights))
    offload = ds_config.param_offload_device(decided.ds)  # onto NVMe each shard goes as soon as it is cut
    on_host = offload == "cpu" or not (on_gpu or offload)
    # what is persistent stays on the GPU even where parameters are offloaded
    bounces = on_gpu or (layout is not None and layout.converts(hf_model.DTYPES[cfg.train.precision]))
    # from_pretrained gathers one weight after another, beside the copy that ZeRO-3 sends
    moved = (BOUNCE_BYTES if bounces else 0) if sliced else 2 * largest
    per_node = min(cfg.hardware.gpus_per_node or 1, world_size)
    of_node = own * per_node if sliced else whole
    host = shard * on_host + moved * (sliced or not on_gpu)
    return Loading(
        way=ModelLoad.own_slices if sliced else ModelLoad.from_pretrained,
        because=because,
        read_bytes=own if sliced else whole,
        read_bytes_of_all=whole,
        host_peak_bytes=host,
        gpu_peak_bytes=(shard * (not offload) + largest * (1 if sliced else 2)) * on_gpu,
        time_s=_time_s(cfg, of_node),
        files_seen=layout is not None,
        reading_host_bytes=host,
        disk_bytes=of_node,
    )


def _plan_whole(cfg: RunConfig, decided: Strategy, *, world_size: int, on_gpu: bool) -> Loading:
    """Return how every rank reads the whole model, and copies trained weights into the flat buffer of ZeRO-1 and 2.

    The copy is made on the host if the GPU has no room for the buffer beside the model. A rank moves one weight
    after another to its GPU; but if ranks share layers or have stages, its part is cut out on the host.
    """
    skeleton = plain_model(cfg)
    layout, _ = _layout(cfg, decided, skeleton)
    sizes = [parameter.numel() for parameter in skeleton.parameters()]
    width = hf_model.DTYPES[cfg.train.precision].itemsize
    read = layout.model_bytes if layout else ASSUMED_WIDTH * sum(sizes)
    whole, largest = width * sum(sizes), width * max(sizes)
    # below ZeRO-3 a rank holds all its weights, however many ranks there are
    items = decided.model_states(data_ranks=world_size, ranks_per_node=1, can_pin=True)
    held = sum(item.bytes_per_rank for item in items if item.name in WEIGHTS)
    flat = decided.flat_bytes(width)
    bounce = max([largest, *(_whole_4bit(size, width) for size in decided.held.quantised_weights)])
    gpu_bytes = capacity_of(cfg.hardware).gpu_bytes
    has_room = gpu_bytes is None or flattens_on_gpu(
        flat_bytes=flat, weights_bytes=held, gpu_bytes=gpu_bytes, world_size=world_size
    )
    onto_gpu = reads_onto_device(cfg, "cuda" if on_gpu else "cpu")
    if on_gpu:
        reading = largest if onto_gpu else whole
        host = max(reading, 0 if has_room else 2 * flat)
        gpu = held + max(bounce if onto_gpu else 0, flat if has_room else 0)
    else:
        reading = (held if decided.held.quantised_weights else whole) + bounce
        host, gpu = max(reading, held + flat), 0
    return Loading(
        way=ModelLoad.from_pretrained,
        because=WHOLE_MODEL,
        read_bytes=read,
        read_bytes_of_all=read,
        host_peak_bytes=host,
        gpu_peak_bytes=gpu,
        time_s=_time_s(cfg, read),  # one rank reads from the disk: the others find the pages in memory
        files_seen=layout is not None,
        reading_host_bytes=reading,
        flat_bytes=flat,
        disk_bytes=read,
    )


def _whole_4bit(elements: int, width: int) -> int:
    """Return the bytes while a whole matrix is quantised: itself, its 4 bits twice, and fp32 constants."""
    return width * elements + elements // 2 + 4 * elements // BLOCK + flat_bytes(elements)


def _plan_4bit(cfg: RunConfig, decided: Strategy, *, world_size: int, on_gpu: bool) -> Loading | None:
    """Return how ranks read straight into 4-bit shards (`load_4bit`); None if transformers must read.

    Each matrix is read in parts, one by each rank. Rank 0 also reads what is not quantised; the figures are its own.
    """
    from remat.model.four_bits import load_4bit

    dtype = hf_model.DTYPES[cfg.train.precision]
    files: load_4bit.Files | None = None
    with ExitStack() as stack:
        model: Any = plain_model(cfg)
        if Path(cfg.model.path or "").is_dir():
            try:
                model, files = load_4bit.look(cfg.model, hf_model.load_config(cfg.model), dtype, stack)
            except (load_4bit.Elsewhere, ConfigError):  # a launch says why
                return None
        widths = {id(p): files.width_bytes(p) if files else ASSUMED_WIDTH for p in model.parameters()}
    paths = adapters.paths_to_quantise(model, decoder_layers(model))
    matrices = [_Matrix.of(model.get_submodule(path), widths, dtype.itemsize, world_size) for path in paths]
    inside = {id(model.get_submodule(path).weight) for path in paths}
    rest = [(p.numel(), widths[id(p)]) for p in model.parameters() if id(p) not in inside]
    shard = sum(math.ceil(m.flat / world_size) for m in matrices)
    shard += sum(dtype.itemsize * math.ceil(size / world_size) for size, _ in rest)
    others = sum(size * width for size, width in rest)
    own, of_all = sum(m.read for m in matrices), sum(m.read_of_all for m in matrices)
    per_node = min(cfg.hardware.gpus_per_node or 1, world_size)
    of_node = min(own * per_node, of_all) + others
    on_host = not on_gpu or ds_config.param_offload_device(decided.ds) == "cpu"
    held = max(m.read for m in matrices), max(size * width for size, width in rest)
    moved = max(m.quantising for m in matrices), max(dtype.itemsize * size for size, _ in rest)
    host = shard * on_host + (max(held) if on_gpu else max(map(sum, zip(held, moved, strict=True))))
    return Loading(
        way=ModelLoad.own_slices,
        because="",
        read_bytes=own + others,
        read_bytes_of_all=of_all + others,
        host_peak_bytes=host,
        gpu_peak_bytes=(shard * (not on_host) + max(moved)) * on_gpu,
        time_s=_time_s(cfg, of_node),
        files_seen=files is not None,
        reading_host_bytes=host,
        disk_bytes=of_node,
    )


@dataclass(frozen=True)
class _Matrix:
    """Bytes of a matrix that is read into 4 bits: its flat parameter, what ranks read, and what quantising holds."""

    flat: int
    read: int  # by one rank
    read_of_all: int
    quantising: int

    @classmethod
    def of(cls, linear: Any, widths: dict[int, int], itemsize: int, ranks: int) -> _Matrix:
        from remat.model.four_bits import load_4bit, sharded_4bit

        rows, columns = sharded_4bit.shape_of(linear)
        whole, flat, width = rows * columns, flat_bytes(rows * columns), widths[id(linear.weight)]
        if not load_4bit.is_read_in_parts(linear):
            return cls(flat, width * whole, ranks * width * whole, _whole_4bit(whole, itemsize))
        part = math.ceil(rows / ranks) * columns
        constants = 4 * part // BLOCK
        copied = 2 * itemsize * part  # what was read, in the dtype of the products, and the part that it fills
        joined = (1 + ranks) * (part // 2 + constants) + ranks * constants + flat
        return cls(
            flat, width * part, width * whole, max(copied, itemsize * part + part // 2 + constants, joined)
        )


def _time_s(cfg: RunConfig, size: int) -> float | None:
    """Return the seconds in which a node's disks read `size` bytes; None if their rate is not known."""
    rate = cfg.hardware.nvme_read_gbs
    return None if rate is None else size / (rate * GB)


def _layout(cfg: RunConfig, decided: Strategy, skeleton: Any) -> tuple[Layout | None, str]:
    """Return where weights lie in files (None: not visible here), and why they are not read in slices, if so."""
    because = own_slices.refuse(cfg.model, decided.ds) or ""
    if cfg.model.load is ModelLoad.from_pretrained:
        because = "model.load=from_pretrained"
    if not Path(cfg.model.path or "").is_dir():
        return None, because
    try:
        return own_slices.locate(skeleton, cfg.model), because
    except NotSliced as error:
        return None, because or str(error)
    except (ConfigError, OSError):  # a launch says what is wrong with them
        return None, because


def _shard(sizes: list[int], world_size: int) -> int:
    """Return the elements of a rank's shards, padding included."""
    return sum(-(-size // world_size) for size in sizes)
