"""Functions that run on ranks: an optimizer step in which one rank computes a wrong gradient."""

from typing import Any

import torch
import torch.distributed as dist

from grpo_worker.common.rank_errors import GradientMismatchError
from grpo_worker.megatron.training.gradient_check import GradientCheck
from support.ranks.policy_cases import batch, make, own_rows, update, whole_weights

LOWEST_BIT = 0


def wrong_gradient(layout: dict[str, int], rank: int | None, passes: int = 1) -> dict[str, Any]:
    """Take a checked step in which ``rank`` flips the last bit of an element, in the first ``passes``.

    Returns what each rank would raise, the metrics, and the weights after the step, which goes on.
    """
    policy, raised, left = make(layout), list[str](), [passes if rank == dist.get_rank() else 0]
    compare = GradientCheck.compare

    def noted(self: GradientCheck) -> None:
        try:
            compare(self)
        except GradientMismatchError as error:
            raised.append(str(error))

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        if left[0]:
            left[0] -= 1
            spoiled.view(torch.int32).view(-1)[int(gradient.abs().argmax())] ^= 1 << LOWEST_BIT
        return spoiled

    GradientCheck.compare = noted  # type: ignore[method-assign]
    policy.chunks[-1].decoder.layers[-1].self_attention.linear_proj.weight.register_hook(flip)
    data = own_rows(batch(0))
    zeros = torch.zeros_like(data["advantages"])
    columns = data | {"old_log_probs": zeros - 4.0, "ref_log_prob": zeros - 4.1}
    metrics = update(policy, columns, check=True)
    return {"raised": raised, "metrics": metrics, "weights": whole_weights(policy), "left": left[0]}
