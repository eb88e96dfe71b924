"""Load a model at ZeRO-3: each rank reads only the bytes of its own shards, directly into them.

`from_pretrained` reads everything on rank 0 and sends every weight to the others. Here a rank finds the bytes of each
weight in the headers of the safetensors files, and reads its part. transformers may convert weights while it loads
them (other names, stacked experts). So addresses of rows, not values, are passed through its conversions, and the
result shows where each row belongs. `locate` does this without reading a weight, and raises `NotSliced` with the reason
if it is impossible. `load` then creates and fills the model. Linux only (preadv).
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import dot_natural_key
from transformers.initialization import no_init_weights
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from remat.config import ds_config, paths
from remat.config.options import ConfigError, ModelConfig
from remat.config.units import MIB
from remat.machine import distributed

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BOUNCE_BYTES = 16 * MIB  # read at once where values cannot go directly into a shard
READ_BYTES = 64 * MIB  # most bytes per call, so that progress is reported
TRACED_COLUMNS = 3  # of each row: enough to detect columns that change places
MOST_TRACED = 1 << 22  # most rows of weights that are fused into one
SHORTEST_PIECE_BYTES = 4096  # of the mean piece; with shorter ones, whole files are read faster

Progress = Callable[[int, int], None]  # takes the bytes that this rank has read, and will read in all


class NotSliced(Exception):
    """Raised with the reason why these files cannot be read in slices, so that transformers must load them."""


class Run(NamedTuple):
    """`elements` values of `file` from byte `offset` on. `start` is their place in the flattened weight."""

    start: int
    elements: int
    file: Path
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """Where the elements of each weight and buffer are in the files. A weight with several names has one of them here.

    `conversions` are those of transformers, which a later save reverses.
    """

    runs: Mapping[str, Sequence[Run]]
    sharded: frozenset[str]  # the weights among them; buffers are whole on every rank
    conversions: list[Any]

    def read_bytes(self, rank: int, ranks: int) -> int:
        """Return the bytes that this rank reads."""
        return sum(
            count * run.dtype.itemsize
            for name, runs in self.runs.items()
            for _, run, _, count in _pieces(runs, *self._part(name, rank, ranks))
        )

    @property
    def model_bytes(self) -> int:
        """Return the bytes of all weights and buffers in the files, each once."""
        return self.read_bytes(0, 1)

    def converts(self, dtype: torch.dtype) -> bool:
        """Return whether any weight in the files has another dtype than `dtype`, the one of the shards."""
        return any(run.dtype is not dtype for name in self.sharded for run in self.runs[name])

    @property
    def digest(self) -> str:
        """Return a hash that is different if ranks see different files."""
        found = hashlib.sha256()
        for name, runs in self.runs.items():
            found.update(repr((name, [(*run[:2], run.file.name, *run[3:]) for run in runs])).encode())
        return found.hexdigest()

    def _part(self, name: str, rank: int, ranks: int) -> tuple[int, int]:
        """Return the first element of a rank's part and the one after its last, as ZeRO-3 partitions a weight."""
        numel = sum(run.elements for run in self.runs[name])
        if name not in self.sharded:
            return 0, numel
        each = -(-numel // ranks)
        return min(rank * each, numel), min((rank + 1) * each, numel)


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def width(self) -> int:
        """Return the elements of a row. Each element of a vector is a row."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def rows(self) -> int:
        return torch.Size(self.shape).numel() // max(1, self.width)

    @property
    def columns(self) -> int:
        """Return how many elements of each row are traced."""
        return min(self.width, TRACED_COLUMNS)


def refuse(cfg: ModelConfig, ds: Mapping[str, Any]) -> str | None:
    """Return why options and the rendered DeepSpeed dict `ds` exclude reading in slices; None if they do not."""
    zero = ds.get("zero_optimization", {})
    if (stage := ds_config.zero_stage(ds)) < 3:
        return f"ZeRO stage {stage} keeps every weight whole on each rank"
    if ds_config.param_offload_device(ds) == "nvme":
        return "parameters on NVMe have no shard in memory"
    if ds_config.second_shard_ranks(ds) > 1:
        return f"{ds_config.SECOND_SHARDS} keeps a second shard of every weight"
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_nontrainable_weights"):
        return "quantised shards are made of whole weights"
    if cfg.trust_remote_code:
        return "model.trust_remote_code=true: a model with code of its own may load in its own way"
    return None


def refusal(cfg: ModelConfig, because: str) -> str:
    """Return the error message for a run that requires own slices where they are impossible."""
    return (
        f"model.load=own_slices: model.path={cfg.path} cannot be read in slices: {because}; use model.load=auto, which "
        "then reads with from_pretrained"
    )


def locate(skeleton: PreTrainedModel, cfg: ModelConfig) -> Layout:
    """Find the weights of `skeleton`, a model on meta, in the files of model.path. Reads only headers.

    A model on the hub is downloaded as `from_pretrained` does. Raises NotSliced, OSError when a download fails, and
    ConfigError for a truncated file.
    """
    _refuse_folder(skeleton.config, str(cfg.path))
    stored: dict[str, _Stored] = {}
    for file in _find_files(str(cfg.path)):
        stored |= _read_header(file, cfg)
    state: dict[str, Any] = skeleton.state_dict(keep_vars=True)
    if others := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise NotSliced(f"{others[0]} of the model's state is no tensor")
    conversions = get_model_conversion_mapping(skeleton)
    again = get_model_conversion_mapping(skeleton)  # conversions keep state, so each trace needs its own
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    found = _convert(skeleton, stored, (conversions, again), shapes)
    tied = getattr(skeleton, "all_tied_weights_keys", None) or {}
    objects: dict[int, list[str]] = {}
    for name, value in state.items():
        objects.setdefault(id(value), []).append(name)
    runs, missing = dict[str, list[Run]](), list[str]()
    for names in objects.values():
        # If the files hold a tied weight twice, from_pretrained at ZeRO-3 takes the one that the others are tied to.
        held = sorted((name for name in names if name in found), key=lambda name: name in tied)
        if held:
            runs[names[0]] = found[held[0]]
        else:
            missing.append(names[0])
    if missing:
        raise NotSliced(f"{len(missing)} weights are not in the files (for example {missing[0]})")
    weights = {id(value) for value in skeleton.parameters()}
    return Layout(runs, frozenset(name for name in runs if id(state[name]) in weights), conversions)


def load(
    config: PretrainedConfig,
    cfg: ModelConfig,
    layout: Layout,
    *,
    settings: Mapping[str, Any],
    ds: dict[str, Any],
    progress: Progress,
) -> tuple[PreTrainedModel, int]:
    """Create the model under ZeRO-3 and fill this rank's shards. Collective. Returns it and the bytes this rank read.

    `settings` are arguments of `from_config`; `ds` is the rendered DeepSpeed dict. Raises ConfigError on every rank if
    one cannot read a file.
    """
    model = _create(config, cfg, settings, ds)
    problem = None
    with closing(_Reader(progress, layout.read_bytes(*distributed.place()))) as reader:
        try:
            _fill(model, layout, reader)
        except OSError as error:
            problem = str(error)
    if problems := [text for text in distributed.gather(problem) if text]:
        raise ConfigError(f"model.path={cfg.path}: {problems[0]}; copy or download it again")
    with torch.no_grad():
        model.initialize_weights()  # only what no file holds: every weight is marked as initialised
    if layout.conversions:
        model._weight_conversions = layout.conversions  # type: ignore[assignment]  # as transformers does
    return model, reader.bytes


def _refuse_folder(config: PretrainedConfig, path: str) -> None:
    """Raise NotSliced for a model that from_pretrained does not read from plain safetensors files."""
    asked: Any = config
    if getattr(asked, "quantization_config", None) is not None:
        raise NotSliced("the files hold quantised weights")
    if getattr(asked, "transformers_weights", None) or getattr(asked, "extra_files", ()):
        raise NotSliced("config.json or its class names weight files of its own")
    if Path(path).is_dir() and (Path(path) / "adapter_config.json").exists():
        raise NotSliced("the folder holds adapters too")
    if any(Path(path).glob("shard-*-model-*.safetensors")):
        raise NotSliced("the folder holds a distributed checkpoint")


def _find_files(path: str) -> list[Path]:
    """Return the safetensors files that from_pretrained would read; download them if `path` is a hub name."""
    if single := cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False):
        return [Path(single)]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if not index:
        raise NotSliced(f"there is no {SAFE_WEIGHTS_NAME} and no index of such files")
    try:
        return [Path(file) for file in get_checkpoint_shard_files(path, index)[0]]
    except (KeyError, TypeError, ValueError) as error:
        raise NotSliced(f"{SAFE_WEIGHTS_INDEX_NAME} is not whole ({type(error).__name__})") from error


def _read_header(file: Path, cfg: ModelConfig) -> dict[str, _Stored]:
    """Return the tensors of a safetensors file by name."""
    try:
        header = paths.read_header(file)
    except ValueError as error:
        raise ConfigError(f"model.path={cfg.path}: {file.name} {error}; copy or download it again") from error
    if unknown := [name for name, stored in header.items() if stored.dtype not in DTYPES]:
        raise NotSliced(f"{unknown[0]} is stored as {header[unknown[0]].dtype}")
    return {
        name: _Stored(file, DTYPES[stored.dtype], stored.shape, stored.offset)
        for name, stored in header.items()
    }


class _Address:
    """Replaces a stored tensor in transformers' conversions, which call it to read the values.

    Column j of the i-th row of all files has the address 1 + (i * TRACED_COLUMNS + j). With `power` 2 the square of the
    address is used instead. A value that a conversion moves, but does not compute, comes out as an address in the first
    trace and as its square in the second.
    """

    def __init__(self, stored: _Stored, first_row: int, power: int, called: list[_Address]) -> None:
        self.stored, self.first_row = stored, first_row
        self._power, self._called = power, called

    def __call__(self) -> torch.Tensor:
        self._called.append(self)
        if (rows := sum(each.stored.rows for each in self._called)) > MOST_TRACED:
            raise NotSliced(f"{rows} rows of weights or more become one")
        first = 1 + self.first_row * TRACED_COLUMNS
        address = torch.arange(first, first + self.stored.rows * TRACED_COLUMNS).view(-1, TRACED_COLUMNS)
        shape = self.stored.shape
        cut = (*shape[:-1], self.stored.columns) if len(shape) > 1 else shape
        return (address[:, : self.stored.columns] ** self._power).reshape(cut)


def _convert(
    skeleton: PreTrainedModel,
    stored: Mapping[str, _Stored],
    conversions: tuple[list[Any], list[Any]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, list[Run]]:
    """Map each name in the model to its runs, by transformers' own `conversions` for ZeRO-3, given twice."""
    try:
        from transformers.integrations.deepspeed import _apply_weight_conversions_to_state_dict as apply
    except ImportError as error:
        raise NotSliced("this version of transformers converts weights otherwise") from error
    called: tuple[list[_Address], list[_Address]] = [], []
    traces = []
    for power in (1, 2):
        marks, first_row = {}, 0
        for name in sorted(stored, key=dot_natural_key):
            marks[name] = _Address(stored[name], first_row, power, called[power - 1])
            first_row += stored[name].rows
        traces.append(apply(skeleton, marks, conversions[power - 1]))
    found: dict[str, list[Run]] = {}
    try:
        for once, squared in zip(*traces, strict=True):
            for name, value in once.items():
                if name not in shapes:
                    continue
                if isinstance(value, _Address):
                    found[name] = _whole(name, value.stored, shapes[name])
                else:
                    found[name] = _traced(name, value, squared[name], called[0], shapes[name])
            for group in called:
                group.clear()
    except NotSliced:
        raise
    except Exception as error:  # a conversion that needs values can raise any error
        cause = error.__cause__ or error
        if isinstance(cause, NotSliced):
            raise cause from error
        raise NotSliced(f"a conversion of weights needs their values ({type(cause).__name__})") from error
    return found


def _whole(name: str, stored: _Stored, shape: tuple[int, ...]) -> list[Run]:
    if stored.shape != shape:
        raise NotSliced(f"{name} is {stored.shape} in the file, {shape} in the model")
    return [Run(0, torch.Size(shape).numel(), stored.file, stored.offset, stored.dtype)]


def _traced(
    name: str, address: torch.Tensor, squared: torch.Tensor, sources: Sequence[_Address], shape: tuple[int, ...]
) -> list[Run]:
    """Return the runs of a weight made of `sources`, from its traced addresses and their squares."""
    first = sources[0].stored
    kinds = {(each.stored.width, len(each.stored.shape) > 1, each.stored.dtype) for each in sources}
    if len(kinds) > 1:
        raise NotSliced(f"{name} is made of unlike tensors")
    rowwise = len(first.shape) > 1
    expected = (*shape[:-1], first.columns) if rowwise else shape
    if (
        address.dtype is not torch.int64
        or tuple(address.shape) != expected
        or (rowwise and shape[-1] != first.width)
    ):
        raise NotSliced(f"the rows of {name} are cut or turned")
    if not torch.equal(squared, address**2):
        raise NotSliced(f"the values of {name} are computed")
    table = address.reshape(-1, first.columns) - 1
    rows = table[:, 0] // TRACED_COLUMNS
    if not torch.equal(table, rows[:, None] * TRACED_COLUMNS + torch.arange(first.columns)):
        raise NotSliced(f"the columns of {name} change places")
    ordered = sorted(sources, key=lambda each: each.first_row)
    firsts = torch.tensor([each.first_row for each in ordered])
    owner = torch.bucketize(rows, firsts, right=True) - 1
    cuts = torch.nonzero((rows[1:] != rows[:-1] + 1) | (owner[1:] != owner[:-1])).view(-1) + 1
    edges = [0, *cuts.tolist(), rows.numel()]
    width, size = first.width, first.dtype.itemsize
    if len(edges) > 65 and rows.numel() * width * size / (len(edges) - 1) < SHORTEST_PIECE_BYTES:
        raise NotSliced(f"{name} is made of {len(edges) - 1} small pieces")
    found = []
    for begin, end in pairwise(edges):
        source = ordered[int(owner[begin])]
        at = source.stored.offset + (int(rows[begin]) - source.first_row) * width * size
        found.append(Run(begin * width, (end - begin) * width, source.stored.file, at, first.dtype))
    return found


def _create(
    config: PretrainedConfig, cfg: ModelConfig, settings: Mapping[str, Any], ds: dict[str, Any]
) -> PreTrainedModel:
    """Create the model with shards that have no values yet."""
    import deepspeed
    from transformers.integrations.deepspeed import prevent_arange_dtype_change
    from transformers.modeling_utils import set_zero3_state

    config = copy.deepcopy(config)
    config.name_or_path = str(cfg.path)
    shards: Any = deepspeed.zero.Init(config_dict_or_path=ds)

    def cut(param: Any) -> None:  # as zero.Init, which would also broadcast rank 0's uninitialised values
        shards._convert_to_deepspeed_param(param)
        param.partition()

    shards._zero_init_param = cut
    with no_init_weights(), prevent_arange_dtype_change(), shards, set_zero3_state():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **settings)
    model.tie_weights()
    return model


