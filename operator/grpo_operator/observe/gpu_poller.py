"""Asks the agents of all pods with GPUs what is wrong with them."""

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from grpo_operator.api.gpu_messages import GpuReport

CONCURRENCY = 64  # agents asked at once; one that does not answer costs 3 s


class GpuClient(Protocol):
    """Part of the pod client that the poller uses."""

    async def gpus(self, pod: dict[str, Any]) -> GpuReport | None: ...


async def gpu_reports(
    client: GpuClient, pods: Iterable[dict[str, Any]]
) -> list[tuple[dict[str, Any], GpuReport]]:
    """Return the pods whose agent answers and reads GPUs, each with its report."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def ask(pod: dict[str, Any]) -> GpuReport | None:
        async with slots:
            return await client.gpus(pod)

    asked = [pod for pod in pods if pod["spec"].get("gpus") and not pod["metadata"].get("deletionTimestamp")]
    reports = await asyncio.gather(*(ask(pod) for pod in asked))
    return [(pod, r) for pod, r in zip(asked, reports, strict=True) if r is not None and r.gpus]
