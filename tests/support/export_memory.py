"""What an export holds at its peak: measured on this process, which must be fresh. Prints bytes above the start.

`export_memory.py ZERO_STAGE FOLDER` makes a saved state of two ranks and exports it without an engine;
`live_case` exports a ZeRO-3 engine on each of two ranks.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from remat.config.options import ModelConfig, Precision
from remat.model.hf_model import build
from remat.saving import manifest, state_files
from remat.saving.exports import export

SHARD_BYTES = 8 * 10**6
WINDOW_BYTES = 16 * 2**20
RANKS = 2
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "vocab_size": 4000,
    "tie_word_embeddings": False,
}


def start() -> int:
    """Bytes held now; the peak starts anew, and freed memory goes back to the system at once."""
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    Path("/proc/self/clear_refs").write_text("5")
    return held("VmRSS")


def held(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def make_state(run: Path, zero_stage: int, layers: int) -> Path:
    """The files that DeepSpeed writes, as far as an export reads them, of a Llama with random weights."""
    config = LlamaConfig(num_hidden_layers=layers, **SHAPE)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    state, stage3 = run / "saved" / "step-000001", zero_stage == 3
    (state / "engine").mkdir(parents=True)
    numel = sum(shape.numel() for shape in shapes.values())
    optimizer = "" if stage3 else "bf16_"
    for rank in range(RANKS):
        flat = [torch.empty(numel // RANKS).normal_()]  # every size is even
        key = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
        content = {key: flat, "optimizer_state_dict": {"state": {0: {"exp_avg": flat[0] + 1}}}}
        name = f"{optimizer}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": content}, state / "engine" / name)
    module = {} if stage3 else {"model.embed_tokens.weight": torch.empty(numel, dtype=torch.bfloat16).zero_()}
    model = {"module": module, "buffer_names": [], "param_shapes": [shapes], "shared_params": {}}
    prefix = "zero_pp_rank_0_" if stage3 else ""
    torch.save(model, state / "engine" / f"{prefix}mp_rank_00_model_states.pt")
    info = {"step": 1, "sequence": 1, "world_size": RANKS, "zero_stage": zero_stage, "precision": "bf16"}
    more = {"layout": "", "frozen_excluded": False, "created": "", "versions": {}, "client_state": {}}
    manifest.write(state, manifest.Manifest(**info, **more, files={}))  # type: ignore[arg-type]
    export.write_config_and_tokenizer(run, config, None)
    return state


def of_state(zero_stage: int, folder: Path) -> dict[str, int]:
    state_files.WINDOW_BYTES = WINDOW_BYTES
    state = make_state(folder / "warm", zero_stage, layers=1)
    size = f"{SHARD_BYTES // 10**6}MB"
    settings: dict[str, Any] = {"form": export.Form(size), "verified": True}
    export.export_saved_state(state, folder / "warm", folder / "warm" / "export", **settings)
    state = make_state(folder / "run", zero_stage, layers=20)
    before = start()
    result = export.export_saved_state(state, folder / "run", folder / "run" / "export", **settings)
    largest = SHAPE["vocab_size"] * SHAPE["hidden_size"] * 4
    return {"above": held("VmHWM") - before, "exported": result.bytes, "largest": largest}


def live_case(*, folder: Path) -> dict[str, int]:
    """Both ranks hold half of a model in bf16 and of its masters; the export is in fp32."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }
    shape = LlamaConfig(num_hidden_layers=12, **SHAPE)
    net = build(ModelConfig(), shape, precision=Precision.bf16, ds_config=config, zero_stage=3, seed=1)
    engine = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config)[0]
    size = f"{SHARD_BYTES // 10**6}MB"
    before = start()
    result = export.export(engine, folder, export.Form(size, torch.float32), tokenizer=None)
    return {"above": held("VmHWM") - before, "exported": result.bytes}


if __name__ == "__main__":
    print(json.dumps(of_state(int(sys.argv[1]), Path(sys.argv[2]))))
