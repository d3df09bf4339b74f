"""Calls in threads: lanes that hang beside lanes that do not."""

import asyncio
import threading
import time

from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.kuberay_client.lanes import Lanes


def test_calls_that_hang_in_many_lanes_delay_no_other_lane() -> None:
    async def scenario() -> None:
        lanes, release = Lanes(limit=3), threading.Event()
        entered = threading.Semaphore(0)

        def hang() -> None:
            entered.release()
            release.wait(20)

        hung = [asyncio.create_task(lanes.call(f"slow-{n % 10}", hang)) for n in range(100)]
        for _ in range(30):
            assert await asyncio.to_thread(entered.acquire, timeout=10)
        started = time.monotonic()
        assert await lanes.call("fast", lambda: 7) == 7
        assert time.monotonic() - started < 5
        assert not entered.acquire(blocking=False), "more than three calls in one lane"
        release.set()
        await asyncio.gather(*hung)
        assert len(lanes._lanes) == 0, "lanes of namespaces without calls are dropped"

    asyncio.run(scenario())


def test_each_namespace_has_its_lane() -> None:
    class _Recorded(Kube):
        def __init__(self) -> None:
            self.lanes: list[str] = []
            self._lanes = self  # type: ignore[assignment]

        async def call(self, lane: str, *_: object) -> dict[str, object]:
            self.lanes.append(lane)
            return {"metadata": {}, "items": []}

    async def scenario() -> None:
        kube = _Recorded()
        meta = {"metadata": {"name": "x", "namespace": "team-a"}}
        await kube.apply("apis/ray.io/v1", "rayclusters", meta, "/status")
        await kube.create("api/v1", "events", meta)
        await kube.delete("api/v1", "pods", "team-b", "p")
        await kube.names("api/v1", "nodes", "", "")
        assert kube.lanes == ["team-a", "team-a", "team-b", ""]

    asyncio.run(scenario())
