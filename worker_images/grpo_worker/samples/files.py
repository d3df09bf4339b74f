"""Parquet files by step in a folder of a job: a file appears as a whole, or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_worker.common.files import rename
from grpo_worker.common.store_path import JobFolder, StorePath, children, remove_file

TRAINING = "samples"
VALIDATION = "validation_samples"
_SUFFIX = ".parquet"
# Columns of few values.
_REPEATED = ["step", "set", "attempt", "time", "prompt", "dropped", "version", "engine"]


class SampleFiles:
    """Writes the files of a folder, one after the other."""

    def __init__(self, folder: JobFolder, name: str, check: Callable[[], None]) -> None:
        """``name``: of the folder. ``check``: called before a file appears or is removed; raises if this job
        has another controller now.
        """
        self._place: StorePath = folder.store / name
        self._draft = folder.disk / name / "draft"
        self._check = check

    def create(self, schema: pa.Schema) -> pq.ParquetWriter:
        """Begin a file; what was begun before is lost. Close it before ``publish``."""
        self._draft.parent.mkdir(parents=True, exist_ok=True)
        repeated = [name for name in _REPEATED if name in schema.names]
        return pq.ParquetWriter(self._draft, schema, compression="zstd", use_dictionary=repeated)

    def publish(self, step: int) -> None:
        """Make what was written the file of a step, in place of one that it has."""
        with self._draft.open("rb") as handle:
            os.fsync(handle.fileno())
        self._check()
        target = sample_file(self._place, step)
        if isinstance(target, Path):
            rename(self._draft, target)
        else:
            target.fs.put_file(str(self._draft), target.path)
            self._draft.unlink()

    def discard(self) -> None:
        """Remove what was begun and not published."""
        self._draft.unlink(missing_ok=True)

    def remove_after(self, step: int) -> None:
        """Remove the files of all steps after ``step``."""
        self._check()
        for later in sample_steps(self._place):
            if later > step:
                remove_file(sample_file(self._place, later))


def sample_file(place: StorePath, step: int) -> StorePath:
    """Return the file of a step in a folder of samples."""
    return place / f"{step:08d}{_SUFFIX}"


def sample_steps(place: StorePath) -> list[int]:
    """Return the steps that have a file in a folder of samples, ascending."""
    names = [name for name in children(place) if name.endswith(_SUFFIX)]
    return sorted(int(name.removesuffix(_SUFFIX)) for name in names)
