"""Diagnosis of the files that ``spec.data.train`` names, a path or a pattern on any filesystem."""

from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq


def problems(train: str) -> Iterator[str]:
    """Return reasons why no rows can be read. Raises ValueError for a broken Parquet file."""
    system, files = _matching(train)
    if not files:
        yield "no such file: correct the path, or mount its volume with spec.data.volume"
    for name, info in files.items():
        if info.get("size") == 0 or (name.endswith(".parquet") and not _rows_of_parquet(system, name)):
            yield f"{name} is empty: remove it, or name other files"


def empty_files(train: str) -> list[str]:
    """Return a note about empty files, which ``datasets`` skips silently."""
    _, files = _matching(train)
    empty = [name for name, info in files.items() if info.get("size") == 0]
    verb = "is" if len(empty) == 1 else "are"
    return [f"{len(empty)} of {len(files)} files {verb} empty; the first is {empty[0]}"] if empty else []


def _matching(train: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return the filesystem and the matching files, by name, with its information about each."""
    system, pattern = fsspec.core.url_to_fs(train)
    return system, system.glob(pattern, detail=True)


def _rows_of_parquet(system: Any, name: str) -> int:
    try:
        with system.open(name) as file:
            return int(pq.ParquetFile(file).metadata.num_rows)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"spec.data.train={name}: not valid Parquet ({error}): replace it, or name other files"
        ) from error
