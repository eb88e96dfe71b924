"""Rows of every format become the same chats, and in templates as models have them the asked turns are trained."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from remat.config.options import AlpacaPrompt, BadRows, ConfigError, DataConfig, DataFormat, DataSource
from remat.data.cache import open_blocks
from remat.data.formats import encode
from remat.data.rows import BadRowLog, Document, Instruction, content_of
from remat.data.sources import open_corpus
from remat.data.tokenizer import byte_tokenizer, load_tokenizer
from tests.data.test_sources import documents

CHATML = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MARKED = CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
).replace(
    "<|im_end|>\n{% endfor %}",
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
)
TURNS = [("system", "be kind"), ("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2 ")]
OPENAI = {"messages": [{"role": role, "content": text} for role, text in TURNS]}
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = {"conversations": [{"from": NAMES[role], "value": text} for role, text in TURNS]}
SAME = {
    DataFormat.chat: [
        OPENAI,
        {"messages": SHAREGPT["conversations"], "tools": None},
        {"messages": json.dumps(OPENAI["messages"]), "id": 3},
        {"messages": [{"role": r, "content": [{"type": "text", "text": t}], "name": None} for r, t in TURNS]},
    ],
    DataFormat.sharegpt: [
        SHAREGPT,
        {"conversations": OPENAI["messages"]},
        {"conversations": SHAREGPT["conversations"][1:], "system": "be kind", "id": "x"},
        {"conversations": json.dumps(SHAREGPT["conversations"][1:]), "system": "be kind"},
    ],
    DataFormat.prompt_completion: [],
}


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of ChatML and Llama 3."""
    made = byte_tokenizer()
    special = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    made.add_special_tokens({"additional_special_tokens": special, "bos_token": "<|begin_of_text|>"})
    made.chat_template = template
    return made


def config(**options: Any) -> DataConfig:
    return DataConfig(source=DataSource.files, eval_fraction=0.0, **options)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(cfg: DataConfig, path: str, made: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """(whole text, trained text) of each row; the format is found."""
    cfg = replace(cfg, format=open_corpus(cfg, path).data_format)
    log = BadRowLog(BadRows.stop)
    found = encode(list(documents(cfg, path)), cfg, made, log)
    log.check()
    texts = []
    for (example,) in found:
        assert example.trained is not None
        texts.append((str(made.decode(example.ids)), str(made.decode(example.ids[example.trained]))))
    return texts


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MARKED])
def test_openai_and_sharegpt_in_all_their_forms_are_the_same_tokens(tmp_path: Path, template: str) -> None:
    made = tokenizer(template)
    whole = made.apply_chat_template(OPENAI["messages"], tokenize=False)
    spoken = "1<|eot_id|>2<|eot_id|>" if template == LLAMA3 else "1<|im_end|>\n2 <|im_end|>\n"
    for data_format, rows in SAME.items():
        for row in rows:
            path = write(tmp_path / "a.jsonl", row)
            assert open_corpus(config(), path).data_format == data_format
            assert trained(config(), path, made) == [(whole, spoken)], row


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        (CHATML, ["assistant"], "1<|im_end|>\n2 <|im_end|>\n"),
        (CHATML, ["user"], "one?<|im_end|>\ntwo?<|im_end|>\n"),
        (CHATML, ["system", "assistant"], "be kind<|im_end|>\n1<|im_end|>\n2 <|im_end|>\n"),
        (CHATML, "all", "be kind<|im_end|>\none?<|im_end|>\n1<|im_end|>\ntwo?<|im_end|>\n2 <|im_end|>\n"),
        (MARKED, ["user", "assistant"], "one?<|im_end|>\n1<|im_end|>\ntwo?<|im_end|>\n2 <|im_end|>\n"),
        (MARKED, ["user"], "one?<|im_end|>\ntwo?<|im_end|>\n"),
        (LLAMA3, "all", "be kind<|eot_id|>one?<|eot_id|>1<|eot_id|>two?<|eot_id|>2<|eot_id|>"),
    ],
)
def test_the_roles_that_are_asked_for_are_trained_and_their_ends_if_asked(
    tmp_path: Path, template: str, roles: Any, expected: str
) -> None:
    path, made = write(tmp_path / "a.jsonl", OPENAI), tokenizer(template)
    assert trained(config(train_on_roles=roles), path, made)[0][1] == expected
    ends = "<|eot_id|>" if template == LLAMA3 else "<|im_end|>\n"
    without = trained(config(train_on_roles=roles, train_on_end_token=False), path, made)[0][1]
    assert without == expected.replace(ends, "")


