"""What each of two ranks runs in test_saving_ranks: functions of keyword arguments, process group already up."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import safe_get_full_fp32_param
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
)

from remat.config.options import Attention, ModelConfig, OptimConfig, OptimName, OptimStates, Precision
from remat.machine import distributed, ops
from remat.model import optimizer
from remat.model.hf_model import build
from remat.saving import disk_space, load, manifest, save
from remat.saving import frozen as frozen_weights
from remat.saving.exports import export, hf_files, read_back

VOCAB, NORM = 97, "model.norm.weight"


def llama(
    config: dict[str, Any], *, tie: bool, precision: str, seed: int, hidden_size: int = 32
) -> PreTrainedModel:
    """Odd sizes, so that ZeRO pads; attention dropout, so that a step draws random numbers."""
    shape = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size - 13,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        attention_dropout=0.1,
        tie_word_embeddings=tie,
    )
    return build(
        ModelConfig(attention=Attention.eager),
        shape,
        precision=Precision(precision),
        ds_config=config,
        zero_stage=config["zero_optimization"]["stage"],
        seed=seed,
    )


def mixtral() -> PreTrainedModel:
    shape = MixtralConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        num_local_experts=4,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(shape, attn_implementation="eager")


def engine(
    stage: int,
    *,
    offload: bool = False,
    precision: str = "fp32",
    seed: int = 0,
    tie: bool = False,
    frozen: bool = False,
    moe: bool = False,
    nvme: Path | None = None,
    optim: str | None = None,
    states: str = "fp32",
) -> Any:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 100  # norms stay whole, everything else is partitioned
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if nvme is not None:
        ops.ensure("async_io", print)  # as a run does: DeepSpeed's own load would wait for any lock left behind
        Init.param_id = 0  # swap files are named by it; a resumed run is a fresh process
        place = {"device": "nvme", "nvme_path": str(nvme), "pin_memory": False}
        # Groups of 280 000 elements on a rank are swapped, the rest and the norms are too small (below 1 MiB) to be.
        zero |= {"offload_optimizer": place | {"buffer_count": 4}, "sub_group_size": 280_000}
        zero["offload_param"] = {"device": "cpu"} if offload else place | {"buffer_size": 200_000}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {
            "enabled": precision == "bf16",
            "bf16_master_weights_and_grads": states != "fp32",
            "bf16_optimizer_states": states == "bf16",
        },
    }
    seed_all(seed)
    model = (
        mixtral()
        if moe
        else llama(config, tie=tie, precision=precision, seed=seed, hidden_size=256 if nvme else 32)
    )
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "layers.1" in name
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) == 1], "weight_decay": 0.0},
    ]
    built: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1e-2)
    if optim is not None:
        if optim == "lion" and offload:
            ops.ensure("cpu_lion", print)
        ops.ensure("cpu_adam", print)
        cfg = OptimConfig(name=OptimName(optim), lr=1e-3, states=OptimStates(states))
        built = optimizer.build(model, cfg, offloaded=offload, device=torch.device("cpu"))
    with optimizer.held_still(built):
        return deepspeed.initialize(model=model, optimizer=built, config=config)[0]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(0, VOCAB, (1, 12), generator=generator)


def train(target: Any, first: int, last: int) -> list[float]:
    """Steps first..last-1; the loss is jittered by numpy's and python's generators, so that they matter too."""
    target.train()
    losses = []
    for step in range(first, last):
        ids = tokens(step)
        loss = target(input_ids=ids, labels=ids).loss * (1 + 0.1 * np.random.rand() + 0.1 * random.random())
        target.backward(loss)
        target.step()
        losses.append(loss.item())
    return losses


def digest(target: Any) -> str:
    """Hash of all this rank's tensors and numbers that training goes on from: weights, masters, moments, steps."""
    sha = hashlib.sha256()

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sha.update(value.detach().float().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(
                value.keys() - {"amsgrad", "differentiable"}, key=str
            ):  # DeepSpeed's kernels of the host get them at a load, unread
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, (int, float)):
            sha.update(str(value).encode())

    walk(list(target.module.parameters()))
    walk([parameter.ds_tensor for parameter in target.module.parameters() if hasattr(parameter, "ds_tensor")])
    walk(target.optimizer.state_dict())
    return sha.hexdigest()


def logits(target: Any) -> torch.Tensor:
    module = getattr(target, "module", target)
    module.eval()
    with torch.no_grad():
        return module(input_ids=torch.arange(12).view(1, 12)).logits


