"""The client for programs with an event loop. The calls run in threads."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Unpack

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.client.job import Job
from grpo_operator.client.samples_command import SampleOptions
from grpo_operator.client.synchronous import GRPOClient


class AsyncGRPOClient:
    """Asynchronous form of GRPOClient: the same methods, arguments and errors."""

    def __init__(
        self, namespace: str | None = None, *, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        self._client = GRPOClient(namespace, context=context, kubeconfig=kubeconfig)
        self.namespace = self._client.namespace

    async def create(
        self, name: str, spec: GRPOJobSpec | Mapping[str, Any], *, labels: Mapping[str, str] | None = None
    ) -> Job:
        return await asyncio.to_thread(self._client.create, name, spec, labels=labels)

    async def get(self, name: str) -> Job:
        return await asyncio.to_thread(self._client.get, name)

    async def jobs(self, selector: str = "") -> list[Job]:
        return await asyncio.to_thread(self._client.jobs, selector)

    async def delete(self, name: str) -> None:
        await asyncio.to_thread(self._client.delete, name)

    async def suspend(self, name: str) -> Job:
        return await asyncio.to_thread(self._client.suspend, name)

    async def resume(self, name: str, *, total_steps: int | None = None) -> Job:
        return await asyncio.to_thread(self._client.resume, name, total_steps=total_steps)

    async def fork(
        self, name: str, new: str, *, step: int | None = None, changes: Mapping[str, Any] | None = None
    ) -> Job:
        return await asyncio.to_thread(self._client.fork, name, new, step=step, changes=changes)

    async def follow(self, name: str) -> AsyncIterator[Job]:
        jobs = self._client.follow(name)
        while (job := await asyncio.to_thread(next, jobs, None)) is not None:
            yield job

    async def wait(self, name: str, phase: str = Phase.SUCCEEDED, *, seconds: float | None = None) -> Job:
        return await asyncio.to_thread(self._client.wait, name, phase, seconds=seconds)

    async def metrics(self, name: str, *, last: int | None = None) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._client.metrics, name, last=last)

    async def metrics_frame(self, name: str, *, last: int | None = None) -> Any:
        return await asyncio.to_thread(self._client.metrics_frame, name, last=last)

    async def samples(self, name: str, **options: Unpack[SampleOptions]) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._client.samples, name, **options)

    async def samples_frame(self, name: str, **options: Unpack[SampleOptions]) -> Any:
        return await asyncio.to_thread(self._client.samples_frame, name, **options)
