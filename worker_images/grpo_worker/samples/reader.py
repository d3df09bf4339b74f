"""Reads the samples of a step from a job's folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_worker.common.store_path import StorePath, children
from grpo_worker.samples.table import SCHEMA
from grpo_worker.samples.writer import FOLDER, file_name, step_of

_TOKENS = ("prompt_ids", "answer_ids", "rollout_log_probs", "old_log_probs")
_FEW = [name for name in SCHEMA.names if name not in _TOKENS]


def samples(
    folder: StorePath,
    step: int | None = None,
    prompt: int | None = None,
    order: str = "",
    tokens: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield samples of a step as dictionaries. ``folder``: of a job. ``step``: None: the last one.

    ``prompt``: only the answers to the prompt of this index. ``order``: column, the smallest value first, or
    ``-COLUMN``. ``tokens``: with the columns that have a value for each token, which are nearly all bytes of
    a file. Raises LookupError that names the steps that there are.
    """
    names = sorted(children(folder / FOLDER))
    if not names:
        raise LookupError(f"{folder / FOLDER} has no samples: see spec.observability.samples")
    wanted = names[-1] if step is None else file_name(step)
    if wanted not in names:
        first, last = step_of(names[0]), step_of(names[-1])
        raise LookupError(f"there are no samples of step {step}: there are some of steps {first} to {last}")
    # Threads of pyarrow that still run when the interpreter ends can abort the process.
    file = folder / FOLDER / wanted
    source = file if isinstance(file, Path) else pa.BufferReader(file.read_bytes())
    table = pq.ParquetFile(source, pre_buffer=False).read(None if tokens else _FEW, use_threads=False)
    if prompt is not None:
        table = table.filter(pc.equal(table["prompt_index"], prompt))
    if order:
        name = order.removeprefix("-")
        if name not in table.column_names:
            raise LookupError(f"there is no column {name}: there are {', '.join(table.column_names)}")
        table = table.sort_by([(name, "descending" if order.startswith("-") else "ascending")])
    for batch in table.to_batches(64):
        yield from batch.to_pylist()
