"""Shell scripts and documented commands, held to the installed launcher: parsed, run with stand-ins, composed."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from deepspeed.launcher import runner

from remat.config import compose, metrics
from remat.launch import arguments
from tests.support.launcher import node_launch

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "scripts"
SHELL = [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch"), ROOT / ".ci" / "run"]
RECIPES_MD = (ROOT / "docs" / "recipes.md").read_text()
NODES = ["node-a", "node-b"]


def stand_in(folder: Path, name: str, body: str) -> None:
    """A program `name` in `folder` that runs `body`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)


def recorder(folder: Path, codes: str = "0") -> None:
    """A `remat launch` that writes its words to calls.jsonl and exits with the next of `codes`."""
    record = "import json, sys; print(json.dumps(sys.argv[1:]))"
    count = f'$(wc -l <"{folder}/calls.jsonl")'
    body = (
        f'[ "$1" = launch ] || exit 0\nshift\n'
        f'python3 -c \'{record}\' "$@" >>"{folder}/calls.jsonl"\ncodes=({codes})\nexit ${{codes[{count} - 1]}}'
    )
    stand_in(folder, "remat", body)


def calls(folder: Path) -> list[list[str]]:
    """What `remat launch` hands to the deepspeed runner, were it not for the keepers of its ranks."""
    found = [arguments.parse(json.loads(line)) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return [[*words.runner, words.target, *words.words] for words in found]


def environment(folder: Path, **more: str) -> dict[str, str]:
    hidden = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "DS_"))}
    return hidden | {"PATH": f"{folder}:{os.environ['PATH']}"} | more


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_bash_reads_every_shell_script(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(script, os.X_OK)


def demo(tmp_path: Path, gpus: int, codes: str, *more: str) -> tuple[int, list[list[str]]]:
    """scripts/demo.sh on a pretended machine with `gpus` GPUs: exit code, and the words of each launch."""
    tools = tmp_path / "tools"
    plan = f'case "$1" in scripts/demo_plan.py) echo {gpus} 100 /out/x;; -c) echo 12345;; *) echo text;; esac'
    stand_in(tools, "python", plan)
    recorder(tools, codes)
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(SCRIPTS / "demo.sh", tmp_path / "scripts")
    command = [str(script), "train.steps=200", *more]
    done = subprocess.run(command, env=environment(tools), capture_output=True, text=True, check=False)
    return done.returncode, calls(tools)


@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
def test_the_demo_fits_any_number_of_gpus(tmp_path: Path, gpus: int) -> None:
    code, launches = demo(tmp_path, gpus, "75 0")
    assert code == 0
    assert [{"train.stop_at=100", "resume=auto"} & set(words) for words in launches] == [
        {"train.stop_at=100"},
        {"resume=auto"},
    ]
    for words in launches:
        asked = runner.parse_args(words)
        assert asked.num_gpus == (-1 if gpus else 2)  # on GPUs all visible ones, as CUDA_VISIBLE_DEVICES says
        assert asked.user_args[-1] == "train.steps=200"
        train = compose.compose_run(asked.user_args).run.train
        assert train.global_batch_size == 2 * train.micro_batch_size * (gpus or 2)


@pytest.mark.parametrize(("codes", "expected", "launches"), [("0", 1, 1), ("70", 70, 1), ("75 3", 3, 2)])
def test_the_demo_ends_with_the_first_failure(tmp_path: Path, codes: str, expected: int, launches: int) -> None:
    code, made = demo(tmp_path, 1, codes)
    assert (code, len(made)) == (expected, launches)


def sbatch(tmp_path: Path, node: int, words: list[str]) -> list[str]:
    """The words of the launcher that scripts/slurm.sbatch starts on node number `node` of two."""
    tools = tmp_path / "tools"
    stand_in(tools, "scontrol", f'[ "$*" = "show hostnames node-[a-b]" ] && printf "%s\\n" {" ".join(NODES)}')
    stand_in(tools, "srun", f'while [ "$1" != bash ]; do shift; done; SLURM_NODEID={node} exec "$@"')
    recorder(tools)
    slurm = {"SLURM_JOB_ID": "912345", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_GPUS_ON_NODE": "8"}
    subprocess.run(
        [str(SCRIPTS / "slurm.sbatch"), *words], cwd=tmp_path, env=environment(tools, **slurm), check=True
    )
    return calls(tools)[0]


@pytest.mark.parametrize("node", [0, 1])
def test_the_sbatch_script_starts_one_launcher_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    example = re.search(r"^#   sbatch (.*)$", (SCRIPTS / "slurm.sbatch").read_text(), re.M)
    assert example
    words = shlex.split(example[1])
    overrides = [*words[words.index("scripts/slurm.sbatch") + 1 :], "data.text_field=two words"]
    found = node_launch(sbatch(tmp_path, node, overrides), monkeypatch)
    world = json.loads(base64.urlsafe_b64decode(found.world_info))
    assert world == {name: list(range(8)) for name in NODES}
    assert (found.node_rank, found.master_addr, found.master_port) == (node, "node-a", 22345)
    named = ["run_id=slurm-912345", "resume=auto_or_start"]
    assert (found.training_script, found.training_script_args) == ("train.py", [*named, *overrides])
    assert compose.from_command_line(found.training_script_args).run.data.text_field == "two words"


def test_the_example_hostfile_is_one() -> None:
    assert dict(runner.fetch_hostfile(str(SCRIPTS / "hostfile.example"))) == {"node-1": 8, "node-2": 8}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The recipe of docs/recipes.md, where the page says to put it."""
    (tmp_path / "recipe").mkdir()
    recipe, measured = re.findall(r"```yaml\n(.*?)```", RECIPES_MD, re.S)
    (tmp_path / "recipe" / "mine.yaml").write_text(recipe)
    (tmp_path / "recipe" / "measured.yaml").write_text(f"# @package _global_\n{measured}")
    return tmp_path


@pytest.mark.parametrize("command", re.findall(r"^ +((?:deepspeed|torchrun) .*)$", RECIPES_MD, re.M))
def test_every_command_of_the_recipe_page_composes(command: str, mine: Path) -> None:
    words = shlex.split(command.replace("~/my_conf", str(mine)))
    place = words.index("train.py")
    if words[0] == "deepspeed":
        assert runner.parse_args(words[1:]).user_script == "train.py"
    compose.from_command_line(words[place + 1 :])


def test_the_recipe_page_shows_recipes_that_compose(mine: Path) -> None:
    run = compose.from_command_line(["--config-dir", str(mine), "recipe=mine"]).run
    assert (run.meta.status, run.train.steps, run.model.path) == ("planned", 2000, "meta-llama/Llama-3.1-8B")
    run = compose.from_command_line(["--config-dir", str(mine), "recipe=measured"]).run
    assert run.meta.status == "measured"
    assert run.meta.measured["date"] == "2026-01-31"
    assert run.meta.measured["memory/gpu_reserved_peak_gib"] == 61.2


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)\)", RECIPES_MD))
def test_every_link_of_the_recipe_page_leads_somewhere(link: str) -> None:
    assert (ROOT / "docs" / link).exists(), link


def test_the_image_is_built_from_files_that_are_there_and_the_pinned_torch() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert "requirements.lock" in copied and {"remat", "conf", "recipes", "ds_configs", "setup.py"} <= {*copied}
    kept = [
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    assert sorted(copied) == sorted(kept) and all((ROOT / name).exists() for name in copied)
    pinned = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned and f"pip install --no-cache-dir {pinned[1]}\n" in text


def test_the_view_of_weights_and_biases_draws_metrics_that_runs_log() -> None:
    from scripts import wandb_workspace  # a second, which each worker would spend

    view = wandb_workspace.make_workspace("team", "remat")
    panels = [panel for section in view.sections for panel in section.panels]
    drawn = [name for panel in panels for name in panel.y]
    logged = {value for name, value in vars(metrics).items() if name.isupper()}
    assert len(drawn) == len(set(drawn)) and set(drawn) <= logged
    written = view._to_model().model_dump_json()  # what would be sent
    assert all(f'"{name}"' in written for name in drawn)
