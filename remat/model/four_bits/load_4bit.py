"""Read a pretrained base under ZeRO-3 directly into 4-bit shards. No rank ever holds the model whole or in 16 bits.

Matrices are read one after another. Each rank reads a part of the rows and quantises it. The parts are joined in 4 bits
and then sharded. Weights are quantised in blocks of 64, so the parts give the same bytes as the whole matrix. Rank 0
reads everything else in the model, and zero.Init sends it to the others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from bitsandbytes.functional import quantize_4bit, quantize_blockwise
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from remat.config import paths
from remat.config.options import ModelConfig, ModelInit
from remat.machine import distributed
from remat.model import hf_model
from remat.model.four_bits import sharded_4bit
from remat.model.four_bits.layout_4bit import BLOCK, BLOCK_OF_CONSTANTS, Layout
from remat.model.own_slices import DTYPES

FILES = "model*.safetensors"
Paths = Callable[[nn.Module], Sequence[str]]


class Elsewhere(Exception):
    """Raised with the reason why transformers must read this model, which also needs memory for 16-bit shards."""


def load(
    cfg: ModelConfig,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    ds_config: dict[str, Any],
    device: torch.device,
    find_matrices: Paths,
) -> tuple[PreTrainedModel, int]:
    """Build the model of `config` from the files of `cfg`, with the matrices of its decoder layers in 4-bit shards.

    Returns it and the bytes that this rank read. Quantises on `device`. Collective. Raises Elsewhere on every rank for
    a model that only transformers can read.
    """
    with contextlib.ExitStack() as stack:
        model: Any = None
        files: Files | None = None
        reason = ""
        try:
            model, files = look(cfg, config, dtype, stack)
        except Elsewhere as found:
            reason = str(found)
        if reasons := [each for each in distributed.gather(reason) if each]:
            raise Elsewhere(reasons[0])
        assert files is not None
        _fill(model, files, find_matrices, dtype, ds_config, device)
    model.is_loaded_in_4bit = True  # peft reads this
    hf_model.take_generation_config(cfg, model)
    model.config.use_cache = False
    trained: PreTrainedModel = model.train()
    return trained, files.read_bytes


def look(
    cfg: ModelConfig, config: PretrainedConfig, dtype: torch.dtype, stack: contextlib.ExitStack
) -> tuple[Any, Files]:
    """Return the model without weights, and its files, open until `stack` is closed. Reads only their headers.

    Raises Elsewhere for a model that only transformers can read.
    """
    if cfg.init is not ModelInit.pretrained:
        raise Elsewhere("its weights are drawn at random")
    if cfg.trust_remote_code:
        raise Elsewhere("model.trust_remote_code=true: the model's own code may read its files otherwise")
    try:
        model = _create(cfg, config, dtype)
        return model, Files(_folder(cfg), model, stack)
    except (OSError, ValueError, SafetensorError) as error:  # transformers will report it in full
        raise Elsewhere(f"{type(error).__name__}: {error}") from error


def is_read_in_parts(linear: nn.Module) -> bool:
    """Return whether each rank can read a part of the rows: they are whole blocks and not transposed in the file."""
    weight: Any = linear.weight
    return not isinstance(linear, Conv1D) and weight.shape[-1] % BLOCK == 0


def _create(cfg: ModelConfig, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """Build the model with its buffers and without weights. Raises Elsewhere if transformers would convert weights."""
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=str(cfg.attention)
        )
    model.tie_weights()
    if get_model_conversion_mapping(model, add_legacy=False):
        raise Elsewhere("transformers converts its weights while it reads them")
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        raise Elsewhere("transformers keeps some of its modules in fp32")
    return model


def _folder(cfg: ModelConfig) -> Path:
    """Return the folder of the weights; download it if model.path is a hub name. Raises OSError."""
    folder = paths.expand(cfg.path or "")
    if folder.is_dir():
        return folder
    return Path(snapshot_download(str(cfg.path), allow_patterns=[FILES, "*.json"]))


class Files:
    """The safetensors files of a model, open until `stack` is closed, and which file holds each weight."""

    def __init__(self, folder: Path, model: Any, stack: contextlib.ExitStack) -> None:
        held: dict[str, Any] = {}
        problems: list[str] = []
        for path in paths.weight_files(folder, str(folder), problems):
            file = stack.enter_context(safe_open(path, framework="pt"))
            held |= dict.fromkeys(file.keys(), file)
        if problems or not held:
            raise Elsewhere("; ".join(problems) or f"{folder} has no {FILES}")
        self.read_bytes = 0  # by this rank so far
        prefix = f"{model.base_model_prefix}."
        self._found: dict[int, tuple[Any, str]] = {}  # id of a weight, which may have two names -> (file, name)
        state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        for name, value in state.items():
            for key in (name, name.removeprefix(prefix), prefix + name):
                if key in held:
                    self._found[id(value)] = held[key], key
                    break
        self._values = list(state.values())  # keeps the weights alive, so that their ids stay valid
        for name, value in state.items():
            if id(value) not in self._found:
                raise Elsewhere(f"{name} is in no file by that name")
            if tuple(value.shape) != self.shape(value):
                raise Elsewhere(f"{name} has another shape in its file")

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(self._slice(value).get_shape())

    def read(self, value: torch.Tensor, rows: slice | None = None) -> torch.Tensor:
        """Read the weight `value` from its file, or only `rows` of it."""
        part = self._slice(value)
        found: torch.Tensor = part[rows] if rows is not None else part[:] if value.dim() else part[...]
        self.read_bytes += found.nbytes
        return found

    def width_bytes(self, value: torch.Tensor) -> int:
        """Return the bytes of one element of `value` in its file."""
        return DTYPES[self._slice(value).get_dtype()].itemsize

    def has(self, value: torch.Tensor) -> bool:
        return id(value) in self._found

    def _slice(self, value: torch.Tensor) -> Any:
        file, key = self._found[id(value)]
        return file.get_slice(key)


@torch.no_grad()
def _fill(
    model: Any, files: Files, find_matrices: Paths, dtype: torch.dtype, ds: dict[str, Any], device: torch.device
) -> None:
    quantised = find_matrices(model)
    for path in quantised:
        old = model.get_submodule(path)
        flat = _quantise(files, old, Layout(sharded_4bit.shape_of(old), dtype), device)
        new = sharded_4bit.replacement(old, flat, dtype)
        del flat
        sharded_4bit.shard([("weight", new.weight)], ds)
        model.set_submodule(path, new)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        whole = []
        for name, value in list(module.named_parameters(recurse=False)):
            if value.is_meta and id(value) not in made:
                made[id(value)] = nn.Parameter(
                    _from_first(files, value, device), requires_grad=value.requires_grad
                )
                whole.append((name, made[id(value)]))
            if id(value) in made:
                setattr(module, name, made[id(value)])
        if whole:
            sharded_4bit.shard(whole, ds)
        for name, buffer in list(module.named_buffers(recurse=False)):
            read = files.read(buffer).to(buffer.dtype) if files.has(buffer) else buffer
            module._buffers[name] = read.to(device)


def _from_first(files: Files, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Read a weight on rank 0; on other ranks return empty memory for it. Sharding sends the values."""
    if dist.get_rank() == 0:
        return files.read(value).to(device, value.dtype)
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _quantise(files: Files, old: Any, layout: Layout, device: torch.device) -> torch.Tensor:
    """Return the flat bytes of a matrix. Each rank reads and quantises its part of the rows. Collective.

    If rows are not whole blocks, or the file holds the matrix transposed, every rank reads and quantises all of it.
    """
    rows, columns = layout.shape
    if not is_read_in_parts(old):
        whole = files.read(old.weight).to(device, layout.dtype)
        return sharded_4bit.close(whole.T if isinstance(old, Conv1D) else whole, layout)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    most = math.ceil(rows / ranks)
    own = files.read(old.weight, slice(min(rank * most, rows), min((rank + 1) * most, rows)))
    part = torch.zeros(most, columns, dtype=layout.dtype, device=device)
    part[: own.shape[0]] = own.to(device, layout.dtype)
    del own
    packed, state = quantize_4bit(part, blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
    del part
    cut, _, _, _ = layout.part_bytes
    absmax = _gathered(state.absmax)[: layout.num_blocks]
    mean = absmax.mean()  # over all constants, as in bitsandbytes
    constants, nested = quantize_blockwise(absmax - mean, blocksize=BLOCK_OF_CONSTANTS)
    return sharded_4bit.joined(layout, _gathered(packed.view(-1))[:cut], constants, nested.absmax, mean)


def _gathered(part: torch.Tensor) -> torch.Tensor:
    """All-gather `part`, which has the same length on every rank. Collective."""
    whole = part.new_empty(dist.get_world_size() * part.numel())
    dist.all_gather_into_tensor(whole, part)
    return whole
