"""Step whose checkpoint is kept beside the newest ones, noted in a file beside the checkpoints."""

import json

from grpo_worker.common.files import write_text
from grpo_worker.common.store_path import StorePath, has_file, remove_file

BEST = "best.json"


def keep_best(root: StorePath, step: int | None) -> None:
    """Keep the checkpoint of ``step`` from now on, and no other one; None: none but the newest ones."""
    if step is None:
        remove_file(root / BEST)
    else:
        root.mkdir(parents=True, exist_ok=True)
        write_text(root / BEST, json.dumps({"step": step}))


def best_step(root: StorePath) -> int | None:
    """Return the step whose checkpoint is kept; None: there is none. Raises OSError."""
    file = root / BEST
    return int(json.loads(file.read_text())["step"]) if has_file(file) else None
