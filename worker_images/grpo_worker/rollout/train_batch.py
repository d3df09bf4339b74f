"""Conversion of samples to the batch of one training step (TensorDict, key names as in verl)."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import Sample


def make_batch(prompts: Sequence[Prompt], samples: Sequence[Sample], pad_id: int) -> TensorDict:
    """Return the samples as rows, right-padded to the longest.

    The result holds [rows, tokens] tensors whose entry t belongs to token t: input_ids (int64),
    attention_mask (bool, true for prompt and response), response_mask and rollout_log_probs (fp32, 0 outside
    the response); with routing replay also routed_experts (int16 [rows, tokens, expert layers, k]).
    """
    by_index = {prompt.index: prompt.ids for prompt in prompts}
    rows = [(by_index[s.prompt_index], s) for s in samples]
    longest = max(len(prompt) + len(s.ids) for prompt, s in rows)
    shape = (len(rows), longest)
    ids = np.full(shape, pad_id, dtype=np.int64)
    seen = np.zeros(shape, dtype=np.bool_)
    mask, log_probs = (np.zeros(shape, dtype=np.float32) for _ in range(2))
    for row, (prompt, sample) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(sample.ids)
        ids[row, :start], ids[row, start:end] = prompt, sample.ids
        seen[row, :end] = True
        mask[row, start:end] = 1
        log_probs[row, start:end] = sample.log_probs
    columns = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(seen),
        "response_mask": torch.from_numpy(mask),
        "rollout_log_probs": torch.from_numpy(log_probs),
    }
    routed = [sample.routed for _, sample in rows]
    if routed[0] is not None:
        whole = np.zeros((*shape, *routed[0].shape[1:]), dtype=np.uint16)
        for row, choice in enumerate(routed):
            assert choice is not None, "either all samples of a batch have routed experts or none has"
            whole[row, : len(choice)] = choice
        columns["routed_experts"] = torch.from_numpy(whole.astype(np.int16))
    return TensorDict(columns, batch_size=[len(rows)])
