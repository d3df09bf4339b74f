"""HTTP calls to the job's own pods: the controller's report and the agents' states."""

import asyncio
import contextlib
from typing import Any

import aiohttp

from grpo_operator.api import names
from grpo_operator.api.names import AGENT_PORT, CONTROLLER_PORT
from grpo_operator.apply.agent_secret import AgentSecrets
from grpo_operator.plan.observed import first_hosts, of_pool

_TIMEOUT = aiohttp.ClientTimeout(total=3)


class PodClient:
    """Asks pods by address. A pod that does not answer yields None: it is starting or gone."""

    def __init__(self, keys: AgentSecrets) -> None:
        self._keys = keys
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)

    async def progress(self, pods: tuple[dict[str, Any], ...]) -> dict[str, Any] | None:
        """The controller's status, or None."""
        for pod in of_pool(pods, names.CONTROLLER):
            report = await self._get(pod, CONTROLLER_PORT, "/v1/status")
            if report is not None:
                return report
        return None

    async def agents(self, pods: tuple[dict[str, Any], ...]) -> dict[str, dict[str, Any]]:
        """Status of every engine's agent that answers, by pod name."""
        rollout = first_hosts(of_pool(pods, names.ROLLOUT))
        answers = await asyncio.gather(*(self._get(p, AGENT_PORT, "/v1/status") for p in rollout))
        return {p["metadata"]["name"]: a for p, a in zip(rollout, answers, strict=True) if a}

    async def set_writer(self, pod: dict[str, Any], writer: str) -> None:
        """Tell an engine's agent from which job it takes weights."""
        await self._post(pod, AGENT_PORT, "/v1/writer", {"writer": writer})

    async def request_suspend(self, pods: tuple[dict[str, Any], ...], wanted: bool) -> None:
        """Tell the controller to save a checkpoint and stop, or to go on."""
        for pod in of_pool(pods, names.CONTROLLER):
            await self._post(pod, CONTROLLER_PORT, "/v1/suspend", {"suspend": wanted})

    async def _post(self, pod: dict[str, Any], port: int, path: str, body: dict[str, Any]) -> None:
        """A pod that does not answer is asked again at the next look."""
        address = _address(pod)
        if not address:
            return
        headers = {"authorization": f"Bearer {await self._keys.of(pod['metadata']['namespace'])}"}
        url = f"http://{address}:{port}{path}"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(url, json=body, headers=headers):
                pass

    async def _get(self, pod: dict[str, Any], port: int, path: str) -> dict[str, Any] | None:
        address = _address(pod)
        if not address:
            return None
        try:
            async with self._session.get(f"http://{address}:{port}{path}") as reply:
                data: dict[str, Any] = await reply.json()
                return data
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def close(self) -> None:
        await self._session.close()


def _address(pod: dict[str, Any]) -> str | None:
    address = pod.get("status", {}).get("podIP")
    return str(address) if address else None
