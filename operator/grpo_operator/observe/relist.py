"""Which objects the API server holds: when the cache is whole, and what it must forget.

A watch that had to begin anew never tells of what was deleted meanwhile, and right after the start
the watches have delivered only a part; a reconcile would write what is there already.
"""

import asyncio
from collections.abc import Sequence
from itertools import product

from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.observe.cache import Cache, Key
from grpo_operator.observe.watched_kinds import WATCHED, Watched

LOOK_SECONDS = 0.5


class Listing:
    """Compares the cache with listings of names alone."""

    def __init__(self, kube: Kube, cache: Cache, namespaces: Sequence[str] = ()) -> None:
        """``namespaces``: those that are watched; empty means all."""
        self._kube = kube
        self._cache = cache
        self._namespaces = namespaces or ("",)

    async def wait_whole(self) -> None:
        """Return once the watches have delivered everything that exists."""
        for kind in WATCHED:
            while missing := await self._names(kind) - self._cache.keys(kind.plural):
                for _ in range(10):  # an object may be deleted while we wait for it: list again
                    await asyncio.sleep(LOOK_SECONDS)
                    if not missing - self._cache.keys(kind.plural):
                        break

    async def forget_deleted(self) -> None:
        """Drop cached objects that exist no more."""
        for kind in WATCHED:
            before = self._cache.keys(kind.plural)  # what comes during the listing stays
            for key in before - await self._names(kind):
                self._cache.forget(kind.plural, key)

    async def _names(self, kind: Watched) -> set[Key]:
        namespaces = self._namespaces if kind.namespaced else ("",)
        found: set[Key] = set()
        for namespace, selector in product(namespaces, kind.selectors):
            found |= await self._kube.names(kind.path, kind.plural, namespace, selector)
        return found
