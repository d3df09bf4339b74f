"""Padded batches [rows, tokens], as tests write them down, and ragged ones of the product."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from grpo_worker.algorithms.losses import row_weights
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.data.micro_batch import Batch

_MASKS = ("input_ids", "attention_mask", "response_mask")


def ragged(
    data: Batch,
    layers: Sequence[int] = (),
    spans: Callable[[int], Sequence[tuple[int, int]]] | None = None,
) -> RaggedBatch:
    """Convert a padded batch.

    A response is the end of a row. ``weights`` and other columns with one value per row become row columns.
    ``routed_experts`` [rows, tokens, expert layers, k]; ``layers``: those that the rank reads.
    ``spans``: length of a row -> the tokens that it reads; the experts of others are 0. Default: all.
    """
    lengths = data["attention_mask"].sum(1).numpy().astype(np.int32)
    mask = data.get("response_mask", data["attention_mask"])
    prompts = lengths - mask.sum(1).numpy().astype(np.int32)
    width = data["input_ids"].shape[1]
    seen = np.arange(width) < lengths[:, None]
    inside = seen & (np.arange(width) >= prompts[:, None])
    ids = data["input_ids"].cpu().numpy()[seen].astype(np.int32)
    response, row, routed = {}, {}, None
    for name, column in data.items():
        if name == "routed_experts":
            mine = np.zeros((len(lengths), width), bool)
            for number, length in enumerate(lengths):
                for start, end in [(0, width)] if spans is None else spans(int(length)):
                    mine[number, start:end] = True
            chosen = (column.numpy() * mine[:, :, None, None])[:, :, list(layers)].transpose(0, 2, 1, 3)
            routed = [experts[:, : max(n - 1, 0)] for experts, n in zip(chosen, lengths, strict=True)]
        elif name == "weights":
            row[name] = (column * mask).amax(1).numpy()
        elif name not in _MASKS:
            response[name] = column.cpu().numpy()[inside]
    return RaggedBatch(prompts, lengths, width, ids, response, row, routed)


def padded_tokens(tokens: np.ndarray, batch: RaggedBatch) -> torch.Tensor:
    """Return a column with an entry for each token as [rows, width], 0 in the padding."""
    result = torch.zeros(batch.rows, batch.width)
    for row in range(batch.rows):
        values = tokens[batch.starts[row] : batch.starts[row + 1]]
        result[row, : len(values)] = torch.from_numpy(np.ascontiguousarray(values))
    return result


def token_weights(mask: torch.Tensor, mode: str, response_length: int) -> torch.Tensor:
    """Return each response token's weight in the loss, [rows, tokens]."""
    return row_weights(mask.sum(1), mode, response_length)[:, None] * mask