@pytest.mark.parametrize("word", ["im", "user", "start", "<", "assistant\n"])
def test_words_of_the_template_in_a_turn_do_not_move_what_is_trained(tmp_path: Path, word: str) -> None:
    turns = [("user", word), ("assistant", word), ("user", word), ("assistant", word)]
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": r, "content": t} for r, t in turns]})
    for roles in ("all", ["user"], ["assistant"]):
        count = 4 if roles == "all" else 2
        ((_, spoken),) = trained(config(train_on_roles=roles), path, tokenizer(CHATML))
        assert spoken == f"{word}<|im_end|>\n" * count


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MARKED])
def test_a_chat_may_begin_with_the_assistant(tmp_path: Path, template: str) -> None:
    """As many of ShareGPT do."""
    turns = [{"from": "gpt", "value": "im"}, {"from": "human", "value": "im"}, {"from": "gpt", "value": "so"}]
    path = write(tmp_path / "a.jsonl", {"conversations": turns})
    ends = "<|eot_id|>" if template == LLAMA3 else "<|im_end|>\n"
    assert trained(config(), path, tokenizer(template))[0][1] == f"im{ends}so{ends}"


def test_tools_their_calls_and_their_answers(tmp_path: Path) -> None:
    """OpenAI's arguments are text and ShareGPT's calls too: a template gets objects, as it expects."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"name": "look", "arguments": {"at": "sky"}}
    as_text = {"name": "look", "arguments": '{"at": "sky"}'}
    openai = [
        {"role": "user", "content": "colour?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "id": "1", "function": as_text}],
        },
        {"role": "tool", "content": "blue", "tool_call_id": "1"},
        {"role": "assistant", "content": "Blue."},
    ]
    older = [openai[0], {"role": "assistant", "content": None, "function_call": as_text}, *openai[2:]]
    older[2] = {"role": "function", "name": "look", "content": "blue"}
    sharegpt = [
        {"from": "human", "value": "colour?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "blue"},
        {"from": "gpt", "value": "Blue."},
    ]
    rows = [
        {"messages": openai, "tools": tools},
        {"messages": older, "tools": json.dumps(tools)},
        {"messages": sharegpt, "tools": tools},
    ]
    made = tokenizer(CHATML)
    for row in rows:
        path = write(tmp_path / "a.jsonl", row)
        ((whole, spoken),) = trained(config(), path, made)
        assert '"name": "look"' in whole.partition("<|im_end|>")[0]
        assert spoken == '<tool_call>{"at": "sky"}</tool_call><|im_end|>\nBlue.<|im_end|>\n'
        ((_, both),) = trained(config(train_on_roles=["assistant", "tool"]), path, made)
        assert both == '<tool_call>{"at": "sky"}</tool_call><|im_end|>\nblue<|im_end|>\nBlue.<|im_end|>\n'


def test_calls_that_the_template_leaves_out_are_not_trained_as_empty_turns(tmp_path: Path) -> None:
    """Llama 3's template writes content alone: the turn would be its end token and nothing else."""
    call = {"type": "function", "function": {"name": "w", "arguments": "{}"}}
    asked, calls = {"role": "user", "content": "weather?"}, {"role": "assistant", "tool_calls": [call]}
    rest = [{"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny."}]
    made = tokenizer(LLAMA3)
    path = write(tmp_path / "a.jsonl", {"messages": [asked, calls, *rest]})
    with pytest.raises(ConfigError, match="it does not write calls of tools: name a template that does"):
        trained(config(), path, made)
    path = write(tmp_path / "a.jsonl", {"messages": [asked, calls | {"weight": 0}, *rest]})
    assert trained(config(), path, made)[0][1] == "Sunny.<|eot_id|>"


