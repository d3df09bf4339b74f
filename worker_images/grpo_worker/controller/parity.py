"""Do trainer and engines compute the same function? Asked on the first samples of every attempt."""

import torch
from tensordict import TensorDict


class ParityError(RuntimeError):
    """Training would follow gradients of another function than the one that is sampled."""


def check_log_probs(batch: TensorDict, bound: float) -> None:
    """Compare the trainer's and the engines' log-probabilities of the sampled tokens.

    batch: old_log_probs, rollout_log_probs, response_mask [rows, tokens].
    Raises ParityError when their mean difference exceeds ``bound`` (nats), or is no number.
    """
    mask = batch["response_mask"].bool()
    gaps = (batch["old_log_probs"] - batch["rollout_log_probs"])[mask].abs()
    mean = float(gaps.mean())
    if mean <= bound:
        return
    worst = int(torch.nan_to_num(gaps, nan=torch.inf).argmax())
    row, token = (int(place[worst]) for place in mask.nonzero(as_tuple=True))
    raise ParityError(
        f"trainer and engines disagree: mean |log-prob difference| {mean:.3g} exceeds algorithm."
        f"maxLogProbGap={bound:g} (largest {float(gaps[worst]):.3g} at sample {row}, token {token}): "
        "compare model, dtype and quantization of both; raise maxLogProbGap only if they differ on purpose"
    )