def resume_case(
    *,
    folder: Path,
    stage: int,
    offload: bool = False,
    precision: str,
    tie: bool = False,
    frozen: bool = False,
    nvme: Path | None = None,
    optim: str | None = None,
    states: str = "fp32",
) -> dict[str, Any]:
    """Two steps, save, resume in a differently seeded engine, two more; against four steps in one go."""
    settings: dict[str, Any] = {
        "offload": offload,
        "precision": precision,
        "tie": tie,
        "frozen": frozen,
        "optim": optim,
        "states": states,
    }

    def start(name: str, seed: int = 0) -> Any:
        return engine(stage, seed=seed, nvme=nvme and nvme / name, **settings)

    whole = start("whole")
    expected = train(whole, 0, 4)
    first = start("first")
    losses = train(first, 0, 2)
    saved = save.save(first, folder, step=2, client_state={"step": 2, "position": [0, 4]}, keep=2)
    continued = losses + train(first, 2, 4)
    found = load.find_newest(folder)
    assert found.state is not None, found.notes
    # A frozen weight is not saved: it must come from the same place as in the saved run.
    second = start("second", seed=0 if frozen else 9)
    torch.manual_seed(5)
    load.load(second, found.state)
    if optim is not None:
        cfg = OptimConfig(name=OptimName(optim), lr=1e-3, states=OptimStates(states))
        optimizer.set_options(second.optimizer, cfg)
    losses += train(second, 2, 4)
    return {
        "expected": expected,
        "continued": continued,
        "losses": losses,
        "digests": (digest(whole), digest(first), digest(second)),
        "client_state": found.state.client_state,
        "global_steps": second.global_steps,
        "saved": saved,
        "needed_bytes": disk_space.needed_bytes(first),
        "info": found.state.info,
    }


def frozen_mismatch_case(*, folder: Path) -> dict[str, Any]:
    first = engine(3, frozen=True)
    train(first, 0, 1)
    save.save(first, folder, step=1, client_state={}, keep=1)
    state = load.find_newest(folder).state
    assert state is not None
    return {"error": _error(lambda: load.load(engine(3, frozen=True, seed=9), state))}


def layout_mismatch_case(*, folder: Path) -> dict[str, Any]:
    first = engine(2)
    train(first, 0, 1)
    save.save(first, folder, step=1, client_state={}, keep=1)
    state = load.find_newest(folder).state
    assert state is not None
    return {"error": _error(lambda: load.load(engine(2, tie=True), state))}


def failure_case(*, folder: Path, failing_rank: int, where: str) -> dict[str, Any]:
    """One rank cannot write; then the same engine trains and saves again."""
    target = engine(3)
    train(target, 0, 1)
    save.save(target, folder, step=1, client_state={"step": 1}, keep=2)
    full = OSError(28, "No space left on device")
    if dist.get_rank() == failing_rank:
        owner, name = {
            "engine": (target.checkpoint_engine, "save"),
            "hash": (manifest, "describe"),
            "manifest": (manifest, "write"),
        }[where]
        original = getattr(owner, name)
        setattr(owner, name, _raiser(full))
    error = _error(lambda: save.save(target, folder, step=2, client_state={"step": 2}, keep=2))
    if dist.get_rank() == failing_rank:
        setattr(owner, name, original)
    after_failure = _names(folder / "saved")
    problems = manifest.verify(folder / "saved" / "step-000001")
    train(target, 1, 2)
    save.save(target, folder, step=3, client_state={"step": 3}, keep=2)
    return {
        "error": error,
        "after_failure": after_failure,
        "problems": problems,
        "after_retry": _names(folder / "saved"),
    }


def damage_case(*, folder: Path) -> dict[str, Any]:
    """Three saves; the newest is cut short in rank 1's file, and both ranks must agree on the one before."""
    target = engine(2)
    for step in (1, 2, 3):
        train(target, step - 1, step)
        save.save(target, folder, step=step, client_state={"step": step}, keep=2)
    before = _names(folder / "saved")
    if dist.get_rank() == 0:
        victim = next((folder / "saved" / "step-000003" / "engine").glob("*pp_rank_1_*optim_states.pt"))
        victim.write_bytes(victim.read_bytes()[:-1])
    distributed.barrier()
    found = load.find_newest(folder)
    assert found.state is not None
    return {"before": before, "step": found.state.step, "notes": found.notes}


