"""Sample ledger: which samples went into which optimizer step, exactly once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_worker.common.files import truncate_lines
from grpo_worker.rollout.sampling import Sample


class SampleLedger:
    """Append-only JSON lines; cut back to the checkpoint when a step is replayed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def append(
        self, step: int, attempt: int, samples: Sequence[Sample], left_out: Sequence[Sample] = ()
    ) -> None:
        """Record that ``step`` consumed these samples, and left those out; one write, flushed."""
        common = {"step": step, "attempt": attempt}
        lines = [
            json.dumps(common | _record(s) | more)
            for group, more in ((samples, {}), (left_out, {"leftOut": True}))
            for s in group
        ]
        with self._path.open("a") as handle:
            handle.write("\n".join(lines) + "\n")

    def truncate(self, step: int) -> None:
        """Forget everything after ``step``: those samples' update was lost and is replayed."""
        truncate_lines(self._path, step)


def _record(sample: Sample) -> dict[str, Any]:
    record = {"uid": sample.uid, "version": sample.version, "engine": sample.engine}
    # Whether the lengths of what was consumed are those of what was generated can be seen from here.
    return record | {"tokens": len(sample.ids)} | ({"spans": sample.spans} if sample.spans else {})
