"""Prompts from Parquet or JSON-lines files, on a shared filesystem or in an object store.

Files are read by Hugging Face ``datasets`` (object stores through ``fsspec``), tokenised once and
cached; a restart reads the cache.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from grpo_operator.api.data import DataSpec
from grpo_worker.data.entry_point import load_function
from grpo_worker.data.tasks import Record
from grpo_worker.data.tokenizer import TextTokenizer

IDS = "grpo_prompt_ids"
# (number of rows, epoch, seed) -> the order of the rows in that epoch
Order = Callable[[int, int, int], Sequence[int]]


class FileTask:
    """Rows again and again, in another order in each epoch.

    Item ``index`` is row ``order(epoch)[index mod rows]`` of epoch ``index div rows``: the same row
    in every run with the same files, filter and seed.
    """

    def __init__(self, rows: Dataset, spec: DataSpec, seed: int) -> None:
        self._rows = rows
        self._spec = spec
        self._seed = seed
        self._order: Order = load_function("spec.data.order", spec.order) if spec.order else _shuffled
        self._epoch = (-1, [0])

    def prompt(self, index: int, tokenizer: TextTokenizer) -> list[int]:
        return list(self._rows[self._row(index)][IDS])

    def record(self, index: int) -> Record:
        row = dict(self._rows[self._row(index)])
        judged = row.get(self._spec.answer_key)
        source = str(row.get("data_source", self._spec.train))
        skipped = (IDS, self._spec.answer_key, self._spec.prompt_key, "data_source")
        extra = {key: value for key, value in row.items() if key not in skipped}
        return Record(source, judged, extra | {"index": index})

    def _row(self, index: int) -> int:
        epoch, place = divmod(index, len(self._rows))
        if self._epoch[0] != epoch:
            order = [int(row) for row in self._order(len(self._rows), epoch, self._seed)]
            if sorted(order) != list(range(len(self._rows))):
                raise ValueError(
                    f"spec.data.order={self._spec.order}: epoch {epoch} must hold each of the "
                    f"{len(self._rows)} rows once"
                )
            self._epoch = (epoch, order)
        return self._epoch[1][place]


def _shuffled(rows: int, epoch: int, seed: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def open_files(spec: DataSpec, tokenizer: TextTokenizer, seed: int, cache: Path) -> FileTask:
    """Read, filter and tokenise. Rows whose prompt exceeds ``promptLength`` are left out.

    Raises ValueError when files or columns are missing, or no row is left.
    """
    kind = "parquet" if spec.train.endswith(".parquet") else "json"
    try:
        rows = load_dataset(kind, data_files=spec.train, split="train", cache_dir=str(cache))
    except (FileNotFoundError, OSError, ValueError) as error:
        raise ValueError(f"spec.data.train={spec.train}: {error}") from error
    for key in (spec.prompt_key, spec.answer_key):
        if key not in rows.column_names:
            raise ValueError(
                f"spec.data: the files have no column {key!r}, but {', '.join(rows.column_names)}: set "
                "promptKey and answerKey"
            )
    if spec.filter:
        rows = rows.filter(load_function("spec.data.filter", spec.filter))
    rows = _tokenised(rows, spec, tokenizer)
    short = rows.filter(lambda row: len(row[IDS]) <= spec.prompt_length)
    if len(short) == 0:
        raise ValueError(
            f"spec.data.train={spec.train}: none of {len(rows)} rows has a prompt of at most promptLength="
            f"{spec.prompt_length} tokens"
        )
    return FileTask(short, spec, seed)


def _tokenised(rows: Dataset, spec: DataSpec, tokenizer: TextTokenizer) -> Dataset:
    def encode(row: dict[str, Any]) -> dict[str, list[int]]:
        prompt = row[spec.prompt_key]
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        return {IDS: ids}

    # The tokenizer's own digest names the cache: the library cannot see into it.
    name = f"{tokenizer.digest}-{spec.prompt_key}"
    return rows.map(encode, new_fingerprint=_fingerprint(rows, name))


def _fingerprint(rows: Dataset, name: str) -> str:
    from datasets.fingerprint import Hasher

    return str(Hasher.hash([rows._fingerprint, name]))
