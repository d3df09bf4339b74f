"""Sample ledger: a file with the samples that each optimizer step consumed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_worker.common.step_log import StepLog
from grpo_worker.common.store_path import JobFolder
from grpo_worker.rollout.sampling import Sample


class SampleLedger:
    """Append-only JSON lines, one for each sample. A replay first truncates them to its checkpoint.

    The ledger proves that every sample was consumed exactly once.
    """

    def __init__(self, folder: JobFolder, check: Callable[[], None] = lambda: None) -> None:
        """``folder``: of the job. ``check``: see StepLog."""
        self._log = StepLog(folder.disk / "ledger.jsonl", check, folder.pieces)

    def append(
        self,
        step: int,
        attempt: int,
        samples: Sequence[Sample],
        left_out: Sequence[Sample] = (),
        refused: Mapping[int, str] | None = None,
    ) -> None:
        """Append the samples that ``step`` consumed, and those that it left out, in one write.

        ``refused``: reason by the index of each prompt that engines refused; such a line has no ``uid``.
        """
        common = {"attempt": attempt}
        lines = [
            common | _record(s) | more
            for group, more in ((samples, {}), (left_out, {"leftOut": True}))
            for s in group
        ]
        lines += [common | {"prompt": index, "refused": reason} for index, reason in (refused or {}).items()]
        self._log.append(step, lines)

    def flush(self) -> None:
        """Wait until all steps are on the store: only then may a checkpoint of them count."""
        self._log.flush()

    def truncate(self, step: int) -> None:
        """Remove the samples of all steps after ``step``: their updates were lost and are replayed."""
        self._log.truncate(step)


def _record(sample: Sample) -> dict[str, Any]:
    record = {"uid": sample.uid, "version": sample.version, "engine": sample.engine}
    # The number of tokens allows a comparison of consumed with generated samples.
    return record | {"tokens": len(sample.ids)} | ({"spans": sample.spans} if sample.spans else {})