class Evil:
    """A pickle that makes a folder when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def code_case(*, folder: Path, stage: int) -> dict[str, Any]:
    """Each file of a state in turn runs code: found by the look before, and by the load of a launch without one."""
    target, marker = engine(stage), folder / "ran"
    train(target, 0, 1)
    save.save(target, folder, step=1, client_state={"step": 1}, keep=1)
    state = load.find_newest(folder).state
    assert state is not None
    report: dict[str, Any] = {"refused": {}, "loading": {}}

    def with_code(files: list[Path], action: Any) -> str:
        kept = {file: file.read_bytes() for file in files}
        distributed.barrier()
        if dist.get_rank() == 0:
            for file in files:
                torch.save({"module": Evil(marker)}, file)
        distributed.barrier()
        error = _error(action)
        distributed.barrier()
        if dist.get_rank() == 0:
            for file, content in kept.items():
                file.write_bytes(content)
        distributed.barrier()
        return error

    files = sorted(state.path.rglob("*.pt"))
    for file in files:
        report["refused"][file.name] = with_code([file], lambda: load.refuse_code(state))
    for kind in ("rank-0000", "model_states", "optim_states"):
        same = [file for file in files if kind in file.name]
        report["loading"][kind] = with_code(same, lambda: load.load(target, state))
    load.refuse_code(state)
    load.load(target, state)
    return report | {"ran": marker.exists()}


def export_case(
    *,
    folder: Path,
    stage: int,
    offload: bool,
    precision: str,
    tie: bool,
    max_shard_size: str,
    moe: bool = False,
    nvme: Path | None = None,
) -> dict[str, Any]:
    """Export in the run's own dtype and in fp32, compare with the live model, train on as if nothing had been."""
    settings: dict[str, Any] = {"offload": offload, "precision": precision, "tie": tie, "moe": moe}
    control = engine(stage, nvme=nvme and nvme / "control", **settings)
    train(control, 0, 3)
    target = engine(stage, nvme=nvme and nvme / "target", **settings)
    train(target, 0, 2)
    masters = _masters(target)
    with _watch_files() as wrote:
        result = export.export(target, folder / "own", export.Form(max_shard_size), tokenizer=None)
    in_fp32 = export.export(target, folder / "fp32", export.Form(max_shard_size, torch.float32), tokenizer=None)
    reloaded = _reload(target, folder, max_shard_size)
    live = logits(target)
    train(target, 2, 3)
    report: dict[str, Any] = {"same_training": digest(target) == digest(control), "result": result}
    report |= {"reloaded": reloaded, "wrote": wrote}
    if dist.get_rank() == 0:
        report |= _compare(folder, live, masters)
        report["fp32_files"] = in_fp32.files
    return report


@contextlib.contextmanager
def _watch_files() -> Iterator[dict[str, int]]:
    """Yield the bytes of weights that this rank writes, by file."""
    original, wrote = hf_files.save_file, dict[str, int]()

    def watched(values: dict[str, torch.Tensor], path: Path, **settings: Any) -> None:
        wrote[path.name] = sum(value.nbytes for value in values.values())
        original(values, path, **settings)

    hf_files.save_file = watched
    try:
        yield wrote
    finally:
        hf_files.save_file = original


def _reload(target: Any, folder: Path, max_shard_size: str) -> list[str | None]:
    """What a rehearsal finds in folder/own and in a state saved beside it: as they are, with a weight damaged, lost."""
    state = save.save(target, folder / "run", step=2, client_state={}, keep=1).path
    if dist.get_rank() == 0:
        export.write_config_and_tokenizer(
            folder / "run", target.module.config, None, target.module.generation_config
        )
    distributed.barrier()

    def found() -> str | None:
        rank, ranks = distributed.place()
        settings: dict[str, Any] = {"max_shard_size": max_shard_size, "part": rank, "parts": ranks}
        text = read_back.verify_export(target.module, folder / "own", state, folder / "run", **settings)
        return next((text for text in distributed.gather(text) if text is not None), None)

    file = next(path for path in (folder / "own").glob("*.safetensors") if NORM in _keys(path))
    content, texts = file.read_bytes(), [found()]
    for damage in ("inf", "lost"):
        if dist.get_rank() == 0:
            weights = load_file(file)
            norm = weights.pop(NORM)
            save_file(weights | ({NORM: norm / 0} if damage == "inf" else {}), file)
        distributed.barrier()
        texts.append(found())
        distributed.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(content)
    distributed.barrier()
    return texts


