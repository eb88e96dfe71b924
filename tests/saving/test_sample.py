"""What a model that a run wrote answers, through its chat template or without one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from remat import cli
from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat, PeftConfig, PeftMethod
from remat.data.formats import encode
from remat.data.rows import BadRowLog, Document
from remat.data.tokenizer import CHAT_TEMPLATE, byte_tokenizer
from remat.model import adapters
from remat.model.layers import decoder_layers
from remat.saving.exports import export, merge, sample
from tests.saving.test_merge import engine
from tests.support import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the folder `export` of a run, with a chat template."""
    folder = tiny.make_model(tmp_path_factory.mktemp("run") / "export")
    byte_tokenizer().save_pretrained(folder)
    return folder


def answers(place: Path, *words: str, said: str = "") -> str:
    done = CliRunner().invoke(cli.app, ["sample", str(place), *words], input=said)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_prompt_goes_through_the_chat_template(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = sample.Speaker._ids

    def watched(self: sample.Speaker, prompt: str) -> torch.Tensor:
        ids = original(self, prompt)
        asked.append(self.tokenizer.decode(ids[0]))
        return ids

    monkeypatch.setattr(sample.Speaker, "_ids", watched)
    words = ["--max-new-tokens", "8", "--temperature", "0"]
    told = answers(model.parent, *words, "--prompt", "Hi")
    assert answers(model, *words, said="Hi\n") == told, "from standard input, and by the model's own folder"
    assert asked == ["[user]\nHi<|end|>\n[assistant]\n"] * 2
    assert "Hi" not in told, "only the answer is shown"
    raw = answers(model, *words, "--prompt", "Hi", "--raw")
    assert asked[-1] == "Hi" and raw.startswith("Hi") and raw != told


def test_a_prompt_without_a_chat_begins_as_documents_did_in_training(model: Path) -> None:
    opening = byte_tokenizer()
    opening.add_special_tokens({"bos_token": "<s>"})
    opening.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", opening.bos_token_id)]
    )
    speaker = sample.load(model, sample.Settings(raw=True))
    assert speaker._ids("Hi").tolist() == [[*b"Hi"]]
    speaker.tokenizer = opening
    trained = encode(
        [Document("Hi", "", "")], DataConfig(format=DataFormat.plain), opening, BadRowLog(BadRows.stop)
    )
    begun = trained[0][0].ids[:3].tolist()
    assert begun == [opening.bos_token_id, *b"Hi"]
    assert speaker._ids("Hi").tolist() == speaker._ids("<s>Hi").tolist() == [begun]
    speaker.settings, speaker.messages = sample.Settings(), [{"role": "user", "content": "Hi"}]
    assert opening.bos_token_id not in speaker._ids("Hi")[0], "a template writes what it wants"


def test_what_is_shown_is_what_plain_transformers_generates(model: Path) -> None:
    speaker = sample.load(model, sample.Settings(max_new_tokens=12, temperature=0))
    shown: list[str] = []
    told = speaker.answer("Count", shown.append)
    net, tokenizer = AutoModelForCausalLM.from_pretrained(model), byte_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = net.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=256, pad_token_id=257)
    assert told == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert "".join(shown) == told + "\n" and len(shown) > 1, "as it comes"


def test_a_seed_repeats_and_another_differs(model: Path) -> None:
    words = ["--prompt", "Hi", "--max-new-tokens", "16"]
    assert answers(model, *words, "--seed", "1") == answers(model, *words, "--seed", "1")
    assert answers(model, *words, "--seed", "1") != answers(model, *words, "--seed", "2")


def test_a_conversation_is_remembered_and_begins_anew_when_it_is_too_long(model: Path) -> None:
    speaker = sample.load(model, sample.Settings(max_new_tokens=4))
    speaker.model.config.max_position_embeddings = 200
    shown: list[str] = []
    sample.converse(speaker, ["one", "  ", "two"], shown.append)
    assert [turn["role"] for turn in speaker.messages] == ["user", "assistant"] * 2
    sample.converse(speaker, ["x" * 300], shown.append)
    assert "leave no room in the model's 200: say less; the conversation starts anew" in shown[-1]
    assert speaker.messages == []


def test_a_turn_ends_an_answer(model: Path, tmp_path: Path) -> None:
    """Also where the token that ends a turn is not the one that ends a text."""
    speaker = sample.load(model, sample.Settings())
    assert speaker._ends() == [2, 256], "Llama's, and the tokenizer's"
    speaker.tokenizer.chat_template = CHAT_TEMPLATE.replace("eos_token", "'<|pad|>'")
    assert speaker._ends() == [2, 256, 257]


def test_adapters_answer_on_their_base_and_merged_as_there(model: Path, tmp_path: Path) -> None:
    net = AutoModelForCausalLM.from_pretrained(model)
    peft = PeftConfig(method=PeftMethod.lora, r=4)
    wrapped = adapters.add_lora(net, peft, layers=decoder_layers(net), ds_config={}, zero_stage=0, seed=1)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    tokenizer = byte_tokenizer()
    export.export(engine(wrapped), tmp_path / "export", export.Form(), tokenizer=tokenizer)
    words = ["--prompt", "Hi", "--temperature", "0", "--max-new-tokens", "16"]
    told = answers(tmp_path, *words)
    assert told != answers(model, *words)
    merge.export_merged(engine(wrapped), tmp_path / "merged", export.Form(), tokenizer=tokenizer)
    assert sample.find_model(tmp_path) == tmp_path / "merged"
    assert answers(tmp_path, *words) == told


def test_what_cannot_answer_says_why(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(place: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            sample.load(place, sample.Settings())

    (tmp_path / "run" / "saved").mkdir(parents=True)
    refused(tmp_path / "run", "has no exported model: write one with `remat export`")
    refused(tmp_path, "give a run or an exported model")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    refused(adapter, "names no base model.*save.merge=true")
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "/gone/base"}')
    refused(adapter, "/gone/base does not exist")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "cut" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-9])
    refused(tmp_path / "cut", r"model.safetensors is cut off")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="the prompt is empty"):
        cli.sample_command(model, "", 4, 0.0, 0, True)
