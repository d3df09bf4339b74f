"""HTTP client of a job's own pods: the controller's status and the agents' statuses."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import aiohttp
from kubernetes.client import ApiException
from pydantic import ValidationError

from grpo_operator.api import names
from grpo_operator.api.gpu_messages import GpuReport
from grpo_operator.api.messages import AgentStatus, ControllerStatus, Message, ProfileOrder
from grpo_operator.api.names import AGENT_PORT, CONTROLLER_PORT, TLS_LABEL, Owner, owner_in_labels
from grpo_operator.api.urls import pod_url
from grpo_operator.plan.observed import first_hosts, of_pool, pod_name

log = logging.getLogger(__name__)
_TIMEOUT = aiohttp.ClientTimeout(total=3)
_LARGEST = 4 << 20  # bytes of a status; that of thousands of processes and engines has less than one MiB
_Status = TypeVar("_Status", bound=Message)


class TooLargeError(ValueError):
    """An answer that no pod of a job sends; it is not read to its end."""


class _Server(NamedTuple):
    """``verify``: options of a request."""

    url: str
    verify: dict[str, Any] = {}


class Controllers(NamedTuple):
    """Answers of a job's controllers. ``status``: of the one with the newest attempt, None if none answers.
    ``superseded``: names of the pods whose controller knows that another one has taken over.
    """

    status: ControllerStatus | None = None
    superseded: frozenset[str] = frozenset()


Context = Callable[[Owner], Awaitable[ssl.SSLContext | None]]


class PodClient:
    """Calls pods by their IP address. A pod that does not answer yields None: it is starting or gone.

    ``token``: of the pods' owner; only orders need it. ``context``: returns what verifies the certificates of
    an owner's pods; None: the owner is gone.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)

    async def controllers(self, pods: tuple[dict[str, Any], ...]) -> Controllers:
        """Return what the job's controllers answer. While a node is cut off, the job may have two."""
        asked = of_pool(pods, names.CONTROLLER)
        statuses = await asyncio.gather(*(self._status(p, CONTROLLER_PORT, ControllerStatus) for p in asked))
        answers = {pod_name(p): status for p, status in zip(asked, statuses, strict=True) if status}
        own = [status for status in answers.values() if not status.superseded]
        superseded = frozenset(name for name, status in answers.items() if status.superseded)
        return Controllers(max(own, key=lambda status: status.attempt, default=None), superseded)

    async def agents(self, pods: tuple[dict[str, Any], ...]) -> dict[str, AgentStatus]:
        """Return the status of every engine's agent that answers, by pod name."""
        rollout = first_hosts(of_pool(pods, names.ROLLOUT))
        statuses = await asyncio.gather(*(self._status(pod, AGENT_PORT, AgentStatus) for pod in rollout))
        pairs = zip(rollout, statuses, strict=True)
        return {pod_name(pod): status for pod, status in pairs if status is not None}

    async def gpus(self, pod: dict[str, Any]) -> GpuReport | None:
        """Return what the agent of a pod finds of its node's GPUs, or None when it does not answer."""
        return await self._status(pod, AGENT_PORT, GpuReport, "/v1/gpus")

    async def set_writer(self, pod: dict[str, Any], writer: str, token: str) -> None:
        """Set the job from which an engine's agent accepts weights."""
        await self._post(pod, AGENT_PORT, "/v1/writer", {"writer": writer}, token)

    async def order(
        self, pods: tuple[dict[str, Any], ...], suspend: bool | None, profiles: Sequence[ProfileOrder],
        forget: str | None, token: str,
    ) -> None:  # fmt: skip
        """Send orders to the controller, which ignores requests for profiles that it has.

        ``suspend``: whether it shall save a checkpoint and stop, or resume; None: it goes on as it does.
        ``forget``: request to forget on which nodes ranks have failed, or None.
        """
        for pod in of_pool(pods, names.CONTROLLER):
            if suspend is not None:
                await self._post(pod, CONTROLLER_PORT, "/v1/suspend", {"suspend": suspend}, token)
            if profiles:
                body = {"orders": [order.wire() for order in profiles]}
                await self._post(pod, CONTROLLER_PORT, "/v1/profile", body, token)
            if forget is not None:
                await self._post(pod, CONTROLLER_PORT, "/v1/forget-nodes", {"request": forget}, token)

    async def _post(
        self, pod: dict[str, Any], port: int, path: str, body: dict[str, Any], token: str
    ) -> None:
        """Send a request. The next reconcile sends it again if it had no effect."""
        server = await self._server(pod, port)
        if server is None:
            return
        headers = {"authorization": f"Bearer {token}"}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(
                server.url + path, json=body, headers=headers, **server.verify
            ) as reply:
                if reply.status == HTTPStatus.UNAUTHORIZED:
                    log.warning("pod %s refuses %s: it has another key; start it again", pod_name(pod), path)

    async def _status(
        self, pod: dict[str, Any], port: int, model: type[_Status], path: str = "/v1/status"
    ) -> _Status | None:
        server = await self._server(pod, port)
        if server is None:
            return None
        try:
            async with self._session.get(server.url + path, **server.verify) as reply:
                if reply.status not in (HTTPStatus.OK, HTTPStatus.GONE):
                    return None
                return model.model_validate_json(await _bounded(reply.content))
        except (aiohttp.ClientError, TimeoutError):
            return None
        except (ValidationError, TooLargeError) as error:
            log.warning("pod %s sent a status that cannot be parsed: %s", pod_name(pod), error)
            return None

    async def _server(self, pod: dict[str, Any], port: int) -> _Server | None:
        """Return a server of a pod; None if the pod has no address yet, or cannot be verified."""
        address, owner = pod.get("status", {}).get("podIP"), owner_in_labels(pod)
        if not address:
            return None
        if TLS_LABEL not in pod["metadata"].get("labels", {}):
            return _Server(pod_url(address, port))
        try:
            context = await self._context(owner) if owner else None
        except (ApiException, ssl.SSLError) as error:
            log.warning("the certificate of pod %s cannot be verified: %s", pod_name(pod), error)
            return None
        if owner is None or context is None:
            return None
        return _Server(pod_url(address, port, tls=True), {"ssl": context, "server_hostname": owner.tls_name})

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    """Return the whole content. Raises TooLargeError."""
    try:
        await content.readexactly(_LARGEST + 1)
    except asyncio.IncompleteReadError as end:
        return end.partial
    raise TooLargeError(f"it has more than {_LARGEST} bytes")
