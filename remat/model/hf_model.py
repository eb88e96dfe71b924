"""Build a Hugging Face causal language model and describe it. Under ZeRO-3 it is sharded while it is created."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from remat.config import paths
from remat.config.options import Attention, ConfigError, ModelConfig, ModelInit, ModelLoad, Precision
from remat.config.units import format_size
from remat.machine import distributed, rng
from remat.machine.host_memory import HostPeak
from remat.model import own_slices, positions
from remat.model.own_slices import Layout, NotSliced, Progress

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class ModelFacts:
    """Sizes in numbers of parameters, counted on the meta device. All that is not frozen is trained."""

    num_params: int
    largest_param: int
    num_trainable_params: int
    largest_trainable_param: int
    class_name: str
    quantised_weights: tuple[int, ...] = ()  # elements of each matrix held in 4 bits
    trained_shapes: tuple[tuple[int, ...], ...] = ()  # in the order of the model


@dataclass(frozen=True)
class Loaded:
    """How one rank read its weights, with time and memory.

    `because` is the reason for not reading own slices; "" if they were read, or if ZeRO does not shard the weights.
    `read_bytes` is None if transformers read them. `peak_bytes` is host memory beyond that before the reading.
    """

    way: ModelLoad
    because: str
    read_bytes: int | None
    seconds: float
    peak_bytes: int


def describe_loaded(loaded: Sequence[Loaded]) -> str:
    """Describe how the weights were read, from the `Loaded` of each rank."""
    slowest_s = max(each.seconds for each in loaded)
    first = loaded[0]
    if first.way is ModelLoad.own_slices:
        read = [each.read_bytes or 0 for each in loaded]
        share = f"{format_size(max(read))} of {format_size(sum(read))}"
        return f"each rank read its own slices, {share}, in {slowest_s:.3g} s"
    if first.because:
        return f"rank 0 read all of them in {slowest_s:.3g} s, and no rank its own slices: {first.because}"
    return f"read by every rank in {slowest_s:.3g} s"


def shape_config(cfg: ModelConfig) -> PretrainedConfig:
    """Return a configuration that is sufficient for counting and planning.

    With `architecture` neither network nor folder is needed.
    """
    return positions.stretch(_from_fields(cfg) if cfg.architecture else _from_path(cfg), cfg)


def load_config(cfg: ModelConfig) -> PretrainedConfig:
    """Return the configuration that the model is built with. Reads no weight.

    Pretrained weights come with their own configuration, which has more fields than `architecture` (rotary scaling, for
    example). Every field of `architecture` must agree with it. Raises ConfigError naming the option and the value.
    """
    if cfg.init is ModelInit.random:
        return shape_config(cfg)
    config = _from_path(cfg)
    differing = [
        f"{name}={value} (the folder has {getattr(config.get_text_config(), name, None)})"
        for name, value in cfg.architecture.items()
        if getattr(config.get_text_config(), name, None) != value
    ]
    if differing:
        raise ConfigError(
            f"model.path={cfg.path} has other sizes than model.architecture: {', '.join(differing)}. Use model=hf "
            "for a model of your own, or correct the architecture"
        )
    return positions.stretch(config, cfg)


def _from_fields(cfg: ModelConfig) -> PretrainedConfig:
    fields = dict(cfg.architecture)
    model_type = fields.pop("model_type", None)
    if not model_type:
        raise ConfigError(
            "model.architecture needs model_type, for example model.architecture.model_type=llama"
        )
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # a value of the wrong type can raise any error anywhere in the library
        raise ConfigError(
            f"model.architecture={cfg.architecture}: {_first_line(error)}; correct the field"
        ) from error
    return _sound(config, f"model.architecture={cfg.architecture}")


def _from_path(cfg: ModelConfig) -> PretrainedConfig:
    if missing := paths.model_problems(cfg):
        raise ConfigError("\n".join(missing))
    try:
        config = AutoConfig.from_pretrained(str(cfg.path), trust_remote_code=cfg.trust_remote_code)
    except Exception as error:  # a damaged file can raise any error anywhere in the library
        raise ConfigError(
            f"model.path={cfg.path}: {_first_line(error)}; give a folder with config.json, or a hub name that this "
            "machine can reach"
        ) from error
    return _sound(config, f"model.path={cfg.path}")


def _sound(config: PretrainedConfig, option: str) -> PretrainedConfig:
    """Check and return `config`. Raises ConfigError for several decoders, and for a depth outside 1 to MOST_LAYERS."""
    try:
        depth = getattr(config.get_text_config(), "num_hidden_layers", 1)
    except ValueError as error:  # the error may list several problems
        raise ConfigError(f"{option}: {_first_line(error)}; choose a model with one decoder") from error
    if type(depth) is not int or not 0 < depth <= MOST_LAYERS:
        raise ConfigError(f"{option}: num_hidden_layers={depth} must be a whole number, 1 to {MOST_LAYERS}")
    config.use_cache = False
    return config


def with_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """Return `config` with only these layers. Lists with an entry per layer keep only their entries."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    depth = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    return found


