"""A launch looks at its data and its tokenizer first, and tells what is wrong with them beside what else is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from remat.config import compose
from remat.config.options import ConfigError, DataFormat, Packing, RunConfig
from remat.data import first_look, formats
from remat.data.build import NoRoom
from remat.data.first_look import look_first
from remat.model import hf_model
from remat.planning import strategy
from remat.planning.preflight import DoesNotFit
from remat.training import build


def run_of(*words: str) -> RunConfig:
    return compose.compose_run(["model=tiny_llama", "model.tokenizer=bytes", *words]).run


def refused(*words: str) -> str:
    composed = compose.compose_run(list(words))
    with pytest.raises(ConfigError) as error:
        build.build(composed)
    return str(error.value)


def test_missing_data_is_told_although_the_machine_is_too_small(tmp_path: Path) -> None:
    """Also held-out data and the tokenizer; the machine is compared by the model states, without a plan."""
    told = refused(
        "recipe=llama8b_zero3_offload_optimizer",
        "model.path=null",
        f"model.tokenizer={tmp_path}/no-tokenizer",
        "model.init=random",
        "train.global_batch_size=64",
        f"data.path={tmp_path}/missing.jsonl",
        f"data.eval_path={tmp_path}/absent",
        f"output_dir={tmp_path}/out",
        "hardware=this_machine",
        "model.architecture.num_hidden_layers=400",  # 100 billion parameters, more than any machine that runs this test
    )
    assert f"data.path={tmp_path}/missing.jsonl does not exist" in told
    assert f"data.eval_path={tmp_path}/absent does not exist" in told
    assert f"model.tokenizer={tmp_path}/no-tokenizer does not exist" in told
    assert "this machine cannot hold the run" in told
    assert not (tmp_path / "out").exists()


def test_rows_of_no_format_and_chats_without_a_template_are_told_first(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"question": "q", "answer": "a"}]))
    told = refused("recipe=tiny_zero3_offload", "data=files", f"data.path={path}", f"output_dir={tmp_path}/out")
    assert "has the fields question, answer" in told
    path.write_text(json.dumps([{"messages": [{"role": "assistant", "content": "a"}]}]))
    words = ("recipe=tiny_zero3_offload", "data=files", f"data.path={path}", f"output_dir={tmp_path}/out")
    assert "chats need a chat template" in refused(*words, "data.chat_template=none")
    assert "data.packing=stream with data.format=chat: rows" in refused(*words, "data.packing=stream")


def test_wrong_files_are_told_without_torch(tmp_path: Path) -> None:
    path, template = tmp_path / "a.json", tmp_path / "template.jinja"
    path.write_text(json.dumps([{"question": "q", "answer": "a"}]))
    template.write_text("{{ messages")
    chat = f"data.chat_template={template}"
    words = ["recipe=tiny_zero3_offload", "data=files", f"data.path={path}", chat]
    look = (
        "import sys; from remat.config import compose; from remat.data import first_look;"
        "run = compose.compose_run(sys.argv[1:]).run; print(*first_look.file_problems(run.data, run.model));"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", look, *words], capture_output=True, text=True, check=True
    ).stdout
    assert "has the fields question, answer" in told and f"{chat} is no Jinja template" in told
    assert told.endswith("\n['transformers']\n")
    path.write_text(json.dumps([{"text": "a"}]))
    cfg = run_of(*words[1:3], f"data.eval_path={path}")
    (trained,) = first_look.file_problems(cfg.data, cfg.model)
    assert trained.startswith(
        f"{path} is in data.path={path} and in data.eval_path={path}: evaluation would be on"
    )


def test_chats_without_a_template_are_told_by_the_files_of_the_tokenizer(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.jsonl", tmp_path / "tokenizer"
    folder.mkdir()
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}))
    settings = folder / "tokenizer_config.json"

    def problems(*words: str) -> list[str]:
        cfg = run_of("data=files", f"data.path={path}", f"model.tokenizer={folder}", *words)
        return first_look.file_problems(cfg.data, cfg.model)

    assert problems() == []  # another kind of tokenizer: it is loaded first
    settings.write_text("{}")
    assert problems() == [formats.WITHOUT_TEMPLATE]
    assert problems("data.chat_template=none") == problems("data.format=chat") == [formats.WITHOUT_TEMPLATE]
    assert problems("model.tokenizer=bytes") == []
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert problems() == []
    settings.write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert problems() == []


def test_options_that_would_do_nothing_for_the_format_that_was_found_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    words = ("data=files", f"data.path={path}")
    idle = ("data.train_on_roles=all", "data.train_on_end_token=false", "data.alpaca_prompt=stanford")
    for option in (*idle, "data.columns.messages=dialogue"):
        cfg = run_of(*words, option)
        (problem,) = look_first(cfg.data, cfg.model).problems
        assert problem.lower() == f"{option} has no effect with data.format=plain: leave it out"
    cfg = run_of(*words, "data.columns.text=text", "data.chat_template=none")
    assert look_first(cfg.data, cfg.model).problems == []
    cfg = run_of(*words, "data.split=test")
    assert "data.split=test has no effect on data.path=" in "".join(look_first(cfg.data, cfg.model).problems)


def test_what_was_found_decides_how_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    for row, expected in (({"text": "x"}, DataFormat.plain), (chat, DataFormat.chat)):
        path.write_text(json.dumps(row) + "\n")
        cfg = run_of("data=files", f"data.path={path}")
        looked = look_first(cfg.data, cfg.model)
        assert (looked.data.format, looked.problems) == (expected, [])
        unknown = strategy.decide(cfg, world_size=1, can_pin=False)
        found, decided = build._with_format(cfg, unknown, looked)
        assert found.data.format == expected
        asked = replace(cfg, data=replace(cfg.data, format=expected))
        assert decided.packed == strategy.decide(asked, world_size=1, can_pin=False).packed
    # Where ranks of other nodes wait, rank 0's problems are told when all have joined.
    with pytest.raises(ConfigError, match="no such data"):
        build._with_format(cfg, unknown, looked._replace(problems=["no such data"]))
    bundled = run_of("data=python_stdlib")
    for data in (bundled.data, run_of("data=synthetic").data):
        assert look_first(data, bundled.model)[:2] == (replace(data, format=DataFormat.plain), [])
    assert strategy.decide(bundled, world_size=1, can_pin=False).packed.form is Packing.documents


@pytest.mark.parametrize("source", ["synthetic", "python_stdlib"])
def test_a_source_without_rows_and_paths_refuses_both(source: str) -> None:
    for word, told in (
        ("data.format=chat", f"data.format=chat needs rows with fields, and data.source={source} has none: "),
        ("data.path=a.jsonl", f"data.path=a.jsonl has no meaning with data.source={source}: "),
        ("data.eval_path=a.jsonl", f"data.eval_path=a.jsonl has no meaning with data.source={source}: "),
    ):
        cfg = run_of(f"data={source}", word)
        (problem,) = look_first(cfg.data, cfg.model).problems
        assert problem.startswith(told) and problem.endswith(f"or remove {word.partition('=')[0]}")


def test_a_cache_without_room_is_a_machine_that_is_not_able(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise NoRoom("data.cache_dir=cache has 1 KiB free")

    cfg = run_of("data=synthetic")
    monkeypatch.setattr(build, "open_blocks", full)
    decided = strategy.decide(cfg, world_size=1, can_pin=False)
    with pytest.raises(DoesNotFit, match=r"data\.cache_dir=cache has 1 KiB free"):
        build._data(cfg, hf_model.load_config(cfg.model), decided, Mock(), None)


def test_a_hub_dataset_is_looked_at_without_loading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "p", "completion": "c"}\n' * 40)
    cfg = run_of("data=hub", f"data.path={folder}")
    expected = replace(cfg.data, format=DataFormat.prompt_completion)
    assert look_first(cfg.data, cfg.model)[:2] == (expected, [])
    assert not list((tmp_path / "hub").glob("**/*.arrow"))
    cfg.data.path = f"{folder}@none"
    ((problem),) = look_first(cfg.data, cfg.model).problems
    assert "split none" in problem