def _fill(model: PreTrainedModel, layout: Layout, reader: _Reader) -> None:
    """Read the shards and buffers of this rank, in the order of the files. Padding is set to zero."""
    from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus

    state: dict[str, Any] = model.state_dict(keep_vars=True)
    rank, ranks = distributed.place()
    in_order = sorted(layout.runs, key=lambda name: (layout.runs[name][0].file, layout.runs[name][0].offset))
    with torch.no_grad():
        for name in in_order:
            value, runs = state[name], layout.runs[name]
            start, end = layout._part(name, rank, ranks)
            value._is_hf_initialized = True
            if name not in layout.sharded:
                whole = torch.empty(value.numel(), dtype=value.dtype)
                reader.fill(whole, start, runs)
                value.copy_(whole.view(value.shape))
                continue
            shard = value.ds_tensor
            alone = shard.status is PartitionedParamStatus.AVAILABLE and value.ds_secondary_tensor is None
            if not alone or shard.numel() != -(-value.ds_numel // ranks):
                raise RuntimeError(f"ZeRO-3 holds {name} otherwise than as one part of {ranks} in memory")
            reader.fill(shard.view(-1)[: end - start], start, runs)
            shard.view(-1)[end - start :].zero_()


def _pieces(runs: Sequence[Run], start: int, end: int) -> Iterator[tuple[int, Run, int, int]]:
    """Yield the parts of `runs` in elements `start` to `end`: (place from `start`, run, elements skipped, count)."""
    at = bisect.bisect_right(runs, start, key=lambda run: run.start) - 1
    for run in runs[max(0, at) :]:
        if run.start >= end:
            return
        low, high = max(start, run.start), min(end, run.start + run.elements)
        if low < high:
            yield low - start, run, low - run.start, high - low


class _Reader:
    """Reads ranges of files into tensors and counts the bytes. Files stay open until `close`."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self.bytes = 0
        self._progress, self._total_bytes = progress, total_bytes
        self._files: dict[Path, int] = {}
        self._bounces: dict[str, torch.Tensor] = {}  # pinned for a GPU, by the type of the target device

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def fill(self, flat: torch.Tensor, start: int, runs: Sequence[Run]) -> None:
        """Fill `flat` with the elements from `start` on of the weight that `runs` describe, converted to its dtype."""
        done = 0
        for place, run, skipped, count in _pieces(runs, start, start + flat.numel()):
            if place != done:
                raise RuntimeError(f"{run.file.name}: there is a gap before byte {run.offset}")
            self._read(flat[place : place + count], run, skipped)
            done += count
        if done != flat.numel():
            raise RuntimeError(f"{flat.numel() - done} elements of a weight are in no file")

    def _read(self, out: torch.Tensor, run: Run, skipped: int) -> None:
        at = run.offset + skipped * run.dtype.itemsize
        if out.device.type == "cpu" and out.dtype is run.dtype:
            self._read_bytes(run.file, out, at)
            return
        if (kind := out.device.type) not in self._bounces:  # only pinned memory copies fast to a GPU
            self._bounces[kind] = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=kind == "cuda")
        for part in out.split(BOUNCE_BYTES // run.dtype.itemsize):
            buffer = self._bounces[kind][: part.numel() * run.dtype.itemsize].view(run.dtype)
            self._read_bytes(run.file, buffer, at)
            part.copy_(buffer)
            at += buffer.nbytes

    def _read_bytes(self, file: Path, out: torch.Tensor, at: int) -> None:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        left = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]
        while left.nbytes:
            got = os.preadv(self._files[file], [left[:READ_BYTES]], at)
            if got == 0:
                raise OSError(f"{file.name} has nothing at byte {at:,}, where its header says a weight is")
            self.bytes += got
            left, at = left[got:], at + got
            self._progress(self.bytes, self._total_bytes)
