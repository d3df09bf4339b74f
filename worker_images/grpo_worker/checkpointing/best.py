"""Checkpoint that is kept beside the newest ones, noted in a file beside the checkpoints."""

import json
from dataclasses import asdict, dataclass

from grpo_worker.common.files import write_text
from grpo_worker.common.store_path import StorePath, has_file, remove_file

BEST = "best.json"


@dataclass(frozen=True, slots=True)
class Best:
    """The step with the best mean score of a validation set. ``set``: name of the set."""

    step: int
    set: str


def keep_best(root: StorePath, best: Best | None) -> None:
    """Keep the checkpoint of this step from now on, and no other one; None: none but the newest ones."""
    if best is None:
        remove_file(root / BEST)
    else:
        root.mkdir(parents=True, exist_ok=True)
        write_text(root / BEST, json.dumps(asdict(best)))


def kept_best(root: StorePath) -> Best | None:
    """Return what is kept; None: nothing but the newest ones. Raises OSError."""
    file = root / BEST
    return Best(**json.loads(file.read_text())) if has_file(file) else None


def best_step(root: StorePath) -> int | None:
    """Return the step whose checkpoint is kept; None: there is none. Raises OSError."""
    best = kept_best(root)
    return None if best is None else best.step
