"""What a job has computed, to compare runs bit by bit."""

import json
from pathlib import Path
from typing import Any


def outcome(folder: Path) -> tuple[list[Any], list[Any], bytes]:
    """Return what was trained on, the losses of all steps, and the digests of the weights."""
    ledger = [json.loads(line) for line in (folder / "job" / "ledger.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (folder / "job" / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl")
    losses = [[step.get(name) for name in names] for step in steps]
    weights = steps[-1]["weights"]
    return [{k: v for k, v in line.items() if k != "attempt"} for line in ledger], losses, weights