def hidden_size(config: PretrainedConfig) -> int:
    """Return the width of a hidden state. Raises ConfigError for a config without one."""
    width = getattr(config.get_text_config(), "hidden_size", None)
    if type(width) is not int or width < 1:
        raise ConfigError(
            f"model_type={config.model_type}: its config has no one hidden_size ({width}): remat trains decoders whose "
            "layers all have one width; choose another model"
        )
    return width


def skeleton(config: PretrainedConfig, cfg: ModelConfig) -> PreTrainedModel:
    """Build the model on the meta device: its modules without memory, in a second or two for 70B.

    The package of flash attention is needed only on a machine with a GPU, not to plan for another one. Raises
    ConfigError for a model that is no causal language model or lacks the chosen attention.
    """
    flash = cfg.attention is Attention.flash_attention_2
    elsewhere = flash and not (torch.cuda.is_available() or cfg.trust_remote_code)
    try:
        with torch.device("meta"):
            net: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                trust_remote_code=cfg.trust_remote_code,
                attn_implementation=str(Attention.eager if elsewhere else cfg.attention),
            )
        if elsewhere:
            _name_flash(net)
        return net.to("meta")  # type: ignore[arg-type]  # torch.normal(mean, std, size=...) makes host tensors
    except Exception as error:  # sizes that do not fit each other can raise any error anywhere in the library
        known = isinstance(error, (ValueError, ImportError))
        about_attention = known and ("attn" in str(error) or "attention" in str(error).lower())
        problem = "not a causal language model" if known else "the model cannot be built from its config"
        if about_attention:
            problem = f"model.attention={cfg.attention} cannot be had"
        remedy = "; model.attention=eager always works" if about_attention else ""
        raise ConfigError(
            f"{problem} (model.path={cfg.path}, model_type={config.model_type}): {_first_line(error)}{remedy}"
        ) from error


def _name_flash(net: PreTrainedModel) -> None:
    """Set flash attention in every config of `net`. Raises ValueError for a model that does not support it."""
    others = getattr(net, "_compatible_flash_implementations", None)
    if not net._supports_flash_attn or (others and str(Attention.flash_attention_2) not in others):
        instead = f", but by {', '.join(others)}" if others else ""
        raise ValueError(f"{type(net).__name__} does not compute attention by this package{instead}")
    for config in configs_of(net):
        config._attn_implementation = str(Attention.flash_attention_2)


def model_of(module: Any) -> Any:
    """Return the transformers model in an engine's module: a stage's part of it, else the module itself."""
    return getattr(module, "transformers_model", module)


def configs_of(net: nn.Module) -> list[PretrainedConfig]:
    """Return the different configs of the modules of `net`."""
    every: list[Any] = [getattr(module, "config", None) for module in net.modules()]
    found = {id(config): config for config in every if isinstance(config, PretrainedConfig)}
    return list(found.values())


def facts(model: Any) -> ModelFacts:
    """Count the parameters of a skeleton."""
    sizes = [p.numel() for p in model.parameters()]
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    return ModelFacts(
        num_params=sum(sizes),
        largest_param=max(sizes),
        num_trainable_params=sum(trained),
        largest_trainable_param=max(trained),
        class_name=type(model).__name__,
        trained_shapes=tuple(tuple(p.shape) for p in model.parameters() if p.requires_grad),
    )


