"""Plan how a run at ZeRO-3 reads its weights: which rank reads how much, in what time, holding what meanwhile.

Below ZeRO-3 nothing is planned here: every rank reads the whole model. Nor is reading into 4-bit shards (peft=qlora).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from remat.config import ds_config
from remat.config.options import ConfigError, ModelInit, ModelLoad, PeftMethod, RunConfig
from remat.config.units import format_size
from remat.model import hf_model, own_slices
from remat.model.own_slices import BOUNCE_BYTES, Layout, NotSliced
from remat.planning.strategy import Strategy, plain_model

GB = 1e9
ASSUMED_WIDTH = 2  # bytes of a value in files that are not here to look at


@dataclass(frozen=True)
class Loading:
    """How weights are read, and the least that takes. Bytes are of the rank that reads or holds the most.

    `because` says why `way` is not own_slices. `time_s` is for reading alone, from the disks of a node; None where
    their rate is not known. The peaks count beyond what a process holds before it loads.
    """

    way: ModelLoad
    because: str
    read_bytes: int
    read_bytes_of_all: int
    host_peak_bytes: int
    gpu_peak_bytes: int
    time_s: float | None
    files_seen: bool  # else they are taken to hold 16 bits a value, and to be of a kind that can be sliced

    def record(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)

    def line(self) -> str:
        """Return one line: who reads what, how long that takes at best, and the peaks."""
        size, whole = format_size(self.read_bytes), format_size(self.read_bytes_of_all)
        what = f"each rank reads its own {size} of {whole}"
        if self.way is ModelLoad.from_pretrained:
            what = f"rank 0 reads all {whole} ({self.because})"
        time = "in a time not known" if self.time_s is None else f"in {self.time_s:.3g} s at best"
        peaks = [f"{format_size(self.host_peak_bytes)} of host memory"]
        peaks += [f"{format_size(self.gpu_peak_bytes)} on the GPU"] * (self.gpu_peak_bytes > 0)
        assumed = "" if self.files_seen else "; files not seen, taken to hold 16 bits a value"
        least = "at least " * (self.way is ModelLoad.from_pretrained)
        return f"{what} {time}; peak per rank {least}{', '.join(peaks)}{assumed}"


def plan_loading(cfg: RunConfig, decided: Strategy, *, world_size: int, on_gpu: bool) -> Loading | None:
    """Return how the pretrained weights of a run at ZeRO-3 are read; None for other runs.

    Looks at the headers of the files where model.path is a folder; a plan needs no file to be there, or whole.
    """
    is_planned = cfg.model.init is ModelInit.pretrained and cfg.peft.method is not PeftMethod.qlora
    if decided.zero_stage < 3 or not is_planned:
        return None
    skeleton = plain_model(cfg)
    layout, because = _layout(cfg, decided, skeleton)
    sizes = [parameter.numel() for parameter in skeleton.parameters()]
    trained_width = hf_model.DTYPES[cfg.train.precision].itemsize
    whole = layout.model_bytes if layout else ASSUMED_WIDTH * sum(sizes)
    own = layout.read_bytes(0, world_size) if layout else ASSUMED_WIDTH * _shard(sizes, world_size)
    sliced = not because
    shard, largest = trained_width * _shard(sizes, world_size), trained_width * max(sizes)
    on_host = not on_gpu or ds_config.param_offload_device(decided.ds) == "cpu"
    # what is persistent stays on the GPU even where parameters are offloaded
    bounces = on_gpu or (layout is not None and layout.converts(hf_model.DTYPES[cfg.train.precision]))
    # from_pretrained gathers one weight after another, beside the copy that ZeRO-3 sends
    moved = (BOUNCE_BYTES if bounces else 0) if sliced else 2 * largest
    per_node = min(cfg.hardware.gpus_per_node or 1, world_size)
    rate = cfg.hardware.nvme_read_gbs
    return Loading(
        way=ModelLoad.own_slices if sliced else ModelLoad.from_pretrained,
        because=because,
        read_bytes=own if sliced else whole,
        read_bytes_of_all=whole,
        host_peak_bytes=shard * on_host + moved * (sliced or not on_gpu),
        gpu_peak_bytes=(shard * (not on_host) + largest * (1 if sliced else 2)) * on_gpu,
        time_s=None if rate is None else (own * per_node if sliced else whole) / (rate * GB),
        files_seen=layout is not None,
    )


def _layout(cfg: RunConfig, decided: Strategy, skeleton: Any) -> tuple[Layout | None, str]:
    """Return where the weights lie, None if that cannot be seen here, and why they are not read in slices, if so."""
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
