"""Conversion of samples to the batch of one training step (column names as in verl)."""

from collections.abc import Sequence

import numpy as np

from grpo_worker.common.ragged_batch import ROUTED_EXPERTS, RaggedBatch, offsets_of
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import Sample


def make_batch(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RaggedBatch:
    """Return the samples as rows of prompt and response tokens, in flat columns.

    Columns: input_ids (int32), rollout_log_probs (float32); with routing replay also the row column
    routed_experts with the keys of the samples' experts.
    """
    by_index = {prompt.index: np.array(prompt.ids, np.int32) for prompt in prompts}
    before = np.array([len(by_index[sample.prompt_index]) for sample in samples], dtype=np.int32)
    after = np.array([len(sample.ids) for sample in samples], dtype=np.int32)
    lengths = before + after
    starts, answers = offsets_of(lengths), offsets_of(after)
    ids, log_probs = np.empty(starts[-1], np.int32), np.empty(answers[-1], np.float32)
    for row, sample in enumerate(samples):
        middle = starts[row] + before[row]
        ids[starts[row] : middle] = by_index[sample.prompt_index]
        ids[middle : starts[row + 1]] = sample.ids
        log_probs[answers[row] : answers[row + 1]] = sample.log_probs
    experts = [sample.routed for sample in samples]
    row_columns: dict[str, np.ndarray] = {}
    if experts and experts[0] is not None:
        assert None not in experts, "either all samples of a batch have routed experts or none has"
        row_columns[ROUTED_EXPERTS] = np.array([found.key.encode() for found in experts if found])
    return RaggedBatch(
        before, lengths, int(lengths.max()), ids, {"rollout_log_probs": log_probs}, row_columns
    )