def test_turns_of_weight_0_are_seen_and_not_trained(tmp_path: Path) -> None:
    messages = [dict(message) for message in OPENAI["messages"]]
    messages[2]["weight"] = 0  # type: ignore[assignment]
    path = write(tmp_path / "a.jsonl", {"messages": messages})
    for template in (CHATML, MARKED):
        assert trained(config(), path, tokenizer(template))[0][1] == "2 <|im_end|>\n"


def test_alpaca_goes_through_the_template_where_there_is_one(tmp_path: Path) -> None:
    rows = [
        {"instruction": "add", "input": "1 2", "output": "3", "text": "rendered elsewhere"},
        {"instruction": "more", "output": "4", "system": "be brief", "history": [["hi", "hello"]]},
    ]
    path, made = write(tmp_path / "a.jsonl", *rows), tokenizer(CHATML)
    first, second = trained(config(), path, made)
    assert first == (
        "<|im_start|>user\nadd\n\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n",
        "3<|im_end|>\n",
    )
    assert second[0].startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    assert second[1] == "hello<|im_end|>\n4<|im_end|>\n"
    stanford = config(alpaca_prompt=AlpacaPrompt.stanford)
    with pytest.raises(ConfigError, match=r"data\.alpaca_prompt=stanford: .*jsonl:2 has a field 'system'"):
        trained(stanford, path, made)
    path = write(tmp_path / "a.jsonl", rows[0])
    ((whole, answer),) = trained(stanford, path, made)
    assert whole.startswith("Below is an instruction") and answer == "3<|end|>"
    assert trained(replace(stanford, train_on_end_token=False), path, made)[0][1] == "3"
    made.chat_template = None
    assert trained(config(), path, made) == [(whole, answer)]
    with pytest.raises(ConfigError, match=r"data\.chat_template=FILE_OR_FOLDER"):
        trained(config(alpaca_prompt=AlpacaPrompt.template), path, made)


