"""What a rollout produces, and the seeds that make it reproducible."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec


class UnfitEngineError(RuntimeError):
    """The engine lacks what the job needs of it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response: token ids and the engine's own log-probability of each.

    ``version``: the oldest weights that a token comes from. ``spans``: (version, end) of consecutive
    tokens, when the weights changed on the way. ``routed``: [prompt + response tokens - 1, expert
    layers, k], the experts that the engine took.
    """

    prompt_index: int
    number: int
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: int
    engine: str
    spans: tuple[tuple[int, int], ...] = ()
    routed: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def uid(self) -> str:
        return f"{self.prompt_index}.{self.number}"


def sampling_params(algorithm: AlgorithmSpec, max_tokens: int, end: Sequence[int]) -> dict[str, Any]:
    """What SGLang is asked for of every answer. ``end``: tokens that end one."""
    params: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": algorithm.temperature,
        "stop_token_ids": list(end),
    }
    if algorithm.top_p < 1:
        params["top_p"] = algorithm.top_p
    if algorithm.top_k > 0:
        params["top_k"] = algorithm.top_k
    if algorithm.min_p > 0:
        params["min_p"] = algorithm.min_p
    if algorithm.stop:
        # The tokens of the text stay in the answer: they were sampled, and are trained on.
        params |= {"stop": list(algorithm.stop), "no_stop_trim": True}
    return params


def sampling_seed(seed: int, prompt_index: int, number: int) -> int:
    """Seed of one response in [0, 2**31): the same whichever engine or attempt draws it."""
    text = f"{seed}:{prompt_index}:{number}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") >> 1
