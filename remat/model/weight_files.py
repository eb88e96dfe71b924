"""Compare the weights in a model's folder with the model, by names and shapes, before any weight is read.

Only the headers of safetensors files are read. Models whose weights transformers converts on load (experts of a
mixture, weights in 4 bits) are skipped, because their names and shapes differ as intended.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from remat.config import paths
from remat.config.options import ModelConfig, ModelInit, PeftMethod

Shapes = dict[str, tuple[int, ...]]
SHOWN = 3


def find_differences(skeleton: PreTrainedModel, cfg: ModelConfig) -> list[str]:
    """Return the problems of the weights in the folder model.path, compared with the model `skeleton` on meta."""
    folder = Path(cfg.path or "")
    if cfg.init is not ModelInit.pretrained or not cfg.path or not folder.is_dir() or _converted(skeleton):
        return []
    held = _headers(folder)
    if not held:
        return []  # other kinds of files, which transformers reads
    prefix = f"{skeleton.base_model_prefix}."
    tied = set(getattr(skeleton, "all_tied_weights_keys", None) or ())
    left_out = getattr(skeleton, "_keys_to_ignore_on_load_missing", None) or ()  # transformers makes these
    missing, other = list[str](), list[str]()
    for name, value in skeleton.state_dict().items():
        found = held.get(name, held.get(name.removeprefix(prefix)))
        if found is None:
            missing += [name] * (name not in tied and not any(re.search(each, name) for each in left_out))
        elif found != tuple(value.shape):
            other.append(f"{name} is {_text(found)}, not {_text(tuple(value.shape))}")
    if not missing and not other:
        return []
    said = [f"{len(other)} of another shape ({'; '.join(other[:SHOWN])})"] if other else []
    said += [f"{len(missing)} missing (for example {', '.join(missing[:SHOWN])})"] if missing else []
    return [
        f"model.path={cfg.path}: the weights are not those of the model that config.json and model.architecture "
        f"describe, a {type(skeleton).__name__}: {' and '.join(said)}. Give the folder as it was downloaded, leave "
        "model.architecture empty, or choose model.init=random"
    ]


def refuse_quantised(config: PretrainedConfig, cfg: ModelConfig, method: PeftMethod) -> list[str]:
    """Return the problem of a model whose published weights are quantised; [] otherwise. `config` is the model's own.

    transformers does not shard a model that it quantises or dequantises, and a plan counts its weights in 16 bits.
    """
    asked: Any = getattr(config, "quantization_config", None)
    if asked is None or cfg.init is not ModelInit.pretrained:
        return []
    kind = asked.get("quant_method") if isinstance(asked, dict) else getattr(asked, "quant_method", None)
    kind = str(getattr(kind, "value", kind))
    if kind == "bitsandbytes" and method is PeftMethod.qlora:
        return []
    return [
        f"model.path={cfg.path} holds weights quantised by {kind}, which cannot be trained: give the same model in 16 "
        "bits, and peft=qlora to train adapters on 4 bits; docs/recipes.md says how to restore gpt-oss from MXFP4"
    ]


def _converted(skeleton: PreTrainedModel) -> bool:
    config: Any = skeleton.config
    return getattr(config, "quantization_config", None) is not None or bool(
        get_model_conversion_mapping(skeleton, add_legacy=False)
    )


def _headers(folder: Path) -> Shapes:
    """Map the name of every weight in the files that transformers reads to its shape.

    Files that are missing have been told of before (`paths.weight_problems`).
    """
    files = paths.weight_files(folder, f"model.path={folder}", problems=[])
    return {name: tensor.shape for file in files for name, tensor in paths.read_header(file).items()}


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
