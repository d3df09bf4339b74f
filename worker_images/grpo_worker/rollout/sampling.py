"""Samples, and the parameters and seeds that make them reproducible."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.validation import ValidationSpec
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import RoutedExperts


class UnfitEngineError(RuntimeError):
    """An engine cannot do what the job needs, and a retry would not help."""


class PromptRefusedError(UnfitEngineError):
    """Engines refuse the requests of one prompt; it is dropped if others are accepted."""

    def __init__(self, prompt: Prompt, message: str) -> None:
        super().__init__(message)
        self.prompt = prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """One response: token ids and the engine's own log-probability of each, in arrays of 4 bytes a token.

    ``version``: oldest weight version that generated one of the tokens. ``spans``: (version, end) of
    consecutive tokens, if the weights changed during generation. ``routed``: reference to the experts that
    the engine chose.
    """

    prompt_index: int
    number: int
    ids: Sequence[int]
    log_probs: Sequence[float]
    version: int
    engine: str
    spans: tuple[tuple[int, int], ...] = ()
    routed: RoutedExperts | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Store ids as int32 and log-probabilities as float32: Python's numbers take eight times as much."""
        object.__setattr__(self, "ids", array("i", self.ids))
        object.__setattr__(self, "log_probs", array("f", self.log_probs))

    @property
    def uid(self) -> str:
        """Identifier of the sample within the job, ``PROMPT.NUMBER``."""
        return f"{self.prompt_index}.{self.number}"


def sampling_params(algorithm: AlgorithmSpec, max_tokens: int, end: Sequence[int]) -> dict[str, Any]:
    """Return SGLang's ``sampling_params``. ``end``: ids of tokens that end a response."""
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
        # The tokens of a stop text stay in the response: they were sampled and are trained on.
        params |= {"stop": list(algorithm.stop), "no_stop_trim": True}
    return params


def validation_params(
    algorithm: AlgorithmSpec, validation: ValidationSpec, max_tokens: int, end: Sequence[int]
) -> dict[str, Any]:
    """Return the parameters of a validation: those of the job, with a temperature and a length of its own."""
    params = sampling_params(algorithm, validation.response_length or max_tokens, end)
    params["temperature"] = validation.temperature
    if validation.temperature == 0:
        for name in ("top_p", "top_k", "min_p"):
            params.pop(name, None)
    return params


def sampling_seed(seed: int, prompt_index: int, number: int) -> int:
    """Return the seed of one response in [0, 2**31), the same on every engine and in every attempt."""
    text = f"{seed}:{prompt_index}:{number}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") >> 1
