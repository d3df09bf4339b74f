"""Leader election by a Lease: of several replicas of the operator, one writes.

The others watch too, so that their cache is complete when they take over. A replica looks at the Lease on
its own clock, as clients of Kubernetes do: it takes over when the Lease has not changed for LEASE_SECONDS.
A leader that could not renew for RENEW_SECONDS, which is before that, stops its work until it leads again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Protocol

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from grpo_operator.kuberay_client.kube import MERGE

log = logging.getLogger(__name__)
LEASE_SECONDS = 15.0  # without a renewal, after which another replica takes over
RENEW_SECONDS = 10.0  # without success, after which the leader gives up
RETRY_SECONDS = 2.0  # between two looks, and between two renewals
_GROUP = "apis/coordination.k8s.io/v1"
_Lease = dict[str, Any]


class LeaseApi(Protocol):
    """Calls to the API server that the election makes; see Kube."""

    async def get(self, group: str, plural: str, namespace: str, name: str) -> _Lease | None: ...

    async def create(self, group: str, plural: str, manifest: _Lease) -> _Lease: ...

    async def patch(self, group: str, plural: str, manifest: _Lease, content: str) -> _Lease: ...


def lease_name(namespaces: tuple[str, ...]) -> str:
    """Return the name of the Lease of operators that watch these namespaces; none means all."""
    scope = sha256(",".join(sorted(namespaces)).encode()).hexdigest()[:8] if namespaces else "all"
    return f"grpo-operator-{scope}"


class Leader:
    """One replica's part in the election.

    ``identity``: of this replica. Two processes never have the same at a time: a container that restarts has
    that of its pod, and takes over from itself at once.
    """

    def __init__(
        self, api: LeaseApi, namespace: str, name: str, identity: str,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._now, self._sleep = now, sleep
        self._elected, self._lost = asyncio.Event(), asyncio.Event()
        self._renewed = 0.0  # when this replica last held the Lease for certain
        self._seen: tuple[str, float] = "", 0.0  # version of the Lease, and when it was first seen

    @property
    def leads(self) -> bool:
        """Return whether this replica is the leader."""
        return self._elected.is_set()

    async def run(self) -> None:
        """Take part in the election until cancelled."""
        while True:
            leads = await self._renew()
            if leads != self.leads:
                log.info("%s is %s the leader", self._identity, "now" if leads else "no longer")
            if leads:
                self._lost.clear()
                self._elected.set()
            else:
                self._elected.clear()
                self._lost.set()
            await self._sleep(RETRY_SECONDS)

    async def while_leading(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run work whenever this replica leads; cancel it when it does so no longer.

        Returns when the work ends by itself, and raises its error.
        """
        while True:
            await self._elected.wait()
            running, lost = asyncio.ensure_future(work()), asyncio.ensure_future(self._lost.wait())
            try:
                await asyncio.wait([running, lost], return_when=asyncio.FIRST_COMPLETED)
            finally:
                lost.cancel()
                ended = running.done()
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            if ended:
                return running.result()

    async def _renew(self) -> bool:
        """Take or renew the Lease; return whether this replica leads."""
        try:
            held = await self._round()
        except (ApiException, HTTPError) as error:
            log.warning("the lease cannot be %s: %s", "renewed" if self.leads else "read", error)
            return self.leads and self._now() - self._renewed < RENEW_SECONDS
        if held:
            self._renewed = self._now()
        return held

    async def release(self) -> None:
        """Let another replica take over at once."""
        if self.leads:
            lease = await self._api.get(_GROUP, "leases", self._namespace, self._name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                await self._write(lease, holderIdentity="")

    async def _round(self) -> bool:
        """Look at the Lease, take or renew it; return whether this replica holds it."""
        lease = await self._api.get(_GROUP, "leases", self._namespace, self._name)
        if lease is None:
            return await self._create()
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = version, self._now()
        holder = lease["spec"].get("holderIdentity") or ""
        expired = self._now() - self._seen[1] >= LEASE_SECONDS
        return (holder in ("", self._identity) or expired) and await self._take(lease, holder)

    async def _take(self, lease: _Lease, holder: str) -> bool:
        mine = holder == self._identity
        transitions = int(lease["spec"].get("leaseTransitions") or 0) + (not mine)
        acquired = {} if mine else {"acquireTime": _timestamp()}
        return await self._write(
            lease, holderIdentity=self._identity, leaseTransitions=transitions, **acquired
        )

    async def _create(self) -> bool:
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "acquireTime": _timestamp(),
            "renewTime": _timestamp(),
            "leaseTransitions": 0,
        }
        manifest = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": spec,
        }
        return await _won(self._api.create(_GROUP, "leases", manifest))

    async def _write(self, lease: _Lease, **spec: Any) -> bool:
        """Change the Lease unless it has changed since it was read; return whether it was done."""
        metadata = {key: lease["metadata"][key] for key in ("name", "namespace", "resourceVersion")}
        return await _won(
            self._api.patch(
                _GROUP, "leases", {"metadata": metadata, "spec": spec | {"renewTime": _timestamp()}}, MERGE
            )
        )


async def _won(write: Coroutine[Any, Any, _Lease]) -> bool:
    try:
        await write
    except ApiException as error:
        if error.status != HTTPStatus.CONFLICT:
            raise
        return False
    return True


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
