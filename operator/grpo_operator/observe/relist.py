"""Compares the cache with listings of the API server.

Right after the start, the watches have delivered only some of the objects, and a reconcile from a partial
cache would apply children that already exist. Later, a watch that had to be restarted does not report the
objects that were deleted in between.
"""

import asyncio
from collections.abc import Sequence
from itertools import product

from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.observe.cache import Cache, Key
from grpo_operator.observe.watched_kinds import WATCHED, Watched

POLL_SECONDS = 0.5


class Relist:
    """Lists the names of all watched objects and compares them with the cache."""

    def __init__(self, kube: Kube, cache: Cache, namespaces: Sequence[str] = ()) -> None:
        """``namespaces``: the watched namespaces; empty means all."""
        self._kube = kube
        self._cache = cache
        self._namespaces = namespaces or ("",)

    async def wait_complete(self) -> None:
        """Wait until the watches have delivered every existing object."""
        for kind in WATCHED:
            while missing := await self._names(kind) - self._cache.keys(kind.plural):
                for _ in range(10):  # list again then: a missing object may have been deleted
                    await asyncio.sleep(POLL_SECONDS)
                    if not missing - self._cache.keys(kind.plural):
                        break

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
