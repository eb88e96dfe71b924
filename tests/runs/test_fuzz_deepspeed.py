"""Any DeepSpeed file and any overrides: a complete dict, or one message that names key or file."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from remat.config import compose, ds_config, ds_defaults
from remat.config.ds_config import RunValues
from remat.config.options import ConfigError, Precision
from tests.support.fuzz import as_json, assert_clear, budget, ends, json_values, torn

FILES = {path.stem: json.loads(path.read_text()) for path in sorted(compose.DS_CONFIG_DIR.glob("*.json"))}
SECTION_KEYS = {path: sorted(keys) for path, keys in ds_defaults.SECTIONS.items()}
KEYS = [
    *(f"zero_optimization.{key}" for key in sorted(ds_defaults.zero_allowed(0) | ds_defaults.zero_allowed(3))),
    *sorted(ds_defaults.top_level()),
    *ds_defaults.REFUSED,
    *(f"{path}.{key}" for path, keys in SECTION_KEYS.items() for key in keys),
]


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


changes = st.lists(
    st.builds(nested, st.sampled_from(KEYS) | st.text(max_size=8), json_values(4)), min_size=1, max_size=3
).map(lambda found: _together(found))


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for change in found:
        merged = ds_config.merge(merged, change) | {k: v for k, v in change.items() if v is None}
    return merged


def values(precision: Precision, ranks: int, nvme: bool) -> RunValues:
    return RunValues(
        world_size=ranks,
        micro_batch_size=2,
        global_batch_size=8,
        gradient_clipping=1.0,
        precision=precision,
        hidden_size=64,
        nvme_path="/scratch" if nvme else None,
        pin_memory_possible=False,
        largest_param=10_000,
    )


@budget(300)
@given(
    st.sampled_from(sorted(FILES)), changes, changes | st.just({}),
    st.builds(values, st.sampled_from(list(Precision)), st.sampled_from([1, 2, 3]), st.booleans()),
)  # fmt: skip
def test_any_keys_are_a_complete_config_or_one_message(
    name: str, change: dict[str, Any], overrides: dict[str, Any], run: RunValues
) -> None:
    raw = ds_config.merge(copy.deepcopy(FILES[name]), change)
    with ends():
        try:
            rendered = ds_config.render(raw, overrides, run)
        except ConfigError as error:
            assert_clear(error, *KEYS, *change, *overrides, "train.global_batch_size")
        else:
            assert '"auto"' not in json.dumps(rendered) or "keep_in_fp32_modules" in json.dumps(rendered)


@budget(60)
@given(torn(json.dumps(FILES["zero3_offload"])) | json_values().map(as_json))
def test_any_file_is_an_object_or_one_message(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, ends():
        path = Path(folder, "mine.json")
        path.write_bytes(content)
        try:
            raw = ds_config.load(str(path), compose.DS_CONFIG_DIR)
            ds_config.render(raw, {}, values(Precision.bf16, 1, True))
        except ConfigError as error:
            assert_clear(error, str(path), *KEYS, *(raw if "raw" in dir() else ()))