def _keys(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as reader:
        return set(reader.keys())


def _masters(target: Any) -> dict[str, torch.Tensor]:
    """Every parameter in fp32, from the optimizer's copy where there is one."""
    found = {}
    unfused = target.zero_optimization_stage() == 0 and hasattr(target.optimizer, "fp32_groups")
    groups = zip(target.optimizer.fp16_groups, target.optimizer.fp32_groups, strict=True) if unfused else []
    by_id = {id(p): master for group in groups for p, master in zip(*group, strict=True)}
    for name, parameter in target.module.named_parameters():
        full = by_id.get(id(parameter), safe_get_full_fp32_param(parameter))
        found[name] = (parameter if full is None else full).detach().float().clone()
    return found


def _compare(folder: Path, live: torch.Tensor, masters: dict[str, torch.Tensor]) -> dict[str, Any]:
    plain = AutoModelForCausalLM.from_pretrained(folder / "own", dtype="auto", attn_implementation="eager")
    plain.save_pretrained(folder / "reference", max_shard_size="1GB")
    own, fp32 = tensors(folder / "own"), tensors(folder / "fp32")
    reloaded = AutoModelForCausalLM.from_pretrained(folder / "fp32", dtype="auto")
    values = dict(reloaded.named_parameters())
    return {
        "dtype": str(plain.dtype),
        "same_logits": torch.equal(logits(plain), live),
        "same_keys": own.keys() == tensors(folder / "reference").keys() == fp32.keys(),
        "same_values": all(torch.equal(own[k], v) for k, v in tensors(folder / "reference").items()),
        "masters_kept": all(torch.equal(values[name], master) for name, master in masters.items()),
        "fp32_is_finer": any(not torch.equal(fp32[k], v.float()) for k, v in own.items()),
        "use_cache": plain.config.use_cache,
        "names": sorted(p.name for p in (folder / "own").iterdir()),
    }


def export_failure_case(*, folder: Path) -> dict[str, Any]:
    """Rank 0 cannot write the second shard; no rank may hang, nothing may be left, a retry works."""
    target = engine(3)
    train(target, 0, 1)
    original, calls = hf_files.save_file, []

    def second_fails(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        original(*args, **kwargs)

    hf_files.save_file = second_fails
    error = _error(lambda: export.export(target, folder / "out", export.Form("20KB"), tokenizer=None))
    left = _names(folder)
    hf_files.save_file = original
    train(target, 1, 2)
    export.export(target, folder / "out", export.Form("20KB"), tokenizer=None)
    return {"error": error, "left": left, "after_retry": _names(folder)}


def offline_case(*, folder: Path, stage: int, precision: str, tie: bool) -> dict[str, Any]:
    """The same model exported from the engine and from the saved state."""
    target = engine(stage, precision=precision, tie=tie)
    train(target, 0, 2)
    saved = save.save(target, folder / "run", step=2, client_state={}, keep=1)
    export.export(target, folder / "live", export.Form("40KB"), tokenizer=None)
    export.export(target, folder / "live32", export.Form(dtype=torch.float32), tokenizer=None)
    report: dict[str, Any] = {}
    if dist.get_rank() == 0:
        export.write_config_and_tokenizer(
            folder / "run", target.module.config, None, target.module.generation_config
        )
    return report | {"state": saved.path}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            found.update({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118
    return found


def _raiser(error: Exception) -> Any:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    return fail


def _error(action: Any) -> str:
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _names(folder: Path) -> list[str]:
    distributed.barrier()
    names = sorted(p.name for p in folder.iterdir())
    distributed.barrier()
    return names


def fingerprint_case() -> tuple[bool, bool, bool]:
    """Frozen weights of 24 numbers, 12 on each of two ranks: what one rank, and what two, would have noted of them."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    module = llama(config, tie=False, precision="fp32", seed=0, hidden_size=24).requires_grad_(False)
    states: list[Any] = [
        SimpleNamespace(cuts={}, world_size=ranks, tensor_parallel_size=1, zero_stage=3) for ranks in (2, 1)
    ]
    as_two, as_one = (frozen_weights.fingerprint_of_first(module, state) for state in states)
    spread = frozen_weights.fingerprint(module)
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        values = [(name, torch.nn.Parameter(p.clone(), False)) for name, p in module.named_parameters()]
    whole: Any = SimpleNamespace(named_parameters=lambda: values)
    return as_two == spread, as_one == frozen_weights.fingerprint(whole), as_one == as_two
