"""Write the files of a Hugging Face model or of a peft adapter, and check their names and shapes by reading back.

The weights in the files are not those of the module: tied weights are written once, and some weights that
transformers keeps fused (the experts of a mixture) are separate in its files. transformers itself does the conversion,
planned on a model without storage. An adapter's folder is as peft's `save_pretrained` writes it: without base weights,
for `PeftModel.from_pretrained`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.serialization import StateDictSplit
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from remat.config.options import ConfigError
from remat.saving import manifest, shares
from remat.saving.manifest import SaveError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

WEIGHTS = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model{suffix}.safetensors"
METADATA = {"format": "pt", "producer": "remat"}  # "pt" is what transformers looks for


@dataclass(frozen=True)
class Plan:
    """Plan of an export: names, shapes and shards, known before any weight is read."""

    skeleton: Any  # the plain model, without storage
    units: list[list[str]]  # names that are read together; each unit is converted alone
    written: list[list[str]]  # names in the files that each unit becomes
    tied: dict[str, str]  # names left out -> the name that is written for them
    shapes: dict[str, torch.Size]  # of every name in the files
    split: StateDictSplit
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]  # from a unit's weights to the files'

    @property
    def num_params(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def files_of(self, rank: int, ranks: int) -> list[str]:
        """Return the files that `rank` writes: each goes, in order, to the rank with the fewest parameters so far."""
        given, mine = [0] * ranks, []
        for file, names in self.split.filename_to_tensors.items():
            writer = given.index(min(given))
            given[writer] += sum(self.shapes[name].numel() for name in names)
            mine += [file] if writer == rank else []
        return mine


def plan(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    max_shard_size: str,
    conversions: Any,
) -> Plan:
    """Return names, shapes and shards as `save_pretrained` of a plain model would have them.

    Takes seconds, and no memory for weights.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        skeleton = model_class(inference_config(config))
    skeleton.config.dtype = str(dtype).removeprefix("torch.")
    skeleton.config.architectures = [model_class.__name__]
    if conversions is not None:
        skeleton._weight_conversions = conversions
    state = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in skeleton.state_dict().items()
        if name not in (skeleton._keys_to_ignore_on_save or ())
    }
    kept = remove_tied_weights_from_state_dict(dict(state), skeleton)
    objects = {id(skeleton.get_parameter_or_buffer(name)): name for name in kept}
    tied = {name: objects[id(skeleton.get_parameter_or_buffer(name))] for name in state if name not in kept}
    whole = revert_weight_conversion(skeleton, dict(kept))
    units = [[name] for name in kept] if set(whole) == set(kept) else _layers(list(kept))
    files: dict[str, torch.Tensor] = {}
    written: list[list[str]] = []
    for unit in units:
        found = revert_weight_conversion(skeleton, {name: kept[name] for name in unit})
        written.append(list(found))
        for name, value in found.items():
            files[name] = torch.empty_like(value)  # else a slice of a fused weight would count as the whole
    shapes = {name: value.shape for name, value in files.items()}
    if shapes != {name: value.shape for name, value in whole.items()}:
        raise ConfigError(
            f"{model_class.__name__} cannot be exported: transformers joins weights of several layers in its files"
        )
    try:
        split = split_torch_state_dict_into_shards(
            files, filename_pattern=WEIGHTS, max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise ConfigError(f"save.max_shard_size={max_shard_size}: {error}; write for example 5GB") from error
    return Plan(
        skeleton, units, written, tied, shapes, split, lambda unit: revert_weight_conversion(skeleton, unit)
    )


def _layers(names: list[str]) -> list[list[str]]:
    """Group names by decoder layer (the prefix up to the first number); names outside layers stand alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = re.match(r"(?:.*?\.)??\d+\.", name)
        groups.setdefault(match.group() if match else name, []).append(name)
    return list(groups.values())


def inference_config(config: Any) -> Any:
    """Return a copy of `config` for inference, with the key/value cache on, which training switches off."""
    config = copy.deepcopy(config)
    if hasattr(config, "use_cache"):
        config.use_cache = True
    return config


def written_here(folder: Path) -> bool:
    """Return whether the folder's weights were written by this module, so that a newer export may replace them."""
    for file in [*folder.glob("model*.safetensors"), *folder.glob("adapter_model*.safetensors")]:
        with safe_open(file, framework="pt") as reader:
            return (reader.metadata() or {}).get("producer") == METADATA["producer"]
    return False


class Shards:
    """The files that one rank writes. It fills one at a time; a thread writes it while other ranks fill theirs."""

    def __init__(self, folder: Path, plan: Plan, files: Collection[str]) -> None:
        self.folder, self.plan, self.files = folder, plan, files
        self.open: dict[str, dict[str, torch.Tensor]] = {}
        self._pool = ThreadPoolExecutor(1, "remat-export")
        self._writing: Future[None] | None = None

    def takes(self, written: Sequence[str]) -> bool:
        """Return whether any of the weights `written` is for these files. If so, wait until the last file is on disk.

        Raises the error of writing that file.
        """
        takes = any(self.plan.split.tensor_to_filename[name] in self.files for name in written)
        if takes:
            self._wait()
        return takes

    def add(self, values: dict[str, torch.Tensor]) -> None:
        """Add the weights of one unit, under the module's names, and start writing the files that they complete."""
        tensors = self.plan.convert(values)
        for name, tensor in tensors.items():
            file = self.plan.split.tensor_to_filename[name]
            if file not in self.files:
                continue
            if tensor.untyped_storage().nbytes() > tensor.nbytes or not tensor.is_contiguous():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            shard = self.open.setdefault(file, {})
            shard[name] = tensor
            if len(shard) == len(self.plan.split.filename_to_tensors[file]):
                self._wait()
                self._writing = self._pool.submit(_write_file, self.folder / file, self.open.pop(file))

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait for the last file and drop incomplete ones. Raises the error of writing the last file."""
        self._pool.shutdown()
        self.open.clear()
        self._wait()

    def check(self) -> None:
        """Read the headers of these files back. Raises SaveError unless names and shapes are as planned."""
        expected: dict[str, tuple[int, ...]] = {}
        found: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            expected |= {
                name: tuple(self.plan.shapes[name]) for name in self.plan.split.filename_to_tensors[file]
            }
            with safe_open(self.folder / file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (safe_open is no mapping)
                    found[name] = tuple(reader.get_slice(name).get_shape())
        wrong = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
        if wrong:
            raise SaveError(
                f"{wrong[0]} was written as {found.get(wrong[0])}, expected {expected.get(wrong[0])}"
            )


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata=METADATA)
    manifest.sync(path)


def write_index(folder: Path, plan: Plan) -> None:
    """Write the index (weight -> file) if there are several files. Raises SaveError when a file is not there."""
    split = plan.split
    if unseen := [file for file in split.filename_to_tensors if not (folder / file).exists()]:
        raise SaveError(
            f"{folder / unseen[0]} (and {len(unseen) - 1} more), written by another rank, is not there"
        )
    if split.is_sharded:
        metadata = {"total_parameters": plan.num_params, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def find_adapter_config(module: Any) -> PeftConfig | None:
    """Return the adapter's configuration; None for a model without an adapter."""
    configs = getattr(module, "peft_config", None)
    return configs["default"] if configs else None


def plan_adapter(model: PeftModel, dtype: torch.dtype) -> Plan:
    """Plan to write every trained parameter of `model` to one file, because peft reads no shards.

    `model` is live (sharded or whole) or without storage.
    """
    from peft import get_peft_model_state_dict

    def keys(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return get_peft_model_state_dict(model, values, save_embedding_layers=False)

    trained = {
        name: torch.empty(shares.whole_shape(p), dtype=dtype, device="meta")
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    files = keys(trained)
    split = split_torch_state_dict_into_shards(
        files,
        filename_pattern=ADAPTER_WEIGHTS,
        max_shard_size=1 + sum(value.nbytes for value in files.values()),
    )
    shapes = {name: value.shape for name, value in files.items()}
    return Plan(model, [list(trained)], [list(files)], {}, shapes, split, convert=keys)


def build_adapter_skeleton(model_class: Any, config: Any, card: Path) -> PeftModel:
    """Build the adapted model without storage, from the base's configuration and `card`/adapter_config.json."""
    from peft import LoraConfig

    adapter = LoraConfig.from_pretrained(str(card))
    if adapter.megatron_config is not None:  # it names a module, which would be imported
        raise ConfigError(
            f"{card / ADAPTER_CONFIG}: megatron_config is refused: adapters of this program have none"
        )
    return adapter_skeleton(model_class, config, adapter)


def adapter_skeleton(model_class: Any, config: Any, adapter: PeftConfig) -> PeftModel:
    """Build the adapted model without storage. The model keeps and changes `adapter`."""
    from peft import PeftModelForCausalLM

    adapter.inference_mode = False
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        base = model_class(inference_config(config))
        return PeftModelForCausalLM(base, adapter, autocast_adapter_dtype=False)


def write_adapter_config(folder: Path, config: PeftConfig) -> None:
    config = copy.deepcopy(config)
    config.inference_mode = True  # as peft writes it: a loaded adapter is not trained unless asked for
    config.save_pretrained(str(folder))
