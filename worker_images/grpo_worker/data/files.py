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
import pyarrow.compute as pc  # type: ignore[import-untyped]
import tokenizers
import transformers
from datasets import Dataset, Features, List, Value, load_dataset
from datasets.exceptions import DatasetsError

from grpo_operator.api.v1alpha1.data import DataSpec
from grpo_worker.common.user_function import load_function
from grpo_worker.data.found_files import empty_files, problems
from grpo_worker.data.tasks import Counts, PromptFormat, Record, UnusablePromptError, jsonable, read_prompt
from grpo_worker.data.tokenizer import TextTokenizer

IDS = "ids"
LEFT_OUT = "left_out"  # why a row is: "" for one that is not
FILTERED = "spec.data.filter"
_FORMAT = 1  # of the cached columns; raised when they change
_NO_ROWS = "the files hold no rows: name others"
_MISSING = object()
_HEAD = 100  # first rows, in which nested names are looked for
_KEPT = 256  # records in memory: all answers to a prompt are judged by one
# (number of rows, epoch, seed) -> the order of the rows in that epoch
Order = Callable[[int, int, int], Iterable[int]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class FileTask:
    """Rows again and again, in another order in each epoch.

    Item ``index`` is row ``order(epoch)[index mod rows]`` of epoch ``index div rows``: the same row
    in every run with the same files, filter and seed. ``prompts``: token ids of each of ``rows``, and why a
    row is left out.
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
        return list(self._prompts[self._row(index)][IDS])

    def record(self, index: int) -> Record:
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
        epoch, place = divmod(index, rows)
        if self._epoch[0] != epoch:
            order = np.fromiter(self._order(rows, epoch, self._seed), np.int64)
            if not np.array_equal(np.sort(order), np.arange(rows)):
                raise ValueError(
                    f"spec.data.order={self._spec.order}: epoch {epoch} must hold each of the {rows} rows "
                    "once: return a permutation of range(rows)"
                )
            self._epoch = (epoch, order)
        return int(self._kept[self._epoch[1][place]])


def _shuffled(rows: int, epoch: int, seed: int) -> Iterable[int]:
    order = array("q", range(rows))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def open_files(spec: DataSpec, tokenizer: TextTokenizer, seed: int, cache: Path) -> FileTask:
    """Read, filter and tokenise. Rows without a prompt, or with one that exceeds ``promptLength``, are left
    out and counted.

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
            raise  # the storage fails, not the data: it may be back at the next attempt
        problem = next(problems(train), str(error.__cause__ or error) or _NO_ROWS)
        raise ValueError(f"spec.data.train={train}: {problem}") from error
    if len(rows) == 0:
        raise ValueError(f"spec.data.train={train}: {_NO_ROWS}")
    return rows


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """Find the column of that name, else what the part before a dot holds under the rest; None: not there."""
    found = _find(row, key)
    return None if found is _MISSING else found


def _find(row: Mapping[str, Any], key: str) -> Any:
    if key in row:
        return row[key]
    head, _, tail = key.partition(".")
    inner = _opened(row.get(head)) if tail else None
    return _find(inner, tail) if isinstance(inner, Mapping) else _MISSING


def _opened(value: Any) -> Any:
    """Parse text that is JSON: some files keep ``extra_info`` that way."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _check_column(rows: Dataset, field: str, key: str) -> None:
    # The features name what a struct holds even where the first rows have none of it.
    shapes = [rows.features, *rows.select(range(min(_HEAD, len(rows))))]
    if any(_find(shape, key) is not _MISSING for shape in shapes):
        return
    names: dict[str, None] = {}
    for column in rows.column_names:
        held = [_opened(shape[column]) for shape in shapes]
        inner = [name for value in held if isinstance(value, dict) for name in value]
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
            raise  # the model is at fault for all rows, not this one
        raise UnusablePromptError(str(error)) from error
    if not ids:
        raise UnusablePromptError("the prompt has no tokens")
    return ids


def _call(keep: Callable[..., Any], row: Mapping[str, Any], where: str) -> bool:
    try:
        return bool(keep(dict(row)))
    except Exception as error:  # whatever a user's function raises
        raise ValueError(f"{where}: {error!r}") from error


def _fingerprint(rows: Dataset, spec: DataSpec, tokenizer: TextTokenizer, prompt_format: PromptFormat) -> str:
    """Name the cache by all that decides over ids: the library cannot see into tokenizer and filter."""
    libraries = (tokenizers.__version__, transformers.__version__)
    template = (tokenizer.digest, prompt_format.as_message, sorted(prompt_format.variables.items()))
    keep = (spec.filter, _code(spec.filter))
    parts = json.dumps((_FORMAT, rows._fingerprint, spec.prompt_key, libraries, template, keep))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _code(function: str | None) -> str:
    """Digest of the file that a function is in."""
    if function is None:
        return ""
    place = function.rpartition(":")[0]
    file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _sort_out(prompts: Dataset, spec: DataSpec) -> tuple[Numbers, Counts, list[str]]:
    """Numbers of the rows that are trained on, counts of the others and what is to be said of them."""
    table = prompts.data
    lengths = pc.list_value_length(table.column(IDS)).to_numpy()
    filtered = pc.equal(table.column(LEFT_OUT), FILTERED).to_numpy()
    whole = pc.equal(table.column(LEFT_OUT), "").to_numpy()
    empty = ~whole & ~filtered
    kept = np.flatnonzero(whole & (lengths <= spec.prompt_length))
    counts = Counts(len(kept), int(whole.sum()) - len(kept), int(filtered.sum()), int(empty.sum()))
    first = prompts[int(np.argmax(empty))][LEFT_OUT] if counts.empty else ""
    reasons = {
        f"the prompt exceeds spec.data.promptLength={spec.prompt_length}": counts.too_long,
        f"{FILTERED}={spec.filter} does not keep it": counts.filtered,
        f"there is no usable prompt; the first is {first}": counts.empty,
    }
    notes = [_note(number, len(prompts), reason) for reason, number in reasons.items() if number]
    if not counts.rows:
        shortest = f"; the shortest prompt has {lengths[whole].min()} tokens" if counts.too_long else ""
        raise ValueError(
            f"spec.data.train={spec.train}: no row is left: {'; '.join(notes)}{shortest}: change "
            "these fields, or name other files"
        )
    return kept, counts, notes


def _note(number: int, total: int, reason: str) -> str:
    numbers = f"{number:,} of {total:,} rows".replace(",", " ")
    return f"{numbers} {'is' if number == 1 else 'are'} left out: {reason}"


def _extra_info(columns: Mapping[str, Any], answer_key: str) -> dict[str, Any]:
    """verl's ``extra_info``, with the columns beside it that have no place of their own in a record."""
    given = _opened(columns.get("extra_info"))
    elsewhere = {"data_source", answer_key}
    if answer_key not in columns:
        elsewhere.add(answer_key.partition(".")[0])
    if not isinstance(given, dict):
        return {name: value for name, value in columns.items() if name not in elsewhere}
    elsewhere.add("extra_info")
    return {name: value for name, value in columns.items() if name not in elsewhere} | given
