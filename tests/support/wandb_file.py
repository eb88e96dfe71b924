"""Read an offline W&B file back with W&B's own record format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_wandb(file: Path) -> tuple[dict[int, dict[str, float]], dict[str, Any], int | None]:
    """History by step, config and exit code of an offline run: LevelDB's log format around protobuf records.

    https://github.com/google/leveldb/blob/main/doc/log_format.md; W&B puts a 7-byte header before the first record.
    """
    from wandb.proto import wandb_internal_pb2

    history: dict[int, dict[str, float]] = {}
    config: dict[str, Any] = {}
    exit_code = None
    for raw in _log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        for update in [*record.run.config.update, *record.config.update]:
            config[update.key or update.nested_key[0]] = json.loads(update.value_json)
        if record.HasField("history"):
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = row.pop("_step")
            history[step] = {name: value for name, value in row.items() if not name.startswith("_")}
        if record.HasField("exit"):
            exit_code = record.exit.exit_code
    return history, config, exit_code


def _log_records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # a record header never crosses a block's end
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or the last fragment
            yield parts
            parts = b""
