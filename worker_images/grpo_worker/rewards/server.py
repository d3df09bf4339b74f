"""Verifier that calls a reward server."""

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.rewards.base import Item, RewardError

log = logging.getLogger(__name__)
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 5.0


class HttpVerifier:
    """Verifier that calls a server and retries until failures have lasted ``timeoutSeconds``.

    It raises ConnectionError then if the server is away, and RewardError if it refuses the request or answers
    without scores.

    Raises ValueError for an invalid URL.
    """

    reads_answers = True
    needs_groups = True  # a server may compare the answers to a prompt

    def __init__(self, spec: RewardSpec) -> None:
        assert spec.url is not None
        self._name = f"spec.reward.url={spec.url}"
        try:
            self._url = httpx.URL(spec.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{self._name}: {error}: give http://host:port/path") from error
        self._patience = float(spec.timeout_seconds)
        self._client = httpx.Client(timeout=spec.timeout_seconds)
        self._counting = threading.Lock()
        self.failures = 0

    def check(self, item: Item) -> None:
        """Judge one answer. Raises ConnectionError at once while the server is away; the caller waits."""
        self._judge([item], waits=False)

    def score(self, items: Sequence[Item]) -> list[float]:
        """Return one reward per item; wait for a server that is away."""
        return self._judge(items, waits=True)

    def _judge(self, items: Sequence[Item], waits: bool) -> list[float]:
        body = {"items": [item.wire() for item in items]}
        pause = _FIRST_PAUSE
        deadline = math.inf  # set by the first failure, so that a slow but successful answer is accepted
        while True:
            try:
                response = self._client.post(self._url, json=body)
                response.raise_for_status()
                return _scores(response.json(), len(items))
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                problem = error
            with self._counting:
                self.failures += 1
            away = _is_away(problem)
            deadline = min(deadline, time.monotonic() + self._patience)
            if time.monotonic() + pause > deadline or (away and not waits):
                raise self._unreachable(problem) if away else self._invalid(problem)
            log.warning("%s: %r, retrying in %g s", self._name, problem, pause)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _unreachable(self, problem: Exception) -> ConnectionError:
        remedy = "start the server, or correct the address"
        if isinstance(problem, httpx.HTTPStatusError):
            remedy = "look for the reason in the log of the server, or of the proxy before it"
        if isinstance(problem, httpx.TimeoutException):
            remedy = f"speed the server up, or raise spec.reward.timeoutSeconds={self._patience:g}"
        return ConnectionError(f"{self._name}: {problem!r}: {remedy}")

    def _invalid(self, problem: Exception) -> RewardError:
        return RewardError(
            f"{self._name}: {problem!r}, for spec.reward.timeoutSeconds={self._patience:g} s: answer with "
            "{scores: [...]}, one finite number for each item"
        )


def _is_away(problem: Exception) -> bool:
    """Return whether the server is unreachable, fails or has no room, rather than answering wrongly.

    Its failure may be a lack of memory, a lost database, or a proxy's word for a server that is down. Other
    statuses mean that the request is wrong, which waiting does not change.
    """
    if isinstance(problem, httpx.HTTPStatusError):
        response = problem.response
        return response.is_server_error or response.status_code == httpx.codes.TOO_MANY_REQUESTS
    return isinstance(problem, httpx.TransportError)


def _scores(answer: dict[str, Any], count: int) -> list[float]:
    scores = [float(score) for score in answer["scores"]]
    if len(scores) != count:
        raise ValueError(f"{len(scores)} scores for {count} items")
    for number, score in enumerate(scores):
        if not math.isfinite(score):
            raise ValueError(f"scores[{number}]={score}: give finite numbers")
    return scores