def build(
    cfg: ModelConfig,
    config: PretrainedConfig,
    *,
    precision: Precision,
    ds_config: dict[str, Any],
    zero_stage: int,
    seed: int,
    resuming: bool = False,
    loading: dict[str, Any] | None = None,
    onto: torch.device | None = None,
    progress: Progress = lambda done, total: None,
    told: Callable[[Loaded], object] = lambda loaded: None,
) -> PreTrainedModel:
    """Build the model on this rank; under ZeRO-3 only this rank's shard of every parameter. Collective.

    `resuming` builds with random values, because a saved state replaces all of them later. `loading` has further
    arguments of `from_pretrained`. Under ZeRO-3 each rank reads its own slices of the files where possible. Below
    ZeRO-3 pretrained weights go one by one from their files to the device `onto`, so that no rank holds all of them in
    host memory. `progress` is called while slices are read, `told` after weights were read. Raises ConfigError when
    weights are missing or the attention implementation is not available.
    """
    settings: dict[str, Any] = {"dtype": DTYPES[precision], "attn_implementation": str(cfg.attention)}
    loading = loading or ({"device_map": {"": onto}} if onto is not None and zero_stage < 3 else {})
    sharded = ds_config if zero_stage == 3 else None
    model: PreTrainedModel
    try:
        if cfg.init is ModelInit.pretrained and not resuming:
            model, loaded = _load(cfg, config, settings, loading, sharded, progress)
            told(loaded)
        else:
            settings["trust_remote_code"] = cfg.trust_remote_code
            with _zero3(sharded):
                model = _random(config, settings, sharded=sharded is not None, seed=seed)
    except OSError as error:
        hint = "" if cfg.allow_pickle else "; .bin weights are refused unless model.allow_pickle=true"
        raise ConfigError(f"model.path={cfg.path}: {_first_line(error)}{hint}") from error
    except SafetensorError as error:
        found = paths.weight_problems(cfg) or [
            f"model.path={cfg.path}: {_first_line(error)}; download it again"
        ]
        raise ConfigError("\n".join(found)) from error
    if cfg.init is ModelInit.pretrained and resuming:
        take_generation_config(cfg, model)
    model.config.use_cache = False
    model.train()
    return model


def _load(
    cfg: ModelConfig,
    config: PretrainedConfig,
    settings: dict[str, Any],
    loading: dict[str, Any],
    ds: dict[str, Any] | None,
    progress: Progress,
) -> tuple[PreTrainedModel, Loaded]:
    """Read pretrained weights; under ZeRO-3 (with its dict `ds`) in own slices where possible. Collective."""
    model: PreTrainedModel
    began, read_bytes = time.monotonic(), None
    with HostPeak() as host:
        layout, because = _agree_on_slices(cfg, config, ds, loading) if ds is not None else (None, "")
        if ds is not None and layout is not None:
            model, read_bytes = own_slices.load(
                config, cfg, layout, settings=settings, ds=ds, progress=progress
            )
            take_generation_config(cfg, model)
        else:
            with _zero3(ds):
                model = _from_pretrained(cfg, config, settings | loading)
    way = ModelLoad.from_pretrained if layout is None else ModelLoad.own_slices
    return model, Loaded(way, because, read_bytes, time.monotonic() - began, host.peak_bytes)


def _agree_on_slices(
    cfg: ModelConfig, config: PretrainedConfig, ds: dict[str, Any], loading: dict[str, Any]
) -> tuple[Layout | None, str]:
    """Return the layout of the files if every rank can read its own slices, else None and the reason. Collective.

    Raises ConfigError on every rank if slices are required and cannot be read, or if a file is damaged on any rank.
    """
    layout, because, problem = None, own_slices.refuse(cfg, ds), ""
    if cfg.load is ModelLoad.from_pretrained:
        because = "model.load=from_pretrained"
    elif loading:
        because = "transformers changes the weights while it reads them"
    if because is None:
        try:
            layout = own_slices.locate(skeleton(config, cfg), cfg)
        except NotSliced as error:
            because = str(error)
        except ConfigError as error:
            problem = str(error)
        except OSError as error:
            problem = f"model.path={cfg.path}: {_first_line(error)}"
    found = distributed.gather((problem, because, layout and layout.digest))
    if problem := next((text for text, _, _ in found if text), ""):
        raise ConfigError(problem)
    because = next((reason for _, reason, _ in found if reason), None)
    if because is None and len({digest for _, _, digest in found}) > 1:
        because = "the ranks do not see the same files"
    if because and cfg.load is ModelLoad.own_slices:
        raise ConfigError(own_slices.refusal(cfg, because))
    return (None, because) if because else (layout, "")


