"""Reads the samples that a page shows: of a file only the columns and row groups that are needed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_worker.common.store_path import StorePath
from grpo_worker.run_page.limits import Limits
from grpo_worker.run_page.sample_cards import group_card, within
from grpo_worker.run_page.sample_choice import Group, groups, overview, ranked_answers, spread_out, telling
from grpo_worker.run_page.token_texts import Decode
from grpo_worker.samples.files import TRAINING, sample_file, sample_steps


def sampled_steps(folder: StorePath) -> list[int]:
    """Return the steps of a job whose samples are in its folder."""
    return sample_steps(folder / TRAINING)


def chosen_steps(folder: StorePath, decode: Decode | None, limits: Limits) -> dict[str, Any]:
    """Return samples of steps at equal distances, the first and the last one among them."""
    steps = sampled_steps(folder)
    found = [step_samples(folder, step, None, decode, limits) for step in spread_out(steps, limits.steps)]
    removed = within(found, limits.sample_bytes)
    return {
        "count": len(steps),
        "first": steps[0] if steps else None,
        "last": steps[-1] if steps else None,
        "removed": removed,
        "steps": found,
    }


def step_samples(
    folder: StorePath, step: int, prompt: int | None, decode: Decode | None, limits: Limits
) -> dict[str, Any]:
    """Return the groups of a step, with the answers of some of them.

    ``prompt``: index of the only prompt whose answers are wanted. Raises LookupError for a step or a prompt
    without samples.
    """
    if step not in sampled_steps(folder):
        raise LookupError(f"there are no samples of step {step}")
    with _opened(sample_file(folder / TRAINING, step)) as file:
        few = file.read(["prompt_index", "score", "log_prob_gap_mean"], use_threads=False).to_pydict()
        found = groups(few["prompt_index"], few["score"], few["log_prob_gap_mean"])
        shown = telling(found, limits.groups) if prompt is None else _only(found, prompt, step)
        return {
            "step": step,
            "groups": [group.row() for group in overview(found, limits.rows)],
            "of": len(found),
            "shown": [
                _card(file, few["prompt_index"], few["score"], group, decode, limits) for group in shown
            ],
        }


def _only(found: Sequence[Group], prompt: int, step: int) -> list[Group]:
    wanted = [group for group in found if group.prompt == prompt]
    if not wanted:
        raise LookupError(f"there are no samples of prompt {prompt} in step {step}")
    return wanted


def _card(
    file: pq.ParquetFile, prompts: Sequence[int], scores: Sequence[float | None], group: Group,
    decode: Decode | None, limits: Limits,
) -> dict[str, Any]:  # fmt: skip
    places = np.flatnonzero(np.asarray(prompts) == group.prompt)
    ranked = ranked_answers([scores[at] for at in places], limits.answers)
    rows = _rows(file, [int(places[at]) for at in ranked])
    return group_card(rows, group.answers, decode, limits)


def _rows(file: pq.ParquetFile, places: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows in the given order; one row group at a time is in memory."""
    found: dict[int, dict[str, Any]] = {}
    begin = 0
    for number in range(file.num_row_groups):
        end = begin + file.metadata.row_group(number).num_rows
        here = [place for place in places if begin <= place < end]
        if here:
            table = file.read_row_group(number, use_threads=False)
            taken = table.take(pa.array([place - begin for place in here]))
            found |= dict(zip(here, taken.to_pylist(maps_as_pydicts="strict"), strict=True))
        begin = end
    return [found[place] for place in places]


@contextmanager
def _opened(file: StorePath) -> Iterator[pq.ParquetFile]:
    # Threads of pyarrow that still run when the interpreter ends can abort the process.
    with file.open("rb") as source, pq.ParquetFile(source, pre_buffer=False) as parquet:
        yield parquet
