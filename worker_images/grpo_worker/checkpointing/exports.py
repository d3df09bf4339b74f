"""Exports in the folder of a job: which ones are complete."""

from contextlib import suppress
from pathlib import Path

from grpo_worker.checkpointing.store import step_and_attempt
from grpo_worker.common.store_path import StorePath, children, has_file

EXPORTS = "export"  # in the folder of a job
CONFIG = "config.json"  # written last in a bucket


def complete_exports(folder: StorePath) -> set[int]:
    """Return the steps of the complete exports in a folder; none if there is no such folder."""
    found = set()
    for name in children(folder):
        with suppress(ValueError):  # the name of one that is not complete, in a file system
            step, _ = step_and_attempt(folder / name)
            if isinstance(folder, Path) or has_file(folder / name / CONFIG):
                found.add(step)
    return found
