"""Reads the samples of a step or of a validation from a job's folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_worker.common.store_path import StorePath
from grpo_worker.samples.files import TRAINING, VALIDATION, sample_file, sample_steps

_TOKENS = ("prompt_ids", "answer_ids", "rollout_log_probs", "old_log_probs")
# What is written, and the field that says of how many prompts.
_FIELDS = {TRAINING: "spec.observability.samples", VALIDATION: "spec.observability.samples.validationPrompts"}


def samples(
    folder: StorePath, step: int | None = None, prompt: int | None = None, order: str = "",
    tokens: bool = True, *, validation: bool = False, of: str | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield samples of a step as dictionaries. ``folder``: of a job. ``step``: None: the last one.

    ``prompt``: only the answers to the prompt of this index. ``order``: column, the smallest value first, or
    ``-COLUMN``. ``tokens``: with the columns that have a value for each token, which are nearly all bytes of
    a file. ``validation``: of the validation of the weights after the step. ``of``: only of the validation
    set of this name. Raises LookupError that names the steps, columns or sets that there are.
    """
    place = folder / (VALIDATION if validation or of is not None else TRAINING)
    table = _table(sample_file(place, _step(place, step)), tokens)
    if of is not None:
        table = _of_set(table, of)
    if prompt is not None:
        table = table.filter(pc.equal(table["prompt_index"], prompt))
    if order and order.removeprefix("-") not in table.column_names:
        columns = ", ".join(table.column_names)
        raise LookupError(f"there is no column {order.removeprefix('-')}: there are {columns}")
    if order:
        way = "descending" if order.startswith("-") else "ascending"
        table = table.sort_by([(order.removeprefix("-"), way)])
    elif "set" in table.column_names:  # written in the order in which engines responded
        table = table.sort_by([("set", "ascending"), ("prompt_index", "ascending")])
    for batch in table.to_batches(64):
        yield from batch.to_pylist(maps_as_pydicts="strict")


def _step(place: StorePath, wanted: int | None) -> int:
    steps = sample_steps(place)
    if not steps:
        raise LookupError(f"{place} has no samples: see {_FIELDS[place.name]}")
    if wanted is not None and wanted not in steps:
        raise LookupError(
            f"there are no samples of step {wanted}: there are some of steps {steps[0]} to {steps[-1]}"
        )
    return steps[-1] if wanted is None else wanted


def _table(file: StorePath, tokens: bool) -> pa.Table:
    # Threads of pyarrow that still run when the interpreter ends can abort the process.
    source = file if isinstance(file, Path) else pa.BufferReader(file.read_bytes())
    parquet = pq.ParquetFile(source, pre_buffer=False)
    few = [name for name in parquet.schema_arrow.names if name not in _TOKENS]
    return parquet.read(None if tokens else few, use_threads=False)


def _of_set(table: pa.Table, name: str) -> pa.Table:
    there = table["set"].unique().to_pylist()
    if name not in there:
        raise LookupError(f"there are no samples of set {name}: there are some of {', '.join(there)}")
    return table.filter(pc.equal(table["set"], name))
