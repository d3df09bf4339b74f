"""Knows for each watched kind how long ago the cache was last proved to agree with the API server.

A watch event is such a proof, but quiet kinds have none for hours. For them the first page of a listing is
compared with the cache: an object that has one version there and keeps another one here is not delivered.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from grpo_operator.observe.cache import Cache, Key
from grpo_operator.observe.watched_kinds import WATCHED, Watched

CHECK_SECONDS = 30.0  # age at which a kind is listed, and pause between two listings
_Scope = tuple[str, str]  # plural, watched namespace or ""


class Lister(Protocol):
    """Part of the API client that is used here."""

    async def versions(
        self, group: str, plural: str, namespace: str, selector: str
    ) -> dict[tuple[str, str], str]: ...


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a kind is not fresh. ``silent``: it can be listed, but its watch delivers nothing."""

    text: str
    silent: bool


class Freshness:
    """Ages of the kinds in the cache. ``namespaces``: the watched namespaces; empty means all."""

    def __init__(
        self, kube: Lister, cache: Cache, namespaces: Sequence[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._kube, self._cache, self._now = kube, cache, now
        self._namespaces = tuple(namespaces)
        scopes = [(kind, name) for kind in WATCHED for name in self._names(kind)]
        self._kinds: dict[_Scope, Watched] = {(kind.plural, name): kind for kind, name in scopes}
        self._proved = dict.fromkeys(self._kinds, now())
        self._behind: dict[_Scope, dict[Key, str | None]] = {}  # versions in the cache at the last check
        self._problems: dict[_Scope, Problem] = {}

    def seen(self, plural: str, obj: dict[str, Any]) -> None:
        """Note a watch event."""
        namespace = obj["metadata"].get("namespace", "") if self._namespaces else ""
        self._prove((plural, namespace), self._now())

    def ages(self) -> dict[str, float]:
        """Return the seconds since the last proof by kind."""
        now, ages = self._now(), dict.fromkeys((kind.plural for kind in WATCHED), 0.0)
        for (plural, _), proved in self._proved.items():
            ages[plural] = max(ages[plural], now - proved)
        return ages

    def problems(self) -> dict[str, Problem]:
        """Return why kinds are not fresh by kind; a kind without a known reason is left out."""
        return {plural: problem for (plural, _), problem in list(self._problems.items())}

    async def check(self) -> None:
        """Compare every kind that had no event lately with the API server."""
        now = self._now()
        due = [scope for scope, proved in self._proved.items() if now - proved >= CHECK_SECONDS]
        await asyncio.gather(*(self._check(scope) for scope in due))

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()

    async def _check(self, scope: _Scope) -> None:
        kind, namespace = self._kinds[scope], scope[1]
        started = self._now()
        listed: dict[Key, str] = {}
        try:
            for selector in kind.selectors:
                listed |= await self._kube.versions(kind.path, kind.plural, namespace, selector)
        except (ApiException, HTTPError, ValueError, KeyError) as error:  # a proxy may answer no JSON
            reason = f"{error.status} {error.reason}" if isinstance(error, ApiException) else str(error)
            self._problems[scope] = Problem(f"{kind.plural} cannot be listed: {reason}", silent=False)
            return
        versions = {key: self._cache.version(kind.plural, key) for key in listed}
        behind = {key: versions[key] for key, version in listed.items() if versions[key] != version}
        before = self._behind.get(scope, {})
        stuck = [key for key, version in behind.items() if key in before and before[key] == version]
        self._behind[scope] = behind
        if stuck:
            first = "/".join(filter(None, min(stuck)))
            text = f"the watch of {kind.plural} does not deliver {len(stuck)} listed objects, first {first}"
            self._problems[scope] = Problem(text, silent=True)
        elif not behind:
            self._prove(scope, started)

    def _prove(self, scope: _Scope, when: float) -> None:
        if scope in self._proved:
            self._proved[scope] = max(when, self._proved[scope])
            self._problems.pop(scope, None)

    def _names(self, kind: Watched) -> tuple[str, ...]:
        return self._namespaces if kind.namespaced and self._namespaces else ("",)