def test_prompts_and_completions_as_text_and_as_messages(tmp_path: Path) -> None:
    texts = {"prompt": "Q: 1+1?\nA:", "completion": " 2"}
    lists = {
        "prompt": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "seen"},
            OPENAI["messages"][1],
        ],
        "completion": [{"role": "assistant", "content": "said"}],
    }
    mixed = lists | {"completion": "said"}
    path, made = write(tmp_path / "a.jsonl", texts), tokenizer(CHATML)
    ((whole, answer),) = trained(config(), path, made)
    assert whole == "<|im_start|>user\nQ: 1+1?\nA:<|im_end|>\n<|im_start|>assistant\n 2<|im_end|>\n"
    assert answer == " 2<|im_end|>\n"
    made.chat_template = None
    assert trained(config(), path, made) == [("Q: 1+1?\nA: 2<|end|>", " 2<|end|>")]
    assert trained(config(train_on_roles="all"), path, made)[0][1] == "Q: 1+1?\nA: 2<|end|>"
    made.chat_template = CHATML
    for row in (lists, mixed):
        assert trained(config(), write(tmp_path / "a.jsonl", row), made)[0][1] == "said<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "columns", "text_field", "data_format"),
    [
        ({"dialogue": OPENAI["messages"], "text": "x"}, {"messages": "dialogue"}, "text", DataFormat.chat),
        (
            {"question": "q", "answer": "a"},
            {"instruction": "question", "output": "answer"},
            "text",
            DataFormat.alpaca,
        ),
        ({"q": "q", "a": "a"}, {"prompt": "q", "completion": "a"}, "text", DataFormat.prompt_completion),
        ({"body": "b", "instruction": "i", "output": "o"}, {"text": "body"}, "text", DataFormat.plain),
        ({"body": "b", "instruction": "i", "output": "o"}, {}, "body", DataFormat.plain),
        (
            {"messages": "an id", "turns": SHAREGPT["conversations"]},
            {"conversations": "turns"},
            "text",
            "sharegpt",
        ),
        ({"prompt": "p", "messages": OPENAI["messages"], "text": "t"}, {}, "text", DataFormat.chat),
        ({"instruction": "i", "output": "o", "text": "t"}, {}, "text", DataFormat.alpaca),
    ],
)
def test_own_names_and_the_order_in_which_formats_are_tried(
    tmp_path: Path, row: Any, columns: dict[str, str], text_field: str, data_format: DataFormat
) -> None:
    cfg = config(columns=columns, text_field=text_field)
    for path in (write(tmp_path / "a.jsonl", row), str(tmp_path / "a.json")):
        (tmp_path / "a.json").write_text(json.dumps([row]))
        corpus = open_corpus(cfg, path)
        assert corpus.data_format == data_format
        assert f"{data_format} by its fields {', '.join(row)}" in corpus.found
        assert len(list(documents(replace(cfg, format=corpus.data_format), path))) == 1


@pytest.mark.parametrize("data_format", [DataFormat.auto, DataFormat.chat])
def test_rows_that_fit_nothing_are_one_message_and_never_skipped(
    tmp_path: Path, data_format: DataFormat
) -> None:
    path = write(tmp_path / "a.jsonl", *[{"question": "q", "dialogue": []}] * 30)
    with pytest.raises(ConfigError) as error:
        list(documents(config(format=data_format, on_bad_row=BadRows.skip), path))
    told = str(error.value)
    assert f"{path}:1 has the fields question, dialogue" in told
    for needs in (
        "data.format=chat needs messages (optional: tools)",
        "data.format=sharegpt needs conversations",
        "data.format=alpaca needs instruction and output (optional: input",
        "data.format=prompt_completion needs prompt and completion",
        "data.format=plain needs text",
        "data.columns={messages: dialogue}",
    ):
        assert needs in told
    assert "on_bad_row" not in told


def test_a_format_that_is_another_one_says_which(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[SHAREGPT] * 3)
    with pytest.raises(ConfigError, match=r"not of data\.format=chat(.|\n)*set data\.format=sharegpt"):
        list(documents(config(format=DataFormat.chat), path))


