"""The samples of a step as rows of a table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.reward_parts import parts_of
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample

EQUAL_SCORES = "all answers to the prompt have the same score"
ROWS = 256  # of a block, which is decoded and compressed at once
_IDS, _NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())
_PARTS = pa.map_(pa.string(), pa.float64())
_SPANS = pa.list_(pa.struct([("version", pa.int64()), ("end", pa.int64())]))
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("attempt", pa.int64()),
        ("time", pa.timestamp("ms", "UTC")),
        ("uid", pa.string()),
        ("prompt_index", pa.int64()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("score", pa.float64()),
        ("verifier_score", pa.float64()),
        ("reward_parts", _PARTS),
        ("advantage", pa.float32()),
        ("dropped", pa.string()),
        ("version", pa.int64()),
        ("spans", _SPANS),
        ("engine", pa.string()),
        ("log_prob_gap_mean", pa.float32()),
        ("log_prob_gap_max", pa.float32()),
        ("prompt_ids", _IDS),
        ("answer_ids", _IDS),
        ("rollout_log_probs", _NUMBERS),
        ("old_log_probs", _NUMBERS),
    ]
)
Decode = Callable[[Sequence[Sequence[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Fields that all samples of a file share. ``time``: seconds since the epoch."""

    step: int
    attempt: int
    time: float


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples that a step has consumed.

    ``scores``: of ``rollouts.samples``, with the reward model's part. ``batch``: the same samples, with the
    columns old_log_probs and advantages.
    """

    origin: Origin
    rollouts: RolloutBatch
    scores: Sequence[float]
    batch: RaggedBatch


def tables(step: StepSamples, decode: Decode, prompts: int | None) -> Iterator[pa.Table]:
    """Yield the rows of a step in blocks: trained samples, then those left out, then refused prompts.

    ``decode``: returns the texts of lists of token ids. ``prompts``: number of the first prompts whose
    samples are written; None: of all.
    """
    rollouts = step.rollouts
    known = {prompt.index: prompt for prompt in (*rollouts.taken, *rollouts.prompts)}
    wanted = set(list(known)[:prompts])
    trained = [row for row, sample in enumerate(rollouts.samples) if sample.prompt_index in wanted]
    for first in range(0, len(trained), ROWS):
        rows = trained[first : first + ROWS]
        samples = [rollouts.samples[row] for row in rows]
        yield table_of(step.origin, samples, known, decode, _trained(step, rows))
    left_out = [sample for sample in rollouts.left_out if sample.prompt_index in wanted]
    for first in range(0, len(left_out), ROWS):
        samples = left_out[first : first + ROWS]
        yield table_of(step.origin, samples, known, decode, {"dropped": [EQUAL_SCORES] * len(samples)})
    refused = {index: reason for index, reason in rollouts.refused.items() if index in wanted}
    if refused:
        yield table_of_refused(step.origin, refused, known, decode, {})


def _trained(step: StepSamples, rows: Sequence[int]) -> dict[str, Any]:
    """Return the columns that only samples have on which the step has trained."""
    batch, starts = step.batch, step.batch.response_starts
    advantages = batch.row.get("advantages")
    parts = [slice(starts[row], starts[row + 1]) for row in rows]
    old = [batch.response["old_log_probs"][part] for part in parts]
    gaps = [
        np.abs(mine - batch.response["rollout_log_probs"][part])
        for mine, part in zip(old, parts, strict=True)
    ]
    return {
        "score": [step.scores[row] for row in rows],
        **scores_of([step.rollouts.scores[row] for row in rows]),
        "advantage": None if advantages is None else [float(advantages[row]) for row in rows],
        "log_prob_gap_mean": [float(gap.mean()) if len(gap) else None for gap in gaps],
        "log_prob_gap_max": [float(gap.max()) if len(gap) else None for gap in gaps],
        "old_log_probs": _lists(old, pa.float32()),
    }


def scores_of(scores: Sequence[float]) -> dict[str, Any]:
    """Return the columns of the verifier's scores."""
    parts = [parts_of(score) for score in scores]
    return {
        "verifier_score": scores,
        "reward_parts": [list(one.items()) or None for one in parts] if any(parts) else None,
    }


def table_of(
    origin: Origin,
    samples: Sequence[Sample],
    prompts: Mapping[int, Prompt],
    decode: Decode,
    more: dict[str, Any],
) -> pa.Table:
    """Return a row for each sample.

    ``prompts``: by index. ``more``: columns in addition, or in place of these.
    """
    own = [prompts[sample.prompt_index] for sample in samples]
    answers = [np.frombuffer(sample.ids, np.int32) for sample in samples]  # type: ignore[call-overload]
    numbers = [np.frombuffer(sample.log_probs, np.float32) for sample in samples]  # type: ignore[call-overload]
    return _complete(
        origin,
        {
            "uid": [sample.uid for sample in samples],
            "prompt_index": [sample.prompt_index for sample in samples],
            "prompt": _texts(own, decode),
            "answer": decode([answer.tolist() for answer in answers]),
            "version": [sample.version for sample in samples],
            "spans": [[{"version": v, "end": end} for v, end in sample.spans] for sample in samples],
            "engine": [sample.engine for sample in samples],
            "prompt_ids": [list(prompt.ids) for prompt in own],
            "answer_ids": _lists(answers, pa.int32()),
            "rollout_log_probs": _lists(numbers, pa.float32()),
        }
        | more,
        len(samples),
    )


def table_of_refused(
    origin: Origin,
    refused: Mapping[int, str],
    prompts: Mapping[int, Prompt],
    decode: Decode,
    more: dict[str, Any],
) -> pa.Table:
    """Return a row without an answer for each prompt. ``refused``: the engines' reasons by index.

    ``more``: as in ``table_of``.
    """
    own = [prompts[index] for index in refused]
    columns = {
        "prompt_index": list(refused),
        "prompt": _texts(own, decode),
        "prompt_ids": [list(prompt.ids) for prompt in own],
        "dropped": list(refused.values()),
    }
    return _complete(origin, columns | more, len(own))


def _complete(origin: Origin, columns: dict[str, Any], rows: int) -> pa.Table:
    """Return a table of all columns; those that are not given have no values."""
    common = {"step": origin.step, "attempt": origin.attempt, "time": int(origin.time * 1000)}
    columns = {name: [value] * rows for name, value in common.items()} | columns
    given = {name: values for name, values in columns.items() if values is not None}
    arrays = [
        given[field.name] if isinstance(given.get(field.name), pa.Array)
        else pa.array(given.get(field.name, [None] * rows), field.type)
        for field in SCHEMA
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _texts(prompts: Sequence[Prompt], decode: Decode) -> list[str]:
    """Return the prompts' texts; the answers to one prompt follow each other, so each is decoded once."""
    distinct = list(dict.fromkeys(prompts))
    texts = dict(zip(distinct, decode([prompt.ids for prompt in distinct]), strict=True))
    return [texts[prompt] for prompt in prompts]


def _lists(rows: Sequence[np.ndarray], kind: pa.DataType) -> pa.ListArray:
    """Return lists of numbers without a Python object for each of them."""
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    values = np.concatenate(rows) if rows else np.empty(0, kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))
