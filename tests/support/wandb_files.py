"""Reads what W&B has written without a network."""

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")  # checksum, length and kind of a piece
_WHOLE, _LAST, _LATER = 1, 4, (3, 4)


def records(run: Path) -> Iterator[Any]:
    """Yield the records of a run's folder: pieces in blocks, as LevelDB's logs have them."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    (file,) = run.glob("*.wandb")
    raw, at, text = file.read_bytes(), 7, b""
    while at < len(raw):
        if _BLOCK - at % _BLOCK < _HEADER.size:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(raw, at)
        at += _HEADER.size
        text = (text if kind in _LATER else b"") + raw[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            record = messages.Record()
            record.ParseFromString(text)
            yield record


def config(run: Path) -> dict[str, Any]:
    """Return the configuration of a run."""
    found = [record.run for record in records(run) if record.WhichOneof("record_type") == "run"]
    return {item.key: json.loads(item.value_json) for one in found for item in one.config.update}


def history(run: Path) -> list[dict[str, Any]]:
    """Return what a run has logged, one dictionary for each call; of a value of several parts its path."""
    found = [record.history for record in records(run) if record.WhichOneof("record_type") == "history"]
    return [
        {
            item.nested_key[0]: json.loads(item.value_json)
            for item in one.item
            if len(item.nested_key) == 1 or item.nested_key[1] == "path"
        }
        for one in found
    ]


def artifacts(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return metadata and texts of the artifacts of a type."""
    found = [record.artifact for record in records(run) if record.WhichOneof("record_type") == "artifact"]
    return [
        {
            "metadata": json.loads(one.metadata or "{}"),
            "files": {entry.path: Path(entry.local_path).read_text() for entry in one.manifest.contents},
        }
        for one in found
        if one.type == kind
    ]
