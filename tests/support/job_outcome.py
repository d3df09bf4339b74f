"""Results of a job, to compare runs bit by bit."""

import json
from pathlib import Path
from typing import Any


def outcome(folder: Path) -> tuple[list[Any], list[Any], Any]:
    """Return what was trained on, the losses of all steps, and the digests of the weights."""
    return outcome_of(*((folder / "job" / f"{name}.jsonl").read_text() for name in ("ledger", "metrics")))


def outcome_of(ledger: str, metrics: str) -> tuple[list[Any], list[Any], Any]:
    """Return the same of the text of both logs."""
    samples, steps = ([json.loads(line) for line in text.splitlines()] for text in (ledger, metrics))
    names = ("step", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl")
    losses = [[step.get(name) for name in names] for step in steps]
    return (
        [{k: v for k, v in line.items() if k != "attempt"} for line in samples],
        losses,
        steps[-1]["weights"],
    )
