"""What goes to the hub and what must not, with a fake of its API; and the model card that goes along."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import httpx2
import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError
from typer.testing import CliRunner

from remat import cli
from remat.config.options import ConfigError
from remat.data.tokenizer import byte_tokenizer
from remat.report import model_card
from remat.saving.exports import push
from tests.report.test_run_report import make, row
from tests.support import tiny

TOKEN = "hf_" + "aB3" * 12


class Hub:
    """In the place of `HfApi`: remembers what it was asked."""

    def __init__(self, *, private: bool = True, known: bool = True) -> None:
        self.private, self.known, self.asked = private, known, dict[str, Any]()

    def create_repo(self, repo_id: str, **more: Any) -> str:
        if not self.known:
            raise LocalTokenNotFoundError("no token")
        self.asked["create"] = {"repo_id": repo_id, **more}
        return f"https://huggingface.co/{repo_id}"

    def model_info(self, _: str) -> Any:
        return SimpleNamespace(private=self.private)

    def upload_folder(self, **more: Any) -> None:
        self.asked["upload"] = more


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tiny.make_model(tmp_path / "export")
    byte_tokenizer().save_pretrained(folder)
    return folder


def send(folder: Path, hub: Hub, repo_id: str = "me/model", *, public: bool = False) -> str:
    with patch.object(push, "HfApi", lambda: hub):
        return push.push(folder, repo_id, public=public, message="Upload the model")


@pytest.mark.parametrize(
    ("base", "refused"), [("/home/me/llama", True), ("~/llama", True), ("me/llama", False)]
)
def test_adapters_name_a_base_that_others_can_load(tmp_path: Path, base: str, refused: bool) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    found = push.problems(tmp_path)
    assert [f"names the base by {base}" in line for line in found] == [True] * refused


def test_a_model_goes_to_a_private_repository(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr(push, "HfApi", lambda: hub)
    done = CliRunner().invoke(cli.app, ["push", str(model), "me/model"])
    assert (done.exit_code, done.stdout) == (0, "https://huggingface.co/me/model\n"), done.output
    assert hub.asked["create"] == {"repo_id": "me/model", "private": True, "exist_ok": True}
    assert hub.asked["upload"]["folder_path"] == str(model)
    send(model, hub, public=True)
    assert hub.asked["create"]["private"] is False


def test_a_public_repository_is_not_filled_by_mistake(model: Path) -> None:
    hub = Hub(private=False)
    with pytest.raises(ConfigError, match=r"me/model exists and is public: say --public"):
        send(model, hub)
    assert "upload" not in hub.asked


@pytest.mark.parametrize("asked", ["create_repo", "model_info", "upload_folder"])
def test_a_hub_that_does_not_answer_is_said(model: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    hub = Hub()
    monkeypatch.setattr(hub, asked, Mock(side_effect=httpx2.ConnectError("Name or service not known")))
    with pytest.raises(ConfigError, match=r"the hub does not answer \(Name or service not known\)"):
        send(model, hub)


def test_no_token_and_no_name_are_said(model: Path) -> None:
    with pytest.raises(ConfigError, match="type `hf auth login`"):
        send(model, Hub(known=False))
    with pytest.raises(ConfigError, match=r"a/b/c is no name of a repository .*OWNER/NAME"):
        send(model, Hub(), "a/b/c")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("engine/zero_pp_rank_0.pt", "x", "engine/zero_pp_rank_0.pt is no part of an exported model"),
        ("pytorch_model.bin", "x", "pytorch_model.bin is no part"),
        (".env", "x", ".env is no part"),
        ("notes.md", f"first\nlog in with {TOKEN}\n", "notes.md, line 2, holds what looks like a secret"),
        ("run.json", json.dumps({"wandb_api_key": "0123456789abcdef"}), "run.json, line 1, holds"),
        ("merges.txt", f"a b\n{TOKEN}\n", "merges.txt, line 2, holds"),
        ("code.py", f"x = '{TOKEN}'\n", "code.py, line 1, holds"),
    ],
)
def test_what_is_no_part_of_a_model_stays_here(model: Path, name: str, content: str, said: str) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text(content)
    hub = Hub()
    with pytest.raises(ConfigError) as caught:
        send(model, hub)
    assert said in str(caught.value) and TOKEN not in str(caught.value)
    assert not hub.asked


def test_a_secret_of_the_environment_and_a_link_stay_here(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "swordfish-17")
    (model / "README.md").write_text("the word is swordfish-17\n")
    (model / "other.json").symlink_to("/etc/hostname")
    found = push.problems(model)
    assert [text.split(",")[0].split(" ")[0] for text in found] == ["README.md", "other.json"]


def test_a_vocabulary_may_name_what_it_likes(model: Path) -> None:
    (model / "vocab.json").write_text(json.dumps({"password": 1, "api_key": 2, "secret=": 12345678}))
    settings = {
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {"3": {"content": "<|tool|>", "special": True}},
    }
    (model / "special_tokens_map.json").write_text(json.dumps(settings, indent=2))
    assert push.problems(model) == []


def test_a_run_directory_is_no_model(model: Path) -> None:
    assert "give " + str(model) in push.problems(model.parent)[0]
    merged = Path(shutil.copytree(model, model.parent / "merged"))
    assert push.problems(model.parent)[0].endswith(" or ".join(map(str, sorted([model, merged]))))
    shutil.rmtree(merged)
    (model / "model.safetensors").unlink()
    assert "has no weights" in push.problems(model)[0]
    assert "write one with `remat export RUN_DIR`" in push.problems(model.parent)[0]


def records(folder: Path, **more: Any) -> Path:
    config = {
        "name": "lora",
        "model": {"init": "pretrained", "path": str(folder / "secret-home" / "llama")},
        "data": {"source": "files", "path": [str(folder / "alice" / "chats.json"), "b.jsonl"]},
        "train": {
            "precision": "bf16",
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "seq_len": 64,
            "steps": 3,
        },
        "peft": {"method": "lora", "r": 8, "alpha": 16, "rslora": True},
        "deepspeed": {"config": "zero3"},
        "checkpointing": {"policy": "full"},
        "optim": {"lr": 1e-4, "schedule": "cosine"},
        "tracking": {"project": f"p {TOKEN}"},
    }
    env = {"world_size": 2, "gpu": "H100", "torch": "2.13", "deepspeed": "0.19.8", "commit": f"abc {TOKEN}"}
    rows = [
        row(1, **{"memory/gpu_allocated_peak_gib": 3.25, "tokens/seen": 100.0}),
        row(2, **{"memory/gpu_allocated_peak_gib": 4.5, "tokens/seen": 200.0, "loss/eval": 1.75}),
    ]
    make(folder, rows)
    (folder / "config.yaml").write_text(yaml.safe_dump(config | more))
    (folder / "env.json").write_text(json.dumps(env))
    return folder


def test_the_card_has_the_facts_of_the_run(tmp_path: Path) -> None:
    folder = records(tmp_path / "run-7")
    text = model_card.compose(folder, folder, adapter=True)
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["remat", "deepspeed", "lora"],
    }
    for line in (
        "# lora", "| base model | llama |", "chats.json, b.jsonl", "| recipe | lora |",
        "| trained | LoRA r=8 alpha=16 on every linear module", "| ranks | 2 x H100 |",
        "| memory strategy | zero3 |", "| checkpointing | full |", "| last step | 2 |", "| tokens seen | 200 |",
        "| eval loss, last | 1.7500 |", "| tokens/s, all ranks |", "| GPU allocated, peak | 4.50 |",
        "torch 2.13, deepspeed 0.19.8", "AutoPeftModelForCausalLM",
    ):  # fmt: skip
        assert line in text, line
    assert TOKEN not in text and "secret-home" not in text and "alice" not in text and str(tmp_path) not in text


def test_names_of_the_hub_are_said_so_and_a_run_without_a_row_has_a_card(tmp_path: Path) -> None:
    folder = records(
        tmp_path / "run",
        model={"init": "pretrained", "path": "meta-llama/Llama-3.2-1B"},
        data={"source": "hub", "path": "tatsu-lab/alpaca"},
        peft={"method": "none"},
    )
    (folder / "metrics.jsonl").write_text("")
    text = model_card.compose(folder, folder, adapter=False)
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["datasets"]) == ("meta-llama/Llama-3.2-1B", ["tatsu-lab/alpaca"])
    assert data["library_name"] == "transformers" and data["tags"] == ["remat", "deepspeed"]
    assert "| trained | every weight |" in text and "Final figures" not in text
    assert push._secret_line(_written(tmp_path / "README.md", text)) is None


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
