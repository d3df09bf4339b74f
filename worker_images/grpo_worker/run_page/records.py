"""Reads the records of a job's steps and of its restarts, line by line: nothing is held."""

import json
import os
from collections.abc import Iterator
from typing import Any

from grpo_worker.checkpointing.best import Best, kept_best
from grpo_worker.common.log_records import json_lines, log_records
from grpo_worker.common.step_log import first_record_of_last_step, records_from
from grpo_worker.common.store_path import JobFolder, has_file

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
_TAIL_BYTES = 1 << 20  # of new steps in one answer


def step_records(folder: JobFolder) -> Iterator[dict[str, Any]]:
    """Yield the records of all steps, each once, in their order."""
    return log_records(folder, METRICS)


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


def validation_records(folder: JobFolder) -> Iterator[dict[str, Any]]:
    """Yield the records of all validations, one for each set and version."""
    return log_records(folder, VALIDATION)


def new_validations(folder: JobFolder, step: int) -> list[dict[str, Any]] | None:
    """Return the records of the validations after ``step``, of bounded size.

    None: the validation of ``step`` has been removed since, because a restart repeats the version.
    """
    log = folder.disk / VALIDATION
    newest = first_record_of_last_step(log)
    last = -1 if newest is None else newest["step"]
    # With an object store the log of a new pod begins after what the store has.
    if last < step and (newest is not None or folder.pieces is None):
        return None
    found = records_from(log, step + 1, _TAIL_BYTES, whole=True)
    return [record for record in found if record["step"] > step]


def kept_checkpoint(folder: JobFolder) -> Best | None:
    """Return the checkpoint that is kept because of its validation; None: there is none."""
    return kept_best(folder.store / "checkpoints")


def recoveries(folder: JobFolder) -> Iterator[dict[str, Any]]:
    """Yield the restarts that are recorded."""
    file = folder.disk / "recoveries.jsonl"
    if file.is_file():
        yield from json_lines(file)


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
