"""Compares the cache with listings of the API server.

Right after the start, the watches have delivered only some of the objects, and a reconcile from a partial
cache would apply children that already exist. Later, a watch that had to be restarted does not report the
objects that were deleted in between.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import product

from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.observe.cache import Cache, Key
from grpo_operator.observe.watched_kinds import WATCHED, Watched

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
WARN_SECONDS = 60.0


class Relist:
    """Lists the names of all watched objects and compares them with the cache."""

    def __init__(self, kube: Kube, cache: Cache, namespaces: Sequence[str] = ()) -> None:
        """``namespaces``: the watched namespaces; empty means all."""
        self._kube = kube
        self._cache = cache
        self._namespaces = namespaces or ("",)
        self.waiting_for = ""  # the kind that wait_complete waits for

    async def wait_complete(self) -> None:
        """Wait until the watches have delivered every existing object; ``waiting_for`` says which not."""
        for kind in WATCHED:
            self.waiting_for, warn_at = kind.plural, time.monotonic() + WARN_SECONDS
            while missing := await self._names(kind) - self._cache.keys(kind.plural):
                self.waiting_for = (
                    f"{len(missing)} {kind.plural}, first {'/'.join(filter(None, min(missing)))}"
                )
                if time.monotonic() >= warn_at:
                    log.warning("the watches have not delivered %s", self.waiting_for)
                    warn_at += WARN_SECONDS
                for _ in range(10):  # list again then: a missing object may have been deleted
                    await asyncio.sleep(POLL_SECONDS)
                    if not missing - self._cache.keys(kind.plural):
                        break
        self.waiting_for = ""

    async def forget_deleted(self) -> None:
        """Drop cached objects that no longer exist."""
        for kind in WATCHED:
            before = self._cache.keys(
                kind.plural
            )  # read first, so that objects created during the listing stay
            for key in before - await self._names(kind):
                self._cache.forget(kind.plural, key)

    async def _names(self, kind: Watched) -> set[Key]:
        namespaces = self._namespaces if kind.namespaced else ("",)
        keys: set[Key] = set()
        for namespace, selector in product(namespaces, kind.selectors):
            keys |= await self._kube.names(kind.path, kind.plural, namespace, selector)
        return keys
