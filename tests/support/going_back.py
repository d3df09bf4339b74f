"""Rollbacks of a ``World``: what they must lead to, and controllers that die during one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_worker.checkpointing.store import CONTROLLER_STATE, MARKER, Origin, commit, complete
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.controller.recovery.run_record import RunRecord
from support.loop_world import World


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return step and loss of each record."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["actor/loss"]) for record in records]


def skipping(folder: Path, step: int, cursor: int, steps: int, **changes: Any) -> list[dict[str, Any]]:
    """Run a job to a checkpoint, and from there with the prompts from ``cursor`` on; return its ledger."""
    World(folder, step, **changes).run()
    path = complete(folder / "checkpoints")[step]
    model = json.loads((path / MARKER).read_text())["origin"]["model"]
    (path / MARKER).unlink()
    state = json.loads((path / CONTROLLER_STATE).read_text())
    state["source"] = {"cursor": cursor, "in_flight": [], "too_long": 0}
    (path / CONTROLLER_STATE).write_text(json.dumps(state))
    commit(folder / "checkpoints", step, Origin(model, "", 1))
    return World(folder, steps, **changes).run()


def _before(patch: pytest.MonkeyPatch, kind: Any, name: str, ends: Callable[[], bool]) -> None:
    """End the controller before a call of a method when ``ends`` says so."""
    method = getattr(kind, name)

    def called(*args: Any, **more: Any) -> Any:
        if ends():
            raise SystemExit
        return method(*args, **more)

    patch.setattr(kind, name, called)


def _after_note(patch: pytest.MonkeyPatch) -> None:
    method = RunRecord.roll_back

    def noted(*args: Any) -> None:
        method(*args)
        raise SystemExit

    patch.setattr(RunRecord, "roll_back", noted)


# Moments at which a controller dies. Each function gets what says whether the rollback is noted.
MOMENTS: dict[str, Callable[[pytest.MonkeyPatch, Callable[[], bool]], None]] = {
    "undecided": lambda patch, _: _before(patch, RunRecord, "roll_back", lambda: True),
    "noted": lambda patch, _: _after_note(patch),
    "claimed": lambda patch, back: _before(patch, RunCheckpoints, "restore", back),
    "restored": lambda patch, back: _before(patch, RunRecord, "note_restored", back),
    "loaded": lambda patch, back: _before(patch, RunRecord, "went_on_from", back),
}