def test_held_out_rows_are_of_the_format_of_the_others(tmp_path: Path) -> None:
    path, other = write(tmp_path / "a.jsonl", *[OPENAI] * 4), write(tmp_path / "b.jsonl", SHAREGPT)
    cfg = config(path=path, eval_path=other, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(
        ConfigError, match=r"data\.eval_path=.*conversations(.|\n)*give rows of data\.format=chat"
    ):
        open_blocks(cfg, tokenizer=tokenizer(CHATML), seq_len=256, seed=1, show_progress=False)


def test_files_of_several_formats_are_told_before_one_is_read(tmp_path: Path) -> None:
    chats, alpaca = (
        write(tmp_path / "a.jsonl", OPENAI),
        write(tmp_path / "b.jsonl", {"instruction": "i", "output": "o"}),
    )
    unknown = write(tmp_path / "c.jsonl", {"x": 1})
    with pytest.raises(ConfigError) as error:
        open_corpus(config(), [chats, unknown, alpaca])
    assert str(error.value) == (
        f"data.path: the first rows are of data.format=chat, but {alpaca} is alpaca. Files of several formats are "
        "mixed as sources: data.mix.NAME.path=FILE for each"
    )
    assert open_corpus(config(on_bad_row=BadRows.skip), [chats, alpaca]).data_format is DataFormat.chat


def test_a_file_that_changes_its_format_stops_at_the_row(tmp_path: Path) -> None:
    alpaca = {"instruction": "i", "output": "o"}
    path = write(tmp_path / "a.jsonl", *[OPENAI] * 40, alpaca)
    with pytest.raises(ConfigError) as error:
        list(documents(replace(config(), format=open_corpus(config(), path).data_format), path))
    assert (
        f"{path}:41: has no field 'messages', which data.format=chat needs; its fields are those of data.format=alpaca"
        " (files of several formats go into data.mix)" in str(error.value)
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            TURNS[:2],
            r"has no turn to train on: its roles are system, user, and data\.train_on_roles is \[assistant\]",
        ),
        ([{"role": "assistant", "content": "a", "weight": 0}], "turns of weight 0 are not trained"),
        ([{"from": "alien", "value": "a"}], "message 1 is from 'alien', which is none of human, "),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "holds image_url, not text alone",
        ),
        ([{"from": "function_call", "value": "look(sky)"}], "message 1: a function_call is not a JSON object"),
        ("[not json", "field 'messages' is not a list"),
        ([None], "message 1 has no role"),
        (
            [{"role": "assistant", "content": "a", "tool_calls": 7}],
            "message 1: tool_calls is a number, not a list",
        ),
        ([{"role": "assistant", "tool_calls": '{"f": 1}'}], "message 1: tool_calls is an object, not a list"),
        ([{"role": "assistant", "tool_calls": "f(x)"}], "message 1: tool_calls is text, not a list"),
        ([{"role": "assistant", "tool_calls": "[]"}], "message 1: content is null, not text"),
    ],
)
def test_chats_that_cannot_be_used_say_why(messages: Any, reason: str) -> None:
    if isinstance(messages, list) and isinstance(messages[0], tuple):
        messages = [{"role": role, "content": text} for role, text in messages]
    with pytest.raises(ValueError, match=reason):
        content_of({"messages": messages}, DataConfig(format=DataFormat.chat))


def test_any_text_in_the_place_of_a_chat_is_a_reason_not_a_failure() -> None:
    cfg = DataConfig(format=DataFormat.sharegpt)
    for value in (7, {}, [7], [[]], [{"from": 1}], [{"from": "gpt", "value": 7}], "[" * 100_000, None):
        with pytest.raises(ValueError, match=r"message|field"):
            content_of({"conversations": value, "system": None}, cfg)


