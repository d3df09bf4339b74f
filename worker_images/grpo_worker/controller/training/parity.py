"""Checks that trainer and engines compute the same function.

At the start of every attempt they compare the configurations, the log-probabilities of the first samples, and
the routed experts. The log-probabilities of every batch must be numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_worker.checkpointing.store import NO_SHAPE
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.rollout.sampling import Sample


class ParityError(RuntimeError):
    """Trainer and engines compute different functions, so the gradients would be wrong."""


class NotFiniteError(RuntimeError):
    """Log-probabilities are no numbers; another attempt may compute them. ``engines``: whose they are."""

    def __init__(self, message: str, engines: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.engines = engines


def check_finite(batch: RaggedBatch, samples: Sequence[Sample]) -> None:
    """Check that engines and trainer have computed numbers for the sampled tokens.

    batch: as for ``check_log_probs``; its rows are the ``samples``. Raises NotFiniteError that names engine
    and sample.
    """
    for column, author in (("rollout_log_probs", ""), ("old_log_probs", "the trainer, for an answer of ")):
        if np.isfinite(batch.response[column].sum(dtype=np.float64)):
            continue  # of every batch: no copy of its columns
        wrong = np.flatnonzero(~np.isfinite(batch.response[column]))
        rows = np.unique(np.searchsorted(batch.response_starts, wrong, side="right") - 1)
        first = samples[rows[0]]
        token = int(wrong[0]) - int(batch.response_starts[rows[0]])
        raise NotFiniteError(
            f"{author}{first.engine} computed a log-probability that is no number, for sample {first.uid}, "
            f"token {token} of the response ({len(rows)} of {len(samples)} samples have one): look for "
            "faults of its GPUs; compare dtype and quantization",
            frozenset() if author else frozenset(samples[row].engine for row in rows),
        )


def check_log_probs(batch: RaggedBatch, bound: float) -> None:
    """Compare the trainer's and the engines' log-probabilities of the sampled tokens.

    batch: response columns old_log_probs and rollout_log_probs, which are finite.
    Raises ParityError if their mean difference exceeds ``bound`` (nats).
    """
    gaps = np.abs(batch.response["old_log_probs"] - batch.response["rollout_log_probs"])
    mean = float(gaps.mean(dtype=np.float64))
    if mean <= bound:
        return
    worst = int(gaps.argmax())
    row = int(np.searchsorted(batch.response_starts, worst, side="right")) - 1
    token = worst - int(batch.response_starts[row]) + int(batch.prompt_lengths[row])
    raise ParityError(
        f"trainer and engines disagree: mean |log-prob difference| {mean:.3g} exceeds algorithm."
        f"maxLogProbGap={bound:g} (largest {float(gaps[worst]):.3g} at sample {row}, token {token}): "
        "compare model, dtype and quantization of both; raise maxLogProbGap only if they differ on purpose"
    )


def check_configs(trainer: Mapping[str, Any], engines: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the trainer's config.json with each engine's.

    Raises ParityError that names the differing fields and the first engine that has them.
    """
    for name, config in engines.items():
        fields = sorted((trainer.keys() | config.keys()) - set(NO_SHAPE))
        differing = [
            f"{field}: trainer {trainer.get(field)!r}, engine {config.get(field)!r}"
            for field in fields
            if trainer.get(field) != config.get(field)
        ]
        if differing:
            raise ParityError(
                f"{name} runs another model than the trainer: {'; '.join(differing)}: give both the same "
                "spec.model.path"
            )


def check_routers(agreement: float, bound: float) -> None:
    """Check the share of the engines' choices of experts that the trainer's routers make too.

    Raises ParityError if ``agreement`` is below ``bound``.
    """
    if not agreement >= bound:
        raise ParityError(
            f"the trainer's routers agree with {agreement:.3f} of the engines' choices of experts, less than "
            f"algorithm.minRouterAgreement={bound:g}: compare dtype and quantization of both"
        )
