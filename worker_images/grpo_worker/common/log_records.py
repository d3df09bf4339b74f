"""Reads a step log of a job from its beginning, line by line, wherever the lines are."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from grpo_worker.common.log_pieces import LogPieces
from grpo_worker.common.store_path import JobFolder, StorePath


def log_records(folder: JobFolder, name: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a log of steps in their order, each once; none if there is no such log.

    With an object store the pieces come first, then what only the log in the pod has.
    """
    last = -1
    if folder.pieces is not None:
        for piece in LogPieces(folder.pieces / name).files():
            for record in json_lines(piece):
                last = max(last, record["step"])
                yield record
    log = folder.disk / name
    if log.is_file():
        yield from (record for record in json_lines(log) if record["step"] > last)


def json_lines(file: StorePath) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, up to a line that is being written or is damaged."""
    with file.open(encoding="utf-8") as lines, suppress(json.JSONDecodeError):
        for line in lines:
            if not line.endswith("\n"):
                return
            yield json.loads(line)
