"""Any rows, any config.json, any tokenizer files: a model, tokens, a counted skip or one message."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.config.data_fields import NAMES, OPTIONAL, REQUIRED
from remat.config.options import (
    BadRows,
    ConfigError,
    DataConfig,
    DataFormat,
    DataSource,
    ModelConfig,
    ModelInit,
)
from remat.data.cache import open_blocks
from remat.data.tokenizer import byte_tokenizer, load_tokenizer
from remat.model import hf_model
from tests.support import tiny
from tests.support.fuzz import as_json, assert_clear, budget, ends, json_values, torn

TOKENIZER = byte_tokenizer()
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **tiny.SIZES,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


def rows(data_format: DataFormat) -> st.SearchStrategy[Any]:
    """Good rows, rows with a field of another kind, and anything else."""
    text = st.text(max_size=20) | st.just("a longer text that fills a block and then some")
    names = {
        **{each: [*REQUIRED[each], *OPTIONAL[each]] for each in REQUIRED},
        DataFormat.auto: sorted(NAMES),
    }[data_format]
    role = st.sampled_from(["user", "assistant", "system"]) | text
    said = text | json_values(3)
    message = st.fixed_dictionaries({}, optional={"role": role, "content": said, "from": role, "value": said})
    messages = st.lists(message, max_size=3)
    chats = (DataFormat.chat, DataFormat.sharegpt, DataFormat.prompt_completion, DataFormat.auto)
    field = messages | text | json_values(3) if data_format in chats else text | json_values(2)
    return st.dictionaries(st.sampled_from(names), field, min_size=1) | json_values()


def files(data_format: DataFormat) -> st.SearchStrategy[tuple[str, bytes]]:
    """A name, and lines, an array or a table of such rows."""
    line = rows(data_format).map(as_json) | st.binary(max_size=20) | st.just(b"[" * 100_000)
    many = st.lists(line, max_size=6)
    as_lines = st.tuples(st.sampled_from(["rows.jsonl", "rows.json", "rows"]), many.map(b"\n".join))
    as_array = many.map(lambda rows: ("rows.json", b"[" + b",\n".join(rows) + b"]"))
    names = ",".join(sorted(NAMES)).encode()
    as_table = many.map(lambda rows: ("rows.csv", b"\n".join([names, *rows])))
    packed = as_lines.map(lambda file: (f"{file[0]}.gz", gzip.compress(file[1])[: 30 + len(file[1])]))
    return as_lines | as_array | as_table | packed


@pytest.mark.parametrize("data_format", list(DataFormat))
def test_any_rows_are_blocks_a_counted_skip_or_one_message(data_format: DataFormat) -> None:
    @budget(40)
    @given(files(data_format), st.sampled_from(list(BadRows)))
    def check(file: tuple[str, bytes], policy: BadRows) -> None:
        with tempfile.TemporaryDirectory() as name, ends():
            path = Path(name, file[0])
            path.write_bytes(file[1])
            cfg = DataConfig(
                source=DataSource.files,
                path=str(path),
                format=data_format,
                on_bad_row=policy,
                eval_fraction=0,
                cache_dir=f"{name}/cache",
            )
            try:
                splits = open_blocks(cfg, tokenizer=TOKENIZER, seq_len=16, seed=0, show_progress=False)
            except ConfigError as error:
                assert_clear(error, "data.path", "data.on_bad_row", "data.format")
            else:
                assert len(splits.train)
                assert policy is BadRows.skip or splits.report["bad_rows"]["count"] == 0

    check()


def built(folder: Path) -> Any:
    cfg = ModelConfig(init=ModelInit.random, path=str(folder), tokenizer="bytes")
    net = hf_model.skeleton(hf_model.load_config(cfg), cfg)
    return hf_model.facts(net)


FIELDS = [*LLAMA, "auto_map", "quantization_config", "text_config"]
changed = st.dictionaries(st.sampled_from(FIELDS), json_values(3), min_size=1, max_size=3)


@budget(60)
@given(
    changed.map(lambda change: as_json(LLAMA | change)) | torn(json.dumps(LLAMA)) | json_values().map(as_json)
)
def test_any_config_json_is_a_model_or_one_message(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name, ends():
        Path(name, "config.json").write_bytes(content)
        try:
            found = built(Path(name))
        except ConfigError as error:
            assert_clear(error, name)
        else:
            assert found.num_params > 0


def tokenizer_files() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        TOKENIZER.save_pretrained(folder)
        return {path.name: path.read_text() for path in Path(folder).iterdir()}


FILES = tokenizer_files()
broken_file = st.sampled_from(sorted(FILES)).flatmap(
    lambda name: st.tuples(st.just(name), torn(FILES[name]) | json_values().map(as_json))
)
SETTINGS = json.loads(FILES["tokenizer_config.json"])
KEYS = [
    "eos_token",
    "pad_token",
    "tokenizer_class",
    "model_max_length",
    "added_tokens_decoder",
    "chat_template",
]
broken_key = st.builds(
    lambda key, value: ("tokenizer_config.json", as_json(SETTINGS | {key: value})),
    st.sampled_from([*KEYS, "auto_map"]),
    json_values(3),
)


@budget(60)
@given(broken_file | broken_key)
def test_any_tokenizer_files_are_a_tokenizer_or_one_message(change: tuple[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name, ends():
        for file, content in FILES.items():
            Path(name, file).write_text(content)
        Path(name, change[0]).write_bytes(change[1])
        try:
            found = load_tokenizer(name, None, trust_remote_code=False)
            assert found.eos_token_id is not None
            found("text")
        except ConfigError as error:
            assert_clear(error, name)
