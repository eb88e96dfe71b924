"""What is imported before a bad option is told: nothing that is heavy, by no command; and no launcher starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import remat

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "deepspeed", "matplotlib", "datasets", "peft", "wandb")
BAD = "train.stepz=3"
EXPLAINED = "train.stepz=3: no such option (did you mean train.steps?)"
SHARED = "train.tensor_parallel_size=2"
RUNS = [
    ["plan"],
    ["plan", "--sweep", "train.steps=1,2"],
    ["ds-config"],
    ["doctor"],
    ["compare", "policies"],
    ["compare", "checkpointing=none,full"],
    ["launch", "--num_gpus", "2", "train.py"],
]
REFUSED = {  # command lines of remat, and what each is told
    **{" ".join([*words, BAD]): EXPLAINED for words in RUNS},
    "plan recipe=nothing": "recipe=nothing: no such choice",
    "plan --plot plan.txt": "--plot plan.txt: give a file",
    "plan optim.schedule=wsd": "optim.schedule=wsd needs optim.decay_steps",
    "plan deepspeed.config=zero9": "deepspeed.config=zero9: no such configuration",
    "plan deepspeed.overrides.zero_optimisation.stage=2": "zero_optimisation is no DeepSpeed key",
    "plan deepspeed.config=zero3_nvme": "needs hardware.nvme_path",
    "plan peft=qlora train.tensor_parallel_size=2": "peft.method=qlora with train.tensor_parallel_size=2",
    "launch": "recipe=NAME is missing",
    "compare checkpointing=none,full": "recipe=NAME is missing",
    "plan recipe=finetune model.path=/no/such": "model.path=/no/such does not exist",
    "plan -cn mine": "write recipe=NAME",
    "doctor --build nothing": "--build nothing: no such op",
    "compare --repeats=-1 train.steps=1,2": "--repeats and --ranks: at least 1",
    "compare lab=nothing": "lab=nothing: no such experiment",
    "compare train.steps=3": "no word lists values",
    "launch train.py data=jsonl": "data.path is missing",
    "launch --num_gpus 3 train.py train.global_batch_size=8": "is not a multiple of",
    f"launch --num_gpus 3 train.py {SHARED}": "3 ranks cannot be divided",
}
REFUSED_BY_RANKS = {  # of three ranks
    "": "recipe=NAME is missing",
    "model=hf model.path=/no/such data=alpaca": "model.path=/no/such does not exist",
    "recipe=finetune model.path=gpt2 data.path=/no/such.jsonl": "data.path=/no/such.jsonl does not exist",
    "recipe=tiny_zero3_offload output_dir=/proc/nope": "output_dir=/proc/nope cannot be written",
    "resume=/no/such": "resume=/no/such: no such folder",
    "--learning_rate 1e-5": "did you mean optim.lr?",
    "-m optim.lr=1e-4,2e-4": "remat compare optim.lr=1e-4,2e-4",
    "hydra.run.dir=X": "set output_dir=FOLDER",
    "+train.num_epochs=3": "did you mean train.epochs?",
    BAD: EXPLAINED,
    "deepspeed.config=zero9": "deepspeed.config=zero9: no such configuration",
    "data=jsonl": "data.path is missing",
    "train.global_batch_size=8": "is not a multiple of",
}
WATCH = """
import contextlib, importlib, io, json, subprocess, sys
from remat import train
from remat import cli

class NothingStarts:
    def __init__(self, *args, **more):
        raise AssertionError("a process was started")

def ended(words):
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        try:
            do = {
                "remat": lambda: cli.main(),
                "import": lambda: [*map(importlib.import_module, words[1:])] and 0,
                "check": lambda: is_supported(),
            }
            code = do[words[0]]() if words[0] in do else train.main(words[1:])
        except SystemExit as leaving:
            code = leaving.code
    return [code or 0, said.getvalue(), told.getvalue(), list(sys.modules)]

def is_supported():  # what DeepSpeed's engine asks first
    from deepspeed.runtime.zero import utils
    from remat.model import optimizer
    utils.dist.get_rank = lambda: 1
    with optimizer.muon_left_eager():
        return utils.is_zero_supported_optimizer(None)

subprocess.Popen = NothingStarts
for sys.argv in json.load(sys.stdin):
    print(json.dumps(ended(sys.argv)))
"""
Ended = tuple[int, str, str, list[str]]


def run_each(lines: Iterable[str]) -> dict[str, Ended]:
    """One after the other in a new process: exit code, stdout, stderr and the modules imported by then."""
    asked = {line: line.split() for line in lines}
    done = subprocess.run(
        [sys.executable, "-c", WATCH],
        input=json.dumps([*asked.values()]),
        env=os.environ | {"WORLD_SIZE": "3"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(asked, map(tuple, answers), strict=True))


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    ours = [f"remat {line}" for line in (*REFUSED, "compare --list", "--version", "--help")]
    return run_each([*ours, *(f"train.py {line}" for line in (*REFUSED_BY_RANKS, "--version"))])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((f"remat {line}", told) for line, told in REFUSED.items()),
        *((f"train.py {line}", told) for line, told in REFUSED_BY_RANKS.items()),
    ],
)
def test_a_bad_option_is_told_before_anything_heavy_is_imported(
    ended: dict[str, Ended], line: str, expected: str
) -> None:
    code, _, told, modules = ended[line]
    assert code == 2
    assert expected in told
    assert not {*modules} & {*HEAVY}


def test_the_version_and_the_completion_of_a_shell_are_there(ended: dict[str, Ended]) -> None:
    assert ended["remat --version"][:2] == (0, f"remat {remat.__version__}\n")
    assert ended["train.py --version"][:2] == (0, f"remat {remat.__version__}\n")
    assert "--install-completion" in ended["remat --help"][1]
    assert not {*ended["remat --version"][3]} & {*HEAVY}


def test_named_experiments_are_listed_without_anything_heavy(ended: dict[str, Ended]) -> None:
    code, said, _, modules = ended["remat compare --list"]
    assert code == 0
    assert "seed_b8" in said
    assert not {*modules} & {*HEAVY}


def test_a_python_without_the_libraries_is_told_to_use_the_environment() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "train.py", "recipe=tiny_zero3_offload"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "has no module hydra" in done.stderr and ".venv/bin/activate" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_and_a_rank_import_no_library_that_they_do_not_need() -> None:
    """peft and bitsandbytes cost three seconds of each start, matplotlib and torch's compiler one, networkx a third."""
    lines = ["remat plan recipe=tiny_zero3_offload", "import remat.training.build remat.training.loop", "check"]
    plan, rank, engine = run_each(lines).values()
    assert plan[0] == rank[0] == engine[0] == 0, rank[2] + engine[2]
    heavy = {"matplotlib", "datasets", "peft", "wandb", "bitsandbytes", "networkx", "highspy"}
    assert "torch" in plan[3] and not {*plan[3]} & {"deepspeed", *heavy}
    assert not {*rank[3]} & heavy
    muon = "deepspeed.runtime.zero.muon.original_muon"
    assert muon in engine[3] and "torch._inductor.compile_fx" not in engine[3]
