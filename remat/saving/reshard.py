"""Reshard: resume from a state of another world size, through the universal format that DeepSpeed's engine loads.

That format is a folder per parameter with its whole fp32 master and moments, which any number of ranks can shard. The
ranks share the work of writing it beside the state, and it is removed after the load; the state itself is only read.
A rank holds one tensor of one parameter at a time. DeepSpeed 0.19's converter is not used: it holds one rank's whole
file, needs the disk space twice, and writes the moments of rank 0 into a file that every rank then reads. The
Adam options and step counts that its loader sets are not used either (docs/decisions.md). At stage 0 nothing is
resharded: the state is the same for any world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from remat.config import ds_config
from remat.config.options import ConfigError, OptimStates, Reshard
from remat.config.units import MIB
from remat.machine import distributed, rng
from remat.saving import disk_space, frozen, manifest, safe_load, shares, state_files
from remat.saving.manifest import ENGINE, TMP, SavedState, SaveError
from remat.saving.state_files import MASTER, MOMENTS, MOMENTS_OF, SavedWeights

UNIVERSAL = f"{TMP}universal"
BYTES_PER_PARAMETER = 12  # master and two moments, written in fp32 whatever they were saved in
SMALL_BYTES = MIB + 4096 * 8  # files other than tensors, and a folder's own block
SHARDED = (
    "fp32_flat_groups",
    "single_partition_of_fp32_groups",
    "base_optimizer_state",
    "optimizer_state_dict",
)


def same_ranks(state: SavedState, world_size: int, shared_by: int, stages: int) -> bool:
    """Return whether `state` was saved with this world size, `shared_by` ranks that share layers, and `stages`."""
    info = state.info
    saved = (info.world_size, info.tensor_parallel_size, info.pipeline_parallel_size)
    return saved == (world_size, shared_by, stages)


def find_refusals(
    state: SavedState,
    wanted: Reshard,
    *,
    world_size: int,
    shared_by: int = 1,
    stages: int = 1,
    rendered: Mapping[str, Any],
) -> list[str]:
    """Return why `world_size` ranks cannot resume from `state`; an empty list when they can.

    `shared_by` of them share layers, and they form `stages` pipeline stages. `rendered` is DeepSpeed's config.
    """
    info = state.info
    if same_ranks(state, world_size, shared_by, stages):
        return []
    if max(info.pipeline_parallel_size, stages) > 1:
        return [
            f"it was saved by {info.world_size} ranks with train.pipeline_parallel_size={info.pipeline_parallel_size} "
            f"and this launch has {world_size} with {stages}, and states of stages are not cut anew: start "
            f"{info.world_size} ranks with train.pipeline_parallel_size={info.pipeline_parallel_size}"
        ]
    then, now = ("", "")
    if max(info.tensor_parallel_size, shared_by) > 1:
        then, now = (f" with train.tensor_parallel_size={n}" for n in (info.tensor_parallel_size, shared_by))
    ranks = f"it was saved by {info.world_size} ranks{then} and this launch has {world_size}{now}"
    start = f"start {info.world_size} ranks{then}"
    if wanted is Reshard.refuse:
        return [f"{ranks}: {start}, or set reshard=auto"]
    found, zero = [], rendered["zero_optimization"]
    if info.optimizer not in MOMENTS_OF and info.zero_stage:
        known = " and ".join(MOMENTS_OF)
        found.append(
            f"{ranks}, and only the state of {known} can be cut anew, not that of {info.optimizer}, whose numbers "
            f"belong to more weights than one: {start}"
        )
    if info.states == OptimStates.bf16_master:
        found.append(
            f"{ranks}, and DeepSpeed would round its fp32 moments to the bf16 of its master weights: {start}"
        )
    devices = ds_config.optimizer_offload_device(rendered), ds_config.param_offload_device(rendered)
    if info.on_nvme:
        found.append(
            f"{ranks}, but its optimizer state is in DeepSpeed's NVMe files, one set per rank: {start}"
        )
    elif "nvme" in devices:
        found.append(
            f"{ranks}, and DeepSpeed cuts no state anew for NVMe: {start}, or choose a config without NVMe"
        )
    if zero.get("pipeline_loading_checkpoint"):
        found.append(
            f"{ranks}, and zero_optimization.pipeline_loading_checkpoint would wait for ever: remove it"
        )
    return found


def measure_room(state: SavedState, world_size: int, shared_by: int = 1) -> tuple[int, int]:
    """Return (bytes needed, bytes free) on the disk to reshard for `world_size` ranks. Collective; reads no weight.

    `shared_by` of them share layers. What a killed launch left is removed first. Raises ConfigError when the state
    cannot be resharded for so many ranks.
    """
    return manifest.run_on_main(lambda: _room(state, world_size, shared_by), f"looking at {state.path}")


def load(engine: Any, state: SavedState) -> None:
    """Load `state` as `load.load` does, for another world size. Collective.

    Random states are new, so dropout differs from that of the saved run.
    """
    rank, size = distributed.place()
    own = safe_load.load(state.path / "rng" / "rank-00000.pt")
    folder = state.path.parent / UNIVERSAL
    what = f"resharding {state.path} for {size} ranks in {folder}"
    frozen_now = frozen.fingerprint_of_first(engine.module, state.info)
    manifest.run_on_main(lambda: _refuse_other_model(engine, state, own["frozen"], frozen_now), what)
    try:
        if state.info.zero_stage == 0:
            frozen.load_engine(engine, state.path, state.info)
        else:
            manifest.run_on_main(lambda: manifest.remove(folder), what)
            manifest.raise_together(convert(state, folder / ENGINE), what)
            with _universal(engine):
                frozen.load_engine(engine, folder, state.info)
            _restore(engine, state)
        distributed.barrier()  # after it no rank reads the folder
    finally:
        if rank == 0:
            manifest.remove(folder)
    rng.start_anew(own["rng"], step=state.step, rank=rank // shares.group_size(engine))


def _room(state: SavedState, world_size: int, shared_by: int) -> tuple[int, int]:
    manifest.remove(state.path.parent / UNIVERSAL)
    stage, folder = state.info.zero_stage, state.path / ENGINE
    if stage == 0:
        return 0, disk_space.free_bytes(state.path)
    try:
        weights = SavedWeights(folder, stage, moments=MOMENTS_OF[state.info.optimizer], cuts=state.info.cuts)
        _step(folder, stage)
    except SaveError as error:
        raise ConfigError(f"resume: {state.path} cannot be cut for {world_size} ranks: {error}") from error
    smallest, least = min(weights.group_numels) // shared_by, 2 * (world_size // shared_by) ** 2
    if stage < 3 and smallest < least:
        raise ConfigError(
            f"resume: {state.path} cannot be cut for {world_size} ranks at ZeRO stage {stage}: a group of the "
            f"optimizer has {smallest} numbers and must have {least}, or a rank is left without any, on "
            f"which DeepSpeed fails; start {state.info.world_size} ranks"
        )
    numel = sum(shape.numel() for shape in weights.trained.values())
    small = SMALL_BYTES + len(weights.trained) * 4 * 4096  # files are rounded up to blocks
    return BYTES_PER_PARAMETER * numel + small, disk_space.free_bytes(state.path)


def _refuse_other_model(engine: Any, state: SavedState, frozen_noted: str, frozen_now: str) -> None:
    """Raise ConfigError unless names, shapes and frozen weights are as saved. Groups may be in another order."""
    if state.info.zero_stage:
        saved = SavedWeights(state.path / ENGINE, state.info.zero_stage, cuts=state.info.cuts).trained
        held = dict(engine.module.named_parameters())
        now = {
            name: shares.whole_shape(held[name]) for group in engine._get_zero_param_shapes() for name in group
        }
        other = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
        if other:
            raise ConfigError(
                f"resume: {state.path} has other parameters than this run ({other[0]} and {len(other) - 1} more): "
                "the model and its adapters must be as saved"
            )
    frozen.check_same(state, frozen_noted, frozen_now)


def convert(state: SavedState, target: Path) -> Exception | None:
    """Write this rank's part of the universal folder. Return an error instead of raising it, for all ranks to raise."""
    stage, source = state.info.zero_stage, state.path / ENGINE
    try:
        rank, size = distributed.place()
        step = _step(source, stage)
        held = MOMENTS_OF[state.info.optimizer]
        weights = SavedWeights(source, stage, moments=held, cuts=state.info.cuts)
        for name in sorted(weights.trained)[rank::size]:
            folder = target / "zero" / name
            folder.mkdir(parents=True)
            for key in (MASTER, *MOMENTS):  # DeepSpeed reads both moments, whichever the optimizer has
                value = (
                    weights.read(name, key) if key in (MASTER, *held) else torch.zeros(weights.trained[name])
                )
                torch.save({"param": value}, folder / f"{key}.pt")
            torch.save(step, folder / "step.pt")
        if rank == 0:
            _write_rest(source, target, stage, step)
    except Exception as error:
        return disk_space.find_cause(error, target.parent.parent)
    return None


