"""Rollbacks of a job: what each of them has abandoned, noted in a file of the job's folder.

A rollback is done as soon as it is noted: nothing else needs to be completed after a crash. What the attempts
until then have saved after its step does not count any more, and who goes on from what they saved before does
so at the position of the rollback, so that the prompts of the abandoned steps are not drawn again.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from grpo_worker.common.files import write_text
from grpo_worker.common.known_fields import known
from grpo_worker.common.store_path import StorePath, has_file

ROLLBACKS = "rollbacks.json"


@dataclass(frozen=True, slots=True)
class Rollback:
    """Return of a job to the checkpoint of ``step``.

    ``attempt``: the last one whose later steps are abandoned. ``position``: state of the source of prompts
    from which the job goes on. ``why``: reason. ``at``: when it was decided (RFC 3339, UTC).
    """

    step: int
    attempt: int
    position: dict[str, Any]
    why: str = ""
    at: str = ""


def rollbacks(folder: StorePath) -> list[Rollback]:
    """Return the rollbacks of the job in ``folder``, in their order. Raises OSError."""
    file = folder / ROLLBACKS
    if not has_file(file):
        return []
    return [Rollback(**known(Rollback, one)) for one in json.loads(file.read_text())]


def note(folder: StorePath, rollback: Rollback) -> None:
    """Roll the job back. Only its newest controller may do so. Raises OSError."""
    noted = [asdict(one) for one in [*rollbacks(folder), rollback]]
    write_text(folder / ROLLBACKS, json.dumps(noted))


def abandoned(folder: StorePath, step: int, attempt: int) -> bool:
    """Return whether a rollback has abandoned what an attempt saved after ``step``."""
    return any(attempt <= one.attempt and step > one.step for one in rollbacks(folder))


def latest_after(noted: Iterable[Rollback], attempt: int) -> Rollback | None:
    """Return the latest rollback that the state which an attempt saved knows nothing of; None: there is none.

    Later rollbacks have later positions.
    """
    return next((one for one in reversed(list(noted)) if attempt <= one.attempt), None)
