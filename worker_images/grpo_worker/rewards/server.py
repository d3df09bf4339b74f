"""A server as a verifier."""

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import httpx

from grpo_operator.api.data import RewardSpec
from grpo_worker.rewards.base import Item, RewardError

log = logging.getLogger(__name__)
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 5.0


class HttpVerifier:
    """A server. What it does not answer is asked again until its troubles have lasted ``timeoutSeconds``."""

    def __init__(self, spec: RewardSpec) -> None:
        assert spec.url is not None
        self._url = spec.url
        self._patience = float(spec.timeout_seconds)
        self._client = httpx.Client(timeout=spec.timeout_seconds)
        self.failures = 0

    def check(self, item: Item) -> None:
        self.score([item])

    def score(self, items: Sequence[Item]) -> list[float]:
        body = {"items": [item.wire() for item in items]}
        pause = _FIRST_PAUSE
        deadline = math.inf  # set by the first failure: a slow answer before it is no trouble
        while True:
            try:
                response = self._client.post(self._url, json=body)
                response.raise_for_status()
                return _scores(response.json(), len(items))
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                problem = repr(error)
            self.failures += 1
            deadline = min(deadline, time.monotonic() + self._patience)
            if time.monotonic() + pause > deadline:
                raise RewardError(
                    f"spec.reward.url={self._url}: {problem}, for spec.reward.timeoutSeconds="
                    f"{self._patience:g} s"
                )
            log.warning("spec.reward.url=%s: %s, asking again in %g s", self._url, problem, pause)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _scores(answer: dict[str, Any], count: int) -> list[float]:
    scores = [float(score) for score in answer["scores"]]
    if len(scores) != count:
        raise ValueError(f"{len(scores)} scores for {count} items")
    for number, score in enumerate(scores):
        if not math.isfinite(score):
            raise ValueError(f"scores[{number}]={score}: give finite numbers")
    return scores
