"""Reads the records of a job's steps and of its restarts, line by line: nothing is held."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from grpo_worker.common.log_pieces import LogPieces
from grpo_worker.common.step_log import records_from
from grpo_worker.common.store_path import JobFolder, StorePath, has_file

METRICS = "metrics.jsonl"
_TAIL_BYTES = 1 << 20  # of new steps in one answer


def step_records(folder: JobFolder) -> Iterator[dict[str, Any]]:
    """Yield the records of all steps, each once, in their order.

    With an object store the pieces come first, then what only the log in the pod has.
    """
    last = 0
    if folder.pieces is not None:
        for piece in LogPieces(folder.pieces / METRICS).files():
            for record in _lines(piece):
                last = max(last, record["step"])
                yield record
    log = folder.disk / METRICS
    if log.is_file():
        yield from (record for record in _lines(log) if record["step"] > last)


def new_records(folder: JobFolder, step: int, time: float) -> list[dict[str, Any]] | None:
    """Return the record of ``step`` and those of the next steps, of bounded size; [] before the first one.

    ``time``: of the record of ``step``. None: it has been replaced since, by the replay after a restart.
    """
    found = records_from(folder.disk / METRICS, step, _TAIL_BYTES)
    if found and found[0]["step"] == step:
        return found if found[0].get("wall_time") == time else None
    if step and found:
        return None  # without its record nothing is known of the steps before
    return [{"step": 0}, *found] if found else []


def recoveries(folder: JobFolder) -> Iterator[dict[str, Any]]:
    """Yield the restarts that are recorded."""
    file = folder.disk / "recoveries.jsonl"
    if file.is_file():
        yield from _lines(file)


def new_recoveries(folder: JobFolder, step: int) -> list[dict[str, Any]]:
    """Return the latest restarts that interrupted ``step`` or a later one."""
    file = folder.disk / "recoveries.jsonl"
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(max(size - _TAIL_BYTES // 16, 0))
        read = lines.read().split(b"\n")
    whole = read[1:-1] if size > _TAIL_BYTES // 16 else read[:-1]
    return [line for line in map(json.loads, whole) if line["step"] >= step]


def run_record(folder: JobFolder) -> dict[str, Any]:
    """Return the job's attempts, restarts and failure; {} before there was one."""
    file = folder.store / "run.json"
    return dict(json.loads(file.read_text())) if has_file(file) else {}


def _lines(file: StorePath) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, up to a line that is being written or is damaged."""
    with file.open(encoding="utf-8") as lines, suppress(json.JSONDecodeError):
        for line in lines:
            if not line.endswith("\n"):
                return
            yield json.loads(line)
