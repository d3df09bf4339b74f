"""Samples -> the batch of one training step (TensorDict, key names as in verl)."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from grpo_worker.data.source import Prompt
from grpo_worker.rollout.sampling import Sample


def make_batch(
    prompts: Sequence[Prompt], samples: Sequence[Sample], advantages: Sequence[float],
    pad_id: int, multiple: int,
) -> TensorDict:  # fmt: skip
    """Pack samples, right-padded to a multiple of ``multiple`` tokens.

    Returns [rows, tokens] tensors, entry t belonging to token t: input_ids (int64),
    response_mask, rollout_log_probs and advantages (fp32, 0 outside the response).
    """
    by_index = {prompt.index: prompt.ids for prompt in prompts}
    rows = [(by_index[s.prompt_index], s) for s in samples]
    longest = max(len(prompt) + len(s.ids) for prompt, s in rows)
    shape = (len(rows), -(-longest // multiple) * multiple)
    ids = np.full(shape, pad_id, dtype=np.int64)
    mask, log_probs, advantage = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    for row, (prompt, sample) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(sample.ids)
        ids[row, :start], ids[row, start:end] = prompt, sample.ids
        mask[row, start:end] = 1
        log_probs[row, start:end] = sample.log_probs
        advantage[row, start:end] = advantages[row]
    columns = {
        "input_ids": torch.from_numpy(ids),
        "response_mask": torch.from_numpy(mask),
        "rollout_log_probs": torch.from_numpy(log_probs),
        "advantages": torch.from_numpy(advantage),
    }
    return TensorDict(columns, batch_size=[len(rows)])
