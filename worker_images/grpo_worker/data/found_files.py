"""The files that ``spec.data.train`` names: one, or all that match a pattern, wherever they are."""

from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]


def problems(train: str) -> Iterator[str]:
    """Why no rows can be read. Raises ValueError for a file that is not Parquet."""
    system, found = _found(train)
    if not found:
        yield "no such file: correct the path, or mount what holds it by spec.data.volume"
    for name, about in found.items():
        if about.get("size") == 0 or (name.endswith(".parquet") and not _rows_of_parquet(system, name)):
            yield f"{name} is empty: remove it, or name other files"


def empty_files(train: str) -> list[str]:
    """Say how many files are empty: ``datasets`` reads the others without a word."""
    _, found = _found(train)
    empty = [name for name, about in found.items() if about.get("size") == 0]
    verb = "is" if len(empty) == 1 else "are"
    return [f"{len(empty)} of {len(found)} files {verb} empty; the first is {empty[0]}"] if empty else []


def _found(train: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    system, pattern = fsspec.core.url_to_fs(train)
    return system, system.glob(pattern, detail=True)


def _rows_of_parquet(system: Any, name: str) -> int:
    try:
        with system.open(name) as file:
            return int(pq.ParquetFile(file).metadata.num_rows)
    except pa.ArrowInvalid as error:
        raise ValueError(f"spec.data.train={name}: this is no Parquet file ({error}): name others") from error
