"""An offline W&B run, read back from its file without wandb's own reader (its sync client is a binary).

The format is LevelDB's log (https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header of 7 bytes:
blocks of 32 KiB, in them fragments of checksum (4 bytes), length (2, little-endian) and type (1: whole, 2: first, 3:
middle, 4: last), whose payloads are protobuf records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # protobuf makes it at import

BLOCK, FRAGMENT, HEADER = 32 << 10, 7, 7
FIRST_OR_MIDDLE = (2, 3)


def records(path: Path) -> Iterator[Record]:
    """All that a run wrote."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", data[:8]
    at, payload = HEADER, b""
    while at + FRAGMENT <= len(data):
        if BLOCK - at % BLOCK < FRAGMENT:  # too short for a fragment: filled with zeros
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        payload += data[at + FRAGMENT : at + FRAGMENT + length]
        at += FRAGMENT + length
        if kind not in FIRST_OR_MIDDLE:
            record = Record()
            record.ParseFromString(payload)
            payload = b""
            yield record


def history(folder: Path) -> list[dict[str, Any]]:
    """What each call of `log` logged, over all runs under a folder in the order of their names."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]