def test_a_template_of_a_file_or_a_folder_replaces_the_tokenizers(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    tokenizer(LLAMA3).save_pretrained(folder)
    (tmp_path / "own.jinja").write_text(CHATML)
    named: dict[str, Any] = {"trust_remote_code": False}
    loaded = load_tokenizer(str(folder), None, chat_template=str(tmp_path / "own.jinja"), **named)
    assert loaded.chat_template == CHATML
    loaded.save_pretrained(tmp_path / "exported")
    assert load_tokenizer(str(tmp_path / "exported"), None, **named).chat_template == CHATML
    assert load_tokenizer("bytes", None, chat_template=str(folder), **named).chat_template == LLAMA3
    assert load_tokenizer(str(folder), None, chat_template="none", **named).chat_template is None
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}\n{{ m.role }\n{% endfor %}")
    (tmp_path / "empty").mkdir()
    for wrong, reason in (
        ("bad.jinja", r"is no Jinja template \(line 2"),
        ("missing.jinja", "does not exist"),
        ("empty", r"a folder without chat_template\.jinja"),
    ):
        with pytest.raises(ConfigError, match=rf"data\.chat_template=.*{wrong} (is )?{reason}"):
            load_tokenizer("bytes", None, chat_template=str(tmp_path / wrong), **named)


def test_whatever_changes_the_tokens_changes_the_cache_and_nothing_else_does(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[OPENAI] * 4)

    def key(template: str = CHATML, **options: Any) -> str:
        cfg = config(path=path, cache_dir=str(tmp_path / "cache"), **options)
        splits = open_blocks(cfg, tokenizer=tokenizer(template), seq_len=256, seed=1, show_progress=False)
        assert splits.report["format"] == "chat"
        targets = splits.train.trained(np.arange(4))[:, 1:].sum(axis=1)
        assert targets.tolist() == splits.train.trained_tokens.tolist()
        return Path(splits.report["folder"]).name

    first = key()
    others = [
        key(LLAMA3),
        key(train_on_roles="all"),
        key(train_on_roles=["user", "assistant"]),
        key(train_on_end_token=False),
    ]
    assert len({first, *others}) == 5
    assert key(format=DataFormat.chat) == key(train_on_roles=["assistant"]) == first
    assert key(alpaca_prompt=AlpacaPrompt.stanford) == first


def test_the_report_says_what_was_found_and_how_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[OPENAI] * 4)
    cfg = config(
        path=path, cache_dir=str(tmp_path / "cache"), train_on_roles=["user"], train_on_end_token=False
    )
    splits = open_blocks(cfg, tokenizer=tokenizer(CHATML), seq_len=256, seed=1, show_progress=False)
    assert splits.report["found"] == (
        "1 jsonl file, chat by its fields messages; in the chat template, trained: user, not the end tokens"
    )


def test_the_examples_of_the_page_on_data_are_of_the_formats_they_stand_under(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    shown = re.findall(
        r"^\*\*[^*]+\*\* \(`(\w+)`\).*?\n\n((?:    \{[^\n]*\n)+)", page, flags=re.MULTILINE | re.DOTALL
    )
    assert {name for name, _ in shown} == {str(each) for each in DataFormat} - {"auto"}
    for name, lines in shown:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{line.strip()}\n" for line in lines.splitlines()))
        assert open_corpus(config(), str(path)).data_format == name
        assert len(list(documents(config(format=DataFormat(name)), str(path)))) == 2


def test_a_row_is_read_alike_from_every_place(tmp_path: Path) -> None:
    """Documents of a row are equal whether it stands in JSONL, an array or CSV, where lists are JSON text."""
    row = {"messages": json.dumps(OPENAI["messages"]), "tools": ""}
    (tmp_path / "a.csv").write_text("messages,tools\n" + '"' + row["messages"].replace('"', '""') + '",\n')
    (found,) = documents(config(format=DataFormat.chat), str(tmp_path / "a.csv"))
    expected = Document(content_of(OPENAI, DataConfig(format=DataFormat.chat)), "", "")
    assert found.content == expected.content


def test_a_list_inside_a_row_may_be_json_text_too(tmp_path: Path) -> None:
    """The calls of a message, and the earlier turns of an alpaca row, as in a CSV cell."""
    calls = [{"type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}]
    as_list, as_text = (
        content_of(
            {"messages": [{"role": "assistant", "tool_calls": each}]}, DataConfig(format=DataFormat.chat)
        )
        for each in (calls, json.dumps(calls))
    )
    assert as_text == as_list
    none = {"messages": [{"role": "assistant", "content": "a", "tool_calls": "[]"}]}
    (message,) = content_of(none, DataConfig(format=DataFormat.chat)).messages  # type: ignore[union-attr]
    assert message == {"role": "assistant", "tool_calls": [], "content": "a"}
    turns = [["How?", "So."]]
    (tmp_path / "a.csv").write_text(
        "instruction,output,history\ni,o," + '"' + json.dumps(turns).replace('"', '""') + '"\ni,o,\n'
    )
    found = [each.content for each in documents(config(format=DataFormat.alpaca), str(tmp_path / "a.csv"))]
    assert found == [Instruction("i", "", "o", history=[("How?", "So.")]), Instruction("i", "", "o")]
