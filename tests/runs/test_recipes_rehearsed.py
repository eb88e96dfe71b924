"""Every recipe rehearsed before its machine is rented: its architecture, strategy and data, small, on two CPU ranks.

A rehearsal is three steps with a stop and a resume in between. The model has the recipe's classes and kinds of layers
at a few layers and a small width, with weights on disk. `make test` rehearses a sample, `make test-all` all.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from remat.config import compose, ds_config
from remat.config.options import Attention, FileType, PeftMethod
from remat.model import hf_model, small_copy
from remat.planning import retune
from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch

LAYERS = 2
NOT_HERE = {"gpt2_medium_lab", "tiny_zero3_offload"}  # random weights and made-up data: launched by other tests
ON_A_CPU = {Attention.flash_attention_2: Attention.sdpa}  # with a mask, which flash attention does not need
BUDGET = [
    "checkpointing.budget_gib=2",  # of host memory: a CPU has none of its own to fill
    # some rates of a CPU, so that seconds are planned
    "++hardware.gpu_rates.matmul_tflops=0.05",
    "++hardware.gpu_rates.attention_tflops=0.03",
    "++hardware.gpu_rates.memory_gbs=10",
    "++hardware.gpu_rates.launch_us=5",
    *(f"hardware.{link}_gbs=5" for link in ("pcie_h2d", "pcie_d2h", "gpu_link", "dram")),
]


def make_model(recipe: str, folder: Path) -> Path:
    """Save a model of the recipe's architecture with two layers and random weights in `folder`."""
    torch.manual_seed(3)
    asked = compose.compose_run([f"recipe={recipe}"]).run.model
    as_published = replace(asked, rope_scaling=None, rope_factor=1.0)  # the run itself stretches positions
    config = small_copy._reduced(hf_model.shape_config(as_published), True, LAYERS)
    config.vocab_size = 300  # bytes and special tokens
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def words(recipe: str, folder: Path, ranks: int) -> list[str]:
    cfg = compose.compose_run([f"recipe={recipe}"]).run
    more = BUDGET if cfg.checkpointing.policy == "budget" else []
    more = [*more, *["checkpointing.offload.min_bytes=1"] * cfg.checkpointing.offload.enabled]
    return [
        f"recipe={recipe}",
        "model=hf",
        f"model.path={make_model(recipe, folder / recipe)}",
        "model.tokenizer=bytes",
        f"model.attention={ON_A_CPU.get(cfg.model.attention, cfg.model.attention)}",
        f"train.sequence_parallel_size={min(ranks, cfg.train.sequence_parallel_size)}",
        "hardware=this_machine",
        f"hardware.nvme_path={folder}/nvme",
        f"data.path={folder / ('texts.jsonl' if cfg.data.file_type is FileType.jsonl else 'rows.json')}",
        f"data.cache_dir={folder}/cache",
        f"output_dir={folder}/out{ranks}",
        "run_id=run",
        "train.steps=3",
        "train.seq_len=192",
        f"train.global_batch_size={4 * cfg.train.micro_batch_size}",
        "train.log_every=1",
        "optim.warmup_steps=1",
        "tracking=wandb_disabled",
        *more,
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    rows = [json.loads(line) for line in tiny.make_instructions(folder / "rows.jsonl").read_text().splitlines()]
    (folder / "rows.json").write_text(json.dumps(rows))
    tiny.make_texts(folder / "texts.jsonl")
    (folder / "nvme").mkdir()
    return folder


@pytest.mark.sample(one_in=18)
@pytest.mark.parametrize("recipe", [name for name in compose.recipe_names() if name not in NOT_HERE])
def test_a_recipe_trains_stops_resumes_and_exports(recipe: str, folder: Path) -> None:
    rehearse(recipe, folder, ranks=2)


SHARING = [
    name
    for name in compose.recipe_names()
    if re.search(
        r"^  sequence_parallel_size: ([3-9]|\d\d)", (compose.RECIPE_DIR / f"{name}.yaml").read_text(), re.M
    )
]


@pytest.mark.exhaustive
def test_the_recipes_whose_ranks_share_sequences_are_those_that_say_so() -> None:
    """To compose each when this file is collected would take every worker seconds."""
    found = {name: compose.compose_run([f"recipe={name}"]).run.train for name in compose.recipe_names()}
    assert [name for name, train in found.items() if train.sequence_parallel_size > 2] == SHARING != []


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", SHARING)
def test_a_recipe_whose_ranks_share_sequences_is_rehearsed_on_four(recipe: str, folder: Path) -> None:
    run = rehearse(recipe, folder, ranks=4)
    proof = json.loads((run / "proof.json").read_text())["shared_sequences"]
    assert proof["ranks"] == 4 and sum(proof["trained_tokens_by_rank"]) == proof["trained_tokens"] > 0


def rehearse(recipe: str, folder: Path, *, ranks: int) -> Path:
    """Train, stop, resume and export; the run directory."""
    asked = words(recipe, folder, ranks)
    spec = folder / f"{recipe}{ranks}.json"
    spec.write_text(json.dumps({"first": [*asked, "train.stop_at=2"], "second": [*asked, "resume=auto"]}))
    done = deepspeed(str(spec), ranks=ranks, script="tests/support/many_runs.py", timeout_s=900)
    assert done.code == 0, done.out[-6000:]
    run = folder / f"out{ranks}" / recipe / "run"
    assert [row["step"] for row in tiny.rows(run)] == [1, 2, 3]
    cfg = compose.compose_run(asked).run
    proof = json.loads((run / "proof.json").read_text())
    assert proof["policy"] == cfg.checkpointing.policy and len(proof["layers"]) == LAYERS
    own = ds_config.load(cfg.deepspeed.config, compose.DS_CONFIG_DIR)["zero_optimization"]
    used = json.loads((run / "ds_config.json").read_text())["zero_optimization"]
    assert used["stage"] == own["stage"]
    for section in ("offload_optimizer", "offload_param"):
        assert (used.get(section) or {}).get("device") == (own.get(section) or {}).get("device")
    weights = "adapter_model" if cfg.peft.method is not PeftMethod.none else "model"
    assert list((run / "export").glob(f"{weights}*.safetensors"))
    if cfg.checkpointing.policy == "budget":
        assert_tables_can_be_chosen_again(run, asked)
    return run


def assert_tables_can_be_chosen_again(run: Path, asked: list[str]) -> None:
    """The ledger plans each phase, and the corrected rates plan what the run took."""
    ledger = {row["category"]: row for row in json.loads((run / "ledger.json").read_text())["rows"]}
    found = retune.retune(run)
    for phase in retune.PHASES:
        assert ledger[phase]["planned"] == pytest.approx(found.planned[phase], rel=0.01)
        assert found.measured[phase] > 0
    planned = [sum(seconds[phase] for phase in ("forward", "backward"))
               for seconds in (found.planned, found.before.time.phases_s, found.measured)]  # fmt: skip
    assert abs(planned[1] - planned[2]) < abs(planned[0] - planned[2])
    plain = [word for word in asked if not word.startswith("checkpointing.budget_gib")]
    again = compose.compose_run([*plain, *found.overrides]).run
    assert again.checkpointing.table == str(found.path) and found.path.is_file()
