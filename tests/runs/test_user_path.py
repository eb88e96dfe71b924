"""What a user types, `whole` through the real launcher: files, figures, exit codes, resume, and nothing left behind."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.config.options import LossKind
from remat.data.batches import eval_micro_batches
from remat.data.cache import open_blocks
from remat.data.tokenizer import load_tokenizer
from remat.launch.processes import free_port
from remat.model import loss
from remat.report import run_report
from tests.support import tiny
from tests.support.launcher import deepspeed, run
from tests.support.tiny import words
from tests.support.wandb_file import read_wandb

pytestmark = pytest.mark.launch

CONTRACT = {
    "loss/train", "optim/lr", "optim/grad_norm", "optim/skipped_steps", "tokens/seen", "tokens/trained",
    "throughput/tokens_per_s", "throughput/tokens_per_s_per_gpu", "throughput/trained_tokens_per_s",
    "time/step_s", "time/data_s", "time/forward_s", "time/backward_s", "time/optimizer_s",
    "memory/host_rss_gib", "memory/host_available_gib",
}  # fmt: skip


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "deepspeed" in path.name}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_workshop(tmp_path_factory.mktemp("user"))


STEPS = 8  # ZeRO-3 has learnt its order of gathers in the fourth micro-batch without an evaluation between
EVERYTHING = [
    f"train.steps={STEPS}", "data.eval_fraction=0.2", "train.eval_every=4", "save.every=4", "save.export=true",
    "tracking=wandb_offline", "save.best=true",
    "save.max_shard_size=50KB",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(workshop: Path) -> tuple[Path, str]:
    """One run with everything switched on: its folder and what the terminal showed."""
    before = shared_memory()
    done = deepspeed(*words(workshop, "whole", *EVERYTHING), real=True)
    assert done.code == 0, done.out[-6000:]
    assert shared_memory() == before
    return workshop / "out" / "whole" / "run", done.out


def test_the_run_directory_is_the_contract(whole: tuple[Path, str]) -> None:
    folder, _ = whole
    for name in (
        "config.yaml",
        "ds_config.json",
        "env.json",
        "plan.json",
        "ledger.json",
        "metrics.jsonl",
        "saved/step-000008/manifest.json",
    ):
        assert (folder / name).is_file(), name
    assert json.loads((folder / "ds_config.json").read_text())["zero_optimization"]["stage"] == 3
    assert "12*L*h*s" in json.loads((folder / "env.json").read_text())["formulas"]
    proof = json.loads((folder / "proof.json").read_text())
    assert proof["policy"] == "full"
    for layer in proof["layers"]:
        assert layer["forwards"] == layer["expected_recomputations"] == layer["recomputations"] == 1
        assert layer["kept_bytes"] <= layer["output_bytes"] == 2 * 192 * 32 * 4
    rows = tiny.rows(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert set(rows[0]) >= CONTRACT
    assert not any(key.startswith("memory/gpu") for key in rows[0])
    assert rows[-1]["memory/host_rss_gib"] > rows[-1]["memory/host_rss_gib_min"] > 0.1, "of two processes"
    assert [row["step"] for row in tiny.rows(folder, "loss/eval")] == [0, 4, 8]


def test_planned_and_measured_stand_side_by_side(whole: tuple[Path, str]) -> None:
    """Exact where both count the same tensors; the peak within what one thread of gloo may still hold."""
    folder, _ = whole
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["reason"] is None and plan["device"] == "cpu"
    assert plan["planned"]["world_size"] == 2
    assert plan["planned"]["fits"] is True
    assert [resource["name"] for resource in plan["planned"]["resources"]] == ["host memory per node"]
    ledger = json.loads((folder / "ledger.json").read_text())
    rows = {row["category"]: row for row in ledger["rows"]}
    for category, tolerance in {
        "weights in host memory": 0.001,
        "gradients in host memory": 0.01,  # and DeepSpeed's flags and norms
        "optimizer state in host memory": 0.001,
        "communication buckets in host memory": 0.001,
        "kept activations, all layers": 0.001,
        "recomputed FLOPs, of forward": 0.001,
        "peak of a micro-batch, on top of the model states": 0.05,
    }.items():
        row = rows[category]
        assert row["measured"] == pytest.approx(row["planned"], rel=tolerance), row
    gathered = rows["gathered by ZeRO-3 per micro-batch"]
    assert gathered["measured"] >= 0.99 * gathered["planned"] > 0, "more, for an evaluation came before"
    kept = ledger["kept_bytes_per_layer"]
    assert kept["planned"] == kept["measured"] and len(kept["measured"]) == 2
    assert rows["host memory"]["measured"] > 0
    assert rows["step time"]["planned"] is None and rows["step time"]["measured"] > 0
    assert "rates are not known" in rows["step time"]["how"]
    assert "plan/gpu_peak_gib" not in tiny.rows(folder)[0], "like memory/gpu_*, absent without a GPU"


@pytest.mark.parametrize("steps", [4, pytest.param(STEPS, marks=pytest.mark.exhaustive)])
def test_forked_ranks_give_the_same_figures(whole: tuple[Path, str], workshop: Path, steps: int) -> None:
    """What other tests launch by forks is what a user would get: every figure but times and memory, and the text.

    A part of the run without exports and W&B shows it too.
    """
    real, said = whole
    is_part = steps < STEPS
    more = [f"train.stop_at={steps}", "tracking=wandb_disabled", "save.best=false"] * is_part
    done = deepspeed(*words(workshop, f"forked_{steps}", *EVERYTHING, *more))
    assert done.code == (75 if is_part else 0), done.out[-6000:]
    forked = workshop / "out" / f"forked_{steps}" / "run"
    expected = [row for row in figures(real) if row["step"] <= steps]
    assert figures(forked) == expected and len(expected) == steps + 1 + steps // 4
    there, here = ({path.name for path in run.iterdir()} for run in (real, forked))
    assert here == there - ({"wandb", "export", "best", "best.json"} if is_part else set())
    for text in ("proven: 2 of 2 layers recomputed", "eval at step 4"):
        assert done.out.count(text) == said.count(text) == 1


def figures(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl without what differs from one launch to the next."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if {"loss/train", "loss/eval"} & row.keys()]
    differs = ("time", "throughput/", "memory/", "plan/host")
    return [{name: value for name, value in row.items() if not name.startswith(differs)} for row in rows]


def test_the_terminal_is_tidy(whole: tuple[Path, str]) -> None:
    _, out = whole
    ours = [
        line for line in out.splitlines() if not line.startswith(("[20", "USDT"))
    ]  # the launcher's own lines
    text = "\n".join(ours)
    assert "2 on cpu" in text
    assert "stage 3 (zero3_offload), optimizer state on cpu, parameters on cpu" in text
    assert "full (2 of 2 layers recomputed whole)" in text
    assert "proven: 2 of 2 layers recomputed (2 regions per forward)" in text
    assert "4 blocks = 2 per rank x 1 accumulated x 2 ranks" in text
    assert re.search(r"plan +peak [\d.]+ MiB per rank, in host memory, in \w+, .* fits with .* to spare", text)
    assert re.search(r"activations +planned ([\d.]+) MiB, measured \1 \(\+0.0%\)", text)
    assert "eval at step 8" in text and "tokens/s" in text and "step time" in text and "peak host" in text
    for noise in ("Warning", "WARNING", "INFO", "Traceback", "FutureWarning", "built successfully"):
        assert noise not in text, noise


def test_wandb_offline_holds_the_same_numbers(whole: tuple[Path, str]) -> None:
    folder, _ = whole
    expected: dict[tuple[int, str], float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        expected |= {(row["step"], k): v for k, v in row.items() if k not in ("step", "time_unix_s")}
    history, config, exit_code = read_wandb(next(folder.glob("wandb/offline-run-*/*.wandb")))
    found = {(step, name): value for step, row in history.items() for name, value in row.items()}
    assert found == pytest.approx(expected, rel=1e-12)
    assert config["train"]["seq_len"] == 192
    assert exit_code == 0


def test_the_export_gives_the_logged_evaluation_loss(whole: tuple[Path, str], workshop: Path) -> None:
    folder, _ = whole
    assert len(list((folder / "export").glob("*.safetensors"))) > 1
    cfg = compose.compose_run(words(workshop, "whole", *EVERYTHING)).run
    net = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(None, str(folder / "export"), trust_remote_code=False)
    blocks = open_blocks(
        cfg.data, tokenizer=load_tokenizer("bytes", None, trust_remote_code=False), seq_len=cfg.train.seq_len,
        seed=cfg.train.seed, show_progress=False,
    ).held_out  # fmt: skip
    assert blocks is not None
    assert tokenizer.decode(tokenizer("naive cafe").input_ids) == "naive cafe"
    total, tokens = 0.0, 0
    for batch in eval_micro_batches(blocks, micro_batch_size=2, rank=0, world_size=1, max_batches=0):
        with torch.no_grad():
            total += loss.TokenLoss(net, LossKind.full)(net, batch).item()
        tokens += int((batch["labels"][:, 1:] != -100).sum())
    assert total / tokens == pytest.approx(tiny.rows(folder, "loss/eval")[-1]["loss/eval"], rel=1e-5)


def test_the_model_of_the_lowest_held_out_loss_is_kept(whole: tuple[Path, str]) -> None:
    folder, _ = whole
    losses = {row["step"]: row["loss/eval"] for row in tiny.rows(folder, "loss/eval") if row["step"] > 0}
    best = json.loads((folder / "best.json").read_text())
    assert best == {"step": min(losses, key=lambda step: losses[step]), "loss/eval": min(losses.values())}
    kept, last = (
        AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("best", "export")
    )
    assert kept.keys() == last.keys()
    assert all(torch.equal(kept[name], last[name]) for name in last) is (best["step"] == STEPS)


def test_the_report_draws_a_real_run(whole: tuple[Path, str]) -> None:
    folder, _ = whole
    drawn = run_report.draw(folder)
    assert {"loss.png", "step_time.png", "memory.png", "throughput.png", "index.html"} <= {
        p.name for p in drawn
    }
    page = (folder / "report" / "index.html").read_text()
    assert "Planned against measured" in page and "optimizer state in host memory" in page
    assert 'src="http' not in page and 'href="http' not in page


def test_remat_export_reads_a_saved_state_without_an_engine(whole: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = whole
    words = ["export", str(folder), "--out", str(tmp_path / "again"), "--dtype", "fp32"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    live = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32).state_dict()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).state_dict()
    assert live.keys() == again.keys()
    assert all(torch.equal(live[name], again[name]) for name in live)


def test_the_rendered_config_trains_as_deepspeed_config(whole: tuple[Path, str]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    folder, _ = whole
    os.environ.setdefault("WORLD_SIZE", "1")
    rendered = json.loads((folder / "ds_config.json").read_text())
    rendered["train_batch_size"] = (
        rendered["train_micro_batch_size_per_gpu"] * rendered["gradient_accumulation_steps"]
    )
    assert DeepSpeedConfig(rendered).zero_config.stage == 3


def test_a_stopped_run_resumes_bit_equal(workshop: Path) -> None:
    """3 steps, a resume in a new process and 1 are 4 steps at once.

    One line is given twice, as of a job that is queued again; the other resume names the run's folder and no option.
    """
    name = "zero3_offload"
    common = ["save.every=0", "save.at_end=false"]
    at_once = {f"{name}_once": words(workshop, f"{name}_once", *common)}
    first = {
        f"{name}_twice": words(workshop, f"{name}_twice", *common, "tracking=wandb_offline", "train.stop_at=3")
    }
    second = {}
    # nothing is learned, so that no evaluation is lower than the first
    idle = ["optim.lr=0", "train.steps=9", "train.eval_every=1", "data.eval_fraction=0.1", "save.best=true"]
    idle += ["train.early_stopping_evals=2", "save.at_end=true"]
    idle += ["resume=auto_or_start"]
    at_once["early"] = second["early"] = words(workshop, "early", *idle)
    second["zero3_offload_twice"] = [f"resume={workshop / 'out' / 'zero3_offload_twice' / 'run'}"]
    for index, spec in enumerate((at_once | first, second)):
        path = workshop / f"resume_{index}.json"
        path.write_text(json.dumps(spec))
        done = deepspeed(str(path), script="tests/support/many_runs.py")
        assert done.code == 0, done.out[-6000:]
        assert "changed: " not in done.out
    out = workshop / "out"
    once, twice = tiny.rows(out / f"{name}_once" / "run"), tiny.rows(out / f"{name}_twice" / "run")
    assert [row["step"] for row in twice] == list(range(1, tiny.STEPS + 1))
    for key in ("loss/train", "optim/grad_norm", "optim/lr", "tokens/seen", "tokens/trained"):
        assert [row[key] for row in once] == [row[key] for row in twice], key
    ids = {file.stem for file in (out / f"{name}_twice" / "run").glob("wandb/offline-run-*/*.wandb")}
    assert len(ids) == 1, "one W&B run across the resume"
    early = out / "early" / "run"
    assert [row["step"] for row in tiny.rows(early)] == [1, 2, 3]
    assert json.loads((early / "best.json").read_text())["step"] == 1
    assert [path.name for path in (early / "saved").iterdir()] == ["step-000003"]
    first, again = (
        json.loads((workshop / f"resume_{index}.done.json").read_text())["early"] for index in (0, 1)
    )
    assert first["finished"] and again["finished"]
    for name in ("loss/train", "loss/eval"):  # what a caller in Python gets
        assert first["metrics"][name] == tiny.rows(early, name)[-1][name]
    assert "no lower held-out loss in 2 evaluations" in done.out and "at step 1, its model is" in done.out


def test_bad_options_are_one_message_and_exit_code_2(tmp_path: Path) -> None:
    done = deepspeed("train.stepz=3", "train.precision=int4", f"output_dir={tmp_path}")
    assert done.code == 2
    assert done.out.count("train.stepz=3: no such option (did you mean train.steps?)") == 1
    assert done.out.count("train.precision=int4") >= 1
    assert "Traceback" not in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_model_too_large_is_refused_before_any_weight_with_exit_code_3(tmp_path: Path) -> None:
    words = ("recipe=llama70b_zero3_offload", "data=python_stdlib", "model.tokenizer=bytes")
    done = deepspeed(*words, f"output_dir={tmp_path}")
    assert done.code == 3, done.out[-3000:]
    assert "host memory" in done.out and "needed" in done.out and "found" in done.out
    assert done.out.count("this machine cannot hold the run") == 1
    assert "peak of each rank in backward" in done.out or "peak of each rank in forward" in done.out
    said = [line.strip() for line in done.out.splitlines() if line.strip().startswith("remat plan ")]
    assert len(said) == 1 and said[0].startswith("remat plan recipe=llama70b_zero3_offload ")
    assert "hardware.host_memory_gib=" in said[0] and "hardware.gpus_per_node=2" in said[0]
    assert "Traceback" not in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", ["unadvised 3", pytest.param("3", marks=pytest.mark.exhaustive)])
def test_running_out_of_memory_says_where_and_what_helps(workshop: Path, which: str) -> None:
    """Rank 1 alone, in the recomputation of the last layer: it tells, rank 0 keeps quiet, nobody hangs."""
    name = f"too_much_{which.replace(' ', '_')}"
    done = deepspeed(which, *words(workshop, name, *tiny.NO_CHOICE), script="tests/support/fails_in.py")
    assert done.code == 70, done.out[-3000:]
    assert done.out.count("out of host memory in recompute, layer 1 on rank 1") == 1, done.out[-3000:]
    assert re.search(r"host, of this rank +[\d.]+ MiB +[\d.]+ MiB", done.out)
    assert "asked for" in done.out and "DefaultCPUAllocator: can't allocate memory" in done.out
    helps = (
        "what needs less, ask:" if "unadvised" in which else "the cheapest changes that need less, by the plan:"
    )
    assert helps in done.out
    assert re.search(r"hardware.gpu_memory_gib=1\.\d+$", done.out, re.MULTILINE)
    assert "Traceback" not in done.out
    assert (workshop / "out" / name / "run" / "plan.json").is_file()


def test_non_finite_steps_are_skipped_counted_and_stop_the_run_with_exit_code_70(workshop: Path) -> None:
    done = deepspeed(
        *words(
            workshop,
            "blown",
            "optim.lr=1",
            "optim.weight_decay=1e30",
            "optim.warmup_steps=0",
            "train.max_skipped_steps=2",
        )
    )
    assert done.code == 70, done.out[-3000:]
    assert "2 steps in a row" in done.out
    folder = workshop / "out" / "blown" / "run"
    skips = [json.loads(line) for line in (folder / "nonfinite.jsonl").read_text().splitlines()]
    assert [skip["step"] for skip in skips] == [2, 3]
    assert all(len(skip["sample_ids"]) == 4 for skip in skips)
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["finished"] is False
    measured = {row["category"]: row["measured"] for row in ledger["rows"]}
    assert measured["optimizer state in host memory"] > 0 and measured["step time"] is None
    assert math.isfinite(tiny.rows(folder)[0]["loss/train"])


def test_fp16_scales_its_loss_or_is_refused_where_the_device_cannot(workshop: Path) -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    done = deepspeed(*words(workshop, "half", "train.precision=fp16", "deepspeed.config=zero2"))
    if CPU_Accelerator().is_fp16_supported():
        assert done.code == 0, done.out[-4000:]
        rows = tiny.rows(workshop / "out" / "half" / "run")
        assert all(row["optim/loss_scale"] >= 1 for row in rows)
    else:
        assert done.code == 2
        assert "train.precision=fp16 is not supported" in done.out and "use fp32, bf16" in done.out


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("single", marks=pytest.mark.exhaustive)])
def test_other_launchers(workshop: Path, launcher: str) -> None:
    name = f"by_{launcher}"
    program = [sys.executable, "train.py"]
    if launcher == "torchrun":
        more = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
        program = [sys.executable, *more, "train.py"]
    array = workshop / "data.json"
    array.write_text(json.dumps([json.loads(line) for line in (workshop / "data.jsonl").open()]))
    found = ("data=files", f"data.path={array}")  # rank 0 finds the format, and the others are told
    done = run([*program, *words(workshop, name, "deepspeed.config=zero2", *found)])
    assert done.code == 0, done.out[-4000:]
    assert "1 json file, alpaca by its fields instruction, input, output; in the chat template" in " ".join(
        done.out.split()
    )
    export = workshop / "out" / name / "run" / "model"
    assert (export / "chat_template.jinja").is_file()
    assert len(tiny.rows(workshop / "out" / name / "run")) == tiny.STEPS
