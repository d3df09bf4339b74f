"""Log-probabilities and entropy from logits that are split over the vocabulary."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

_TOKENS_AT_ONCE = 1024


def log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probability of each label.

    logits: [b, s, vocab / tp], any float dtype. labels: [b, s] int64. Returns [b, s] fp32.
    """
    values = logits.float()
    if temperature != 1.0:  # a division keeps one more copy of the largest tensor
        values = values / temperature
    result: torch.Tensor = -vocab_parallel_cross_entropy(values.contiguous(), labels.contiguous())
    return result


def entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropy of each token's distribution, in nats; differentiable.

    logits: [b, s, vocab / tp]. Returns [b, s] fp32.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    # In pieces: the fp32 copies of all logits would be the largest tensors of a step.
    parts = [_entropy(piece.float() / temperature) for piece in torch.split(flat, _TOKENS_AT_ONCE)]
    return torch.cat(parts).reshape(logits.shape[:-1])


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    top = logits.detach().max(-1).values
    dist.all_reduce(top, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    shifted = logits - top[:, None]
    exp = shifted.exp()
    total, weighted = reduce_from_tensor_model_parallel_region(
        torch.stack([exp.sum(-1), (exp * shifted).sum(-1)])
    )
    result: torch.Tensor = total.log() - weighted / total
    return result
