"""Prompts from Parquet or JSON-lines files, on a shared filesystem or in an object store.

Files are read by Hugging Face ``datasets`` (object stores through ``fsspec``), tokenised once and
cached; a restart reads the cache. Rows may be in verl's layout or flat.
"""

import hashlib
import json
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import tokenizers
import transformers
from datasets import Dataset, Features, List, Value, load_dataset
from datasets.exceptions import DatasetsError

from grpo_operator.api.v1alpha1.data import DataSpec
from grpo_worker.common.user_function import load_function
from grpo_worker.data.file_checks import empty_files, problems
from grpo_worker.data.tasks import Counts, PromptFormat, Record, UnusablePromptError, jsonable, read_prompt
from grpo_worker.data.tokenizer import TextTokenizer

IDS = "ids"
LEFT_OUT = "left_out"  # why a row is left out; "" for a row that is used
FILTERED = "spec.data.filter"
_FORMAT = 1  # of the cached columns; increment it when they change
_NO_ROWS = "the files contain no rows: name other files"
_MISSING = object()
_HEAD = 100  # number of first rows that are searched for nested names
_KEPT = 256  # records in memory: all responses to a prompt are judged by the same record
# (number of rows, epoch, seed) -> order of the rows in that epoch
Order = Callable[[int, int, int], Iterable[int]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class FileTask:
    """Endless task over the rows of files, in a new order in each epoch.

    Item ``index`` is row ``order(epoch)[index mod rows]`` of epoch ``index div rows``: the same row
    in every run with the same files, filter and seed. ``prompts``: for each row its token ids, or why it is
    left out.
    """

    def __init__(
        self, rows: Dataset, prompts: Dataset, spec: DataSpec, seed: int, prompt_format: PromptFormat
    ) -> None:
        self._rows = rows
        self._prompts = prompts
        self._spec = spec
        self._seed = seed
        self._kept, self.counts, self.notes = _sort_out(prompts, spec)
        if prompt_format.note and isinstance(lookup(rows[int(self._kept[0])], spec.prompt_key), str):
            self.notes.append(prompt_format.note)
        self._order: Order = load_function("spec.data.order", spec.order) if spec.order else _shuffled
        self._epoch: tuple[int, Numbers] = (-1, np.empty(0, np.int64))
        self._record = lru_cache(_KEPT)(self._read)

    def prompt(self, index: int, tokenizer: TextTokenizer) -> list[int]:
        """Return the cached token ids of a prompt."""
        return list(self._prompts[self._row(index)][IDS])

    def record(self, index: int) -> Record:
        """Return the record by which responses are judged."""
        return self._record(index)

    def _read(self, index: int) -> Record:
        spec = self._spec
        row = jsonable(self._rows[self._row(index)])
        columns = {name: value for name, value in row.items() if name != spec.prompt_key}
        extra = _extra_info(columns, spec.answer_key)
        if extra.get("index") is None:
            extra["index"] = index
        source = str(row.get("data_source") or spec.train)
        prompt = read_prompt(lookup(row, spec.prompt_key))
        return Record(source, lookup(row, spec.answer_key), extra, prompt, columns)

    def _row(self, index: int) -> int:
        rows = len(self._kept)
        epoch, position = divmod(index, rows)
        if self._epoch[0] != epoch:
            order = np.fromiter(self._order(rows, epoch, self._seed), np.int64)
            if not np.array_equal(np.sort(order), np.arange(rows)):
                raise ValueError(
                    f"spec.data.order={self._spec.order}: epoch {epoch} must hold each of the {rows} rows "
                    "once: return a permutation of range(rows)"
                )
            self._epoch = (epoch, order)
        return int(self._kept[self._epoch[1][position]])


def _shuffled(rows: int, epoch: int, seed: int) -> Iterable[int]:
    order = array("q", range(rows))
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311 - reproducible, not secret
    return order


def open_files(spec: DataSpec, tokenizer: TextTokenizer, seed: int, cache: Path) -> FileTask:
    """Read, filter and tokenise the files that the job names.

    Rows without a prompt, or with a prompt longer than ``promptLength``, are left out and counted.

    Raises ValueError when files or columns are missing, or no row is left.
    """
    rows = _load(spec.train, cache)
    for field, key in (("promptKey", spec.prompt_key), ("answerKey", spec.answer_key)):
        _check_column(rows, field, key)
    prompt_format = PromptFormat.of(spec, tokenizer)
    task = FileTask(rows, _tokenised(rows, spec, tokenizer, prompt_format), spec, seed, prompt_format)
    task.notes += empty_files(spec.train)
    return task


def _load(train: str, cache: Path) -> Dataset:
    kind = "parquet" if train.endswith(".parquet") else "json"
    try:
        rows = load_dataset(kind, data_files=train, split="train", cache_dir=str(cache))
    except (FileNotFoundError, StopIteration, ValueError, DatasetsError) as error:
        if isinstance(error, DatasetsError) and isinstance(error.__cause__, OSError):
            raise  # a failure of the storage, which may be available again at the next attempt
        problem = next(problems(train), str(error.__cause__ or error) or _NO_ROWS)
        raise ValueError(f"spec.data.train={train}: {problem}") from error
    if len(rows) == 0:
        raise ValueError(f"spec.data.train={train}: {_NO_ROWS}")
    return rows


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """Return the column ``key``; for "a.b" without such a column, entry "b" of column "a"; else None."""
    value = _find(row, key)
    return None if value is _MISSING else value


def _find(row: Mapping[str, Any], key: str) -> Any:
    if key in row:
        return row[key]
    head, _, tail = key.partition(".")
    inner = _opened(row.get(head)) if tail else None
    return _find(inner, tail) if isinstance(inner, Mapping) else _MISSING


def _opened(value: Any) -> Any:
    """Parse text that is JSON, as which some files store ``extra_info``; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _check_column(rows: Dataset, field: str, key: str) -> None:
    # The features name the fields of a struct even if they are empty in the first rows.
    shapes = [rows.features, *rows.select(range(min(_HEAD, len(rows))))]
    if any(_find(shape, key) is not _MISSING for shape in shapes):
        return
    names: dict[str, None] = {}
    for column in rows.column_names:
        values = [_opened(shape[column]) for shape in shapes]
        inner = [name for value in values if isinstance(value, dict) for name in value]
        names.update(dict.fromkeys([f"{column}.{name}" for name in inner] or [column]))
    verl = "reward_model.ground_truth"
    remedy = f"for verl's layout set it to {verl}" if verl in names else "set it to one of them"
    raise ValueError(
        f"spec.data.{field}={key!r}: the files have no such column, but {', '.join(names)}: "
        + (remedy if field == "answerKey" else "set it to one of them")
    )


def _tokenised(
    rows: Dataset, spec: DataSpec, tokenizer: TextTokenizer, prompt_format: PromptFormat
) -> Dataset:
    keep = load_function(FILTERED, spec.filter) if spec.filter else None

    def encode(row: Mapping[str, Any], number: int) -> dict[str, Any]:
        if keep and not _call(keep, row, f"{FILTERED}={spec.filter}: row {number}"):
            return {IDS: [], LEFT_OUT: FILTERED}
        try:
            ids = _encoded(lookup(row, spec.prompt_key), tokenizer, prompt_format)
            return {IDS: ids, LEFT_OUT: ""}
        except UnusablePromptError as error:
            return {IDS: [], LEFT_OUT: f"row {number}: {error}"}
        except TypeError as error:
            raise ValueError(
                f"spec.data.promptKey={spec.prompt_key!r}: row {number}: {error}: name a column of "
                "texts, or of lists of messages with role and content"
            ) from error

    return rows.map(
        encode,
        with_indices=True,
        remove_columns=rows.column_names,
        features=Features({IDS: List(Value("int32")), LEFT_OUT: Value("string")}),
        new_fingerprint=_fingerprint(rows, spec, tokenizer, prompt_format),
    )


def _encoded(value: Any, tokenizer: TextTokenizer, prompt_format: PromptFormat) -> list[int]:
    prompt = read_prompt(value)
    try:
        ids = prompt_format.encode(prompt, tokenizer)
    except ValueError as error:
        if not tokenizer.has_chat_template:
            raise  # the model lacks a template, which affects all rows
        raise UnusablePromptError(str(error)) from error
    if not ids:
        raise UnusablePromptError("the prompt has no tokens")
    return ids


def _call(keep: Callable[..., Any], row: Mapping[str, Any], where: str) -> bool:
    try:
        return bool(keep(dict(row)))
    except Exception as error:  # a user's function may raise anything
        raise ValueError(f"{where}: {error!r}") from error


def _fingerprint(rows: Dataset, spec: DataSpec, tokenizer: TextTokenizer, prompt_format: PromptFormat) -> str:
    """Return a cache key that covers the tokenizer and the filter, which ``datasets`` cannot hash."""
    libraries = (tokenizers.__version__, transformers.__version__)
    template = (tokenizer.digest, prompt_format.as_message, sorted(prompt_format.variables.items()))
    keep = (spec.filter, _code(spec.filter))
    parts = json.dumps((_FORMAT, rows._fingerprint, spec.prompt_key, libraries, template, keep))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _code(function: str | None) -> str:
    """Return the digest of the file that defines a function; "" if there is none."""
    if function is None:
        return ""
    module = function.rpartition(":")[0]
    file = module if module.endswith(".py") else getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _sort_out(prompts: Dataset, spec: DataSpec) -> tuple[Numbers, Counts, list[str]]:
    """Return the numbers of the usable rows, the counts of all rows, and notes about those left out."""
    table = prompts.data
    lengths = pc.list_value_length(table.column(IDS)).to_numpy()
    filtered = pc.equal(table.column(LEFT_OUT), FILTERED).to_numpy()
    usable = pc.equal(table.column(LEFT_OUT), "").to_numpy()
    empty = ~usable & ~filtered
    kept = np.flatnonzero(usable & (lengths <= spec.prompt_length))
    counts = Counts(len(kept), int(usable.sum()) - len(kept), int(filtered.sum()), int(empty.sum()))
    first = prompts[int(np.argmax(empty))][LEFT_OUT] if counts.empty else ""
    reasons = {
        f"the prompt exceeds spec.data.promptLength={spec.prompt_length}": counts.too_long,
        f"{FILTERED}={spec.filter} does not keep it": counts.filtered,
        f"there is no usable prompt; the first is {first}": counts.empty,
    }
    notes = [_note(number, len(prompts), reason) for reason, number in reasons.items() if number]
    if not counts.rows:
        shortest = f"; the shortest prompt has {lengths[usable].min()} tokens" if counts.too_long else ""
        raise ValueError(
            f"spec.data.train={spec.train}: no row is left: {'; '.join(notes)}{shortest}: change "
            "these fields, or name other files"
        )
    return kept, counts, notes


def _note(number: int, total: int, reason: str) -> str:
    numbers = f"{number:,} of {total:,} rows".replace(",", " ")
    return f"{numbers} {'is' if number == 1 else 'are'} left out: {reason}"


def _extra_info(columns: Mapping[str, Any], answer_key: str) -> dict[str, Any]:
    """Return verl's ``extra_info``, plus all columns that have no field of their own in a record."""
    given = _opened(columns.get("extra_info"))
    elsewhere = {"data_source", answer_key}
    if answer_key not in columns:
        elsewhere.add(answer_key.partition(".")[0])
    if not isinstance(given, dict):
        return {name: value for name, value in columns.items() if name not in elsewhere}
    elsewhere.add("extra_info")
    return {name: value for name, value in columns.items() if name not in elsewhere} | given