def _write_rest(source: Path, target: Path, stage: int, step: int) -> None:
    """Write what DeepSpeed reads beside the tensors: loss scale, counters. Adam's options stay those of this run."""
    optimizer = state_files.mapped(state_files.optimizer_files(source)[0])["optimizer_state_dict"]
    count = len(state_files.base_optimizer(optimizer, stage)["param_groups"])
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(count)]
    rest = {name: value for name, value in optimizer.items() if name not in SHARDED}
    rest |= {"param_groups": groups}
    rest |= {"optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups}}  # read at stage 3
    torch.save(rest, target / "zero" / "optimizer_state.pt")
    module = state_files.module_file(source, stage)
    model = {name: value for name, value in state_files.mapped(module).items() if name != "module"}
    torch.save(model | {"mp_world_size": 1}, target / module.name)  # its weights are whole


def _step(source: Path, stage: int) -> int:
    """Return the number of optimizer steps applied. Raises SaveError unless they are the same for all groups."""
    optimizer = state_files.mapped(state_files.optimizer_files(source)[0])["optimizer_state_dict"]
    found = {int(group["step"]) for group in state_files.base_optimizer(optimizer, stage)["state"].values()}
    if len(found) != 1:
        raise SaveError(f"{source} has groups at the optimizer steps {sorted(found)}, not at one")
    return found.pop()


@contextmanager
def _universal(engine: Any) -> Iterator[None]:
    """Set `checkpoint.load_universal` for one load only: the run's later states are normal ones.

    Below stage 3 DeepSpeed looks up a weight's place as if its group were in the order of the model. With
    round_robin_gradients the order differs, so the groups are linked in their true order during the load.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage < 3:
        groups, optimizer.bit16_groups = optimizer.bit16_groups, optimizer.round_robin_bit16_groups
        optimizer._link_all_hp_params()
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False
        if stage < 3:
            optimizer.bit16_groups = groups
            optimizer._link_all_hp_params()


def _restore(engine: Any, state: SavedState) -> None:
    """Restore what the universal load omits or breaks: buffers, and a step count that stage 3 shares between groups."""
    stage, source = state.info.zero_stage, state.path / ENGINE
    optimizer, step = engine.optimizer.optimizer, _step(source, stage)
    for flat, values in optimizer.state.items():
        if isinstance(optimizer, torch.optim.AdamW):
            fused = optimizer.param_groups[0]["fused"]
            values["step"] = torch.tensor(float(step), device=flat.device if fused else "cpu")
        else:
            values["step"] = step
    weights = SavedWeights(source, stage, cuts=state.info.cuts)
    buffers = dict(engine.module.named_buffers())
    with torch.no_grad():
        for name in weights.buffers:
            buffers[name].copy_(weights.read(name))
