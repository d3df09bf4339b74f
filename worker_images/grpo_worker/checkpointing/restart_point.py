"""Restart point of a job: the version that its trainers would publish if they started now.

The store alone tells it, without the job's controller, which may be away too.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.store import WEIGHTS, complete
from grpo_worker.common.step_log import first_record_of_last_step

# In the folder of a job.
CHECKPOINTS, RUN, LEDGER, MEMORY = "checkpoints", "run.json", "ledger.jsonl", "memory.json"


@dataclass(frozen=True, slots=True)
class RestartPoint:
    """The newest complete checkpoint.

    ``attempt``: the newest of the job, which starts from it. ``version``: of the weights in it.
    ``weights``: folder for a copy of them.
    """

    attempt: int
    version: int
    weights: Path


def restart_point(folder: Path) -> RestartPoint | None:
    """Return the restart point of the job in ``folder``.

    None if there is no checkpoint, or the trainers may have a newer version: the newest attempt has finished
    later steps, or a newer copy of their state may be in the memory of their pods.
    Raises OSError, and ValueError, KeyError or TypeError for a damaged file.
    """
    found = complete(folder / CHECKPOINTS)
    if not found:
        return None
    version, newest = max(found.items())
    attempt = max(attempts.newest(folder), int(_read(folder / RUN).get("attempt", 0)))
    last = first_record_of_last_step(folder / LEDGER) or {"attempt": 0, "step": 0}
    if (attempt, version) < (last["attempt"], last["step"]):
        return None
    if version < int(_read(folder / MEMORY).get("step", 0)):
        return None
    return RestartPoint(attempt, version, newest / WEIGHTS)


def _read(file: Path) -> dict[str, Any]:
    """Return the fields of a JSON file; none if there is no file."""
    try:
        fields: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return fields
