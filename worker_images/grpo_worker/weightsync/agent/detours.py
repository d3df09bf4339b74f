"""Detours: a further host reads sources that it does not reach through the first host's agent."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from grpo_worker.weightsync.agent.http_reader import UnreachableError
from grpo_worker.weightsync.agent.relay import RELAY

log = logging.getLogger(__name__)
T = TypeVar("T")
_SECONDS = 300.0  # until a source that was cut off is tried again: trying costs the wait for a connection


class Detours:
    """Sources that are cut off from this host. ``first``: URL of the first host's agent."""

    def __init__(self, first: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._relay = f"{first}{RELAY}"
        self._clock = clock
        self._until: dict[str, float] = {}  # by base URL

    def read(
        self, sources: Mapping[int, str], call: Callable[[dict[int, str]], T]
    ) -> tuple[dict[int, str], T]:
        """Return the sources as this host reaches them, and the result of ``call`` with these.

        Raises what ``call`` does, for sources that the first host's agent does not reach either.
        """
        while True:
            reached = {rank: self._relay if self._is_cut_off(url) else url for rank, url in sources.items()}
            try:
                return reached, call(reached)
            except UnreachableError as error:
                if not error.sources & set(sources.values()):
                    raise
                log.warning("reading through the first host's agent: %s", error)
                self._until |= dict.fromkeys(error.sources, self._clock() + _SECONDS)

    def _is_cut_off(self, url: str) -> bool:
        return self._clock() < self._until.get(url, 0.0)