def _from_pretrained(cfg: ModelConfig, config: PretrainedConfig, settings: dict[str, Any]) -> PreTrainedModel:
    model: PreTrainedModel
    report: dict[str, Any]
    model, report = AutoModelForCausalLM.from_pretrained(
        str(cfg.path),
        config=config,
        trust_remote_code=cfg.trust_remote_code,
        use_safetensors=None if cfg.allow_pickle else True,
        output_loading_info=True,
        **settings,
    )  # type: ignore[misc]
    _refuse_partial(cfg, report)
    return model


def take_generation_config(cfg: ModelConfig, model: Any) -> None:
    """Give `model` the generation settings beside its weights; without any it keeps its own."""
    with contextlib.suppress(OSError):  # many folders have no such file
        model.generation_config = GenerationConfig.from_pretrained(str(cfg.path))


def check_vocabulary(config: PretrainedConfig, vocabulary: int, tokenizer: str) -> None:
    """Raise ConfigError when the tokenizer has ids beyond the embedding, which is not resized after sharding."""
    size = config.get_text_config().vocab_size
    if vocabulary > size:
        raise ConfigError(
            f"model.tokenizer={tokenizer} has {vocabulary} tokens, the model's vocabulary only {size}: "
            "use the model's own tokenizer or a larger model.architecture.vocab_size"
        )


def assert_sharded(model: nn.Module, world_size: int) -> int:
    """Check that ZeRO-3 holds every parameter as a shard of about 1/world_size; return this rank's shard bytes.

    Raises RuntimeError naming parameters that are whole, or if the shards' total differs by more than padding.
    """
    whole = [name for name, p in model.named_parameters() if not hasattr(p, "ds_id")]
    if whole:
        raise RuntimeError(
            f"ZeRO-3 did not partition {whole[:5]} (of {len(whole)}): the model is on every rank"
        )
    params: list[Any] = list({id(p): p for p in model.parameters()}.values())
    local = sum(p.ds_tensor.ds_numel for p in params)
    expected = sum(p.ds_numel for p in params) / world_size
    if not expected <= local <= expected + len(params):
        raise RuntimeError(f"ZeRO-3 shards hold {local} elements on this rank, expected about {expected:.0f}")
    return sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in params)


def _random(config: PretrainedConfig, settings: dict[str, Any], *, sharded: bool, seed: int) -> PreTrainedModel:
    """Build the model with random values that, on a CPU, do not depend on the ZeRO stage.

    All values are drawn at initialisation. Under ZeRO-3 transformers creates without initialising and then initialises
    gathered modules on rank 0. Below ZeRO-3, creation would draw first, so it is prevented from drawing. With a GPU the
    values are drawn there, because a host draws bf16 on one core, which takes minutes for 7B.
    """
    rng.seed(seed)
    if sharded:
        return AutoModelForCausalLM.from_config(config, **settings)
    there = torch.device("cuda") if torch.cuda.is_available() else contextlib.nullcontext()
    with no_init_weights(), there:
        model = AutoModelForCausalLM.from_config(config, **settings)
    rng.seed(seed)
    model.initialize_weights()
    model.tie_weights()
    return model


def _refuse_partial(cfg: ModelConfig, report: dict[str, Any]) -> None:
    """Raise ConfigError for missing weights, which transformers would only warn of and fill with random values."""
    missing, mismatched = sorted(report["missing_keys"]), list(report["mismatched_keys"])
    if missing or mismatched:
        raise ConfigError(
            f"model.path={cfg.path} does not hold this model's weights: {len(missing)} missing (for example "
            f"{missing[:3]}), {len(mismatched)} of another shape (for example {mismatched[:2]}). Leave "
            "model.architecture empty so that the folder's own config.json is used, or choose model.init=random"
        )


@contextmanager
def _zero3(ds_config: dict[str, Any] | None) -> Iterator[None]:
    """Keep an HfDeepSpeedConfig alive while the context is entered; without it transformers does not shard."""
    if ds_config is None:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    alive = HfDeepSpeedConfig(ds_config)
    try:
        yield
    finally:
        del alive
        unset_hf_deepspeed_config()


def _first_line(error: Exception) -> str:
    """Return the first line of an error, after its type unless the message is written for users."""
    text = (str(error).strip().splitlines() or [""])[0][:1000]
    return text if text and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"
