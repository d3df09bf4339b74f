"""The loop with stand-ins for the reconcilers, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from grpo_operator.api.names import Owner
from grpo_operator.handlers.background import ERRORS
from grpo_operator.handlers.reconcile_loop import Loop
from grpo_operator.handlers.workqueue import RESYNC_SECONDS, WorkQueue
from grpo_operator.observe.cache import Cache
from support.virtual_loop import VirtualLoop


class _World:
    """A loop over jobs of which some hang. ``log``: (seconds, "start" or "end", owner)."""

    def __init__(self, *names: str) -> None:
        self.cache = Cache()
        self.now = asyncio.get_running_loop().time
        self.loop = Loop(self.cache, WorkQueue(), self.now)
        self.hang: dict[str, float] = {}  # seconds by namespace
        self.broken: set[str] = set()  # namespaces
        self.log: list[tuple[float, str, Owner]] = []
        self.admissions: list[str] = []
        self.broken_updates = 0
        self._task: asyncio.Task[None] | None = None
        for name in names:
            self.add(name)

    def add(self, name: str) -> Owner:
        """Add a job, given as NAMESPACE/NAME."""
        namespace, job = name.split("/")
        self.cache.jobs[namespace, job] = {"metadata": {"namespace": namespace, "name": job}}
        owner = Owner("GRPOJob", namespace, job)
        self.loop.enqueue([owner])
        return owner

    async def __aenter__(self) -> "_World":
        run = self.loop.run(self, {"GRPOJob": self._reconcile}, lambda: None)
        self._task = asyncio.create_task(run)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def update(self) -> None:
        if self.broken_updates:
            self.broken_updates -= 1
            raise KeyError("spec")
        self.admissions.append("update")

    def started(self, owner: Owner) -> None:
        self.admissions.append(f"started {owner.name}")

    def ended(self, owner: Owner) -> None:
        self.admissions.append(f"ended {owner.name}")

    async def _reconcile(self, job: dict[str, Any]) -> None:
        owner = Owner("GRPOJob", job["metadata"]["namespace"], job["metadata"]["name"])
        self.log.append((self.now(), "start", owner))
        await asyncio.sleep(self.hang.get(owner.namespace, 0.01))
        if owner.namespace in self.broken:
            raise ValueError("no JSON")
        self.log.append((self.now(), "end", owner))

    def starts(self, owner: Owner) -> list[float]:
        return [when for when, what, who in self.log if what == "start" and who == owner]


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def test_a_namespace_that_hangs_delays_no_other() -> None:
    async def scenario() -> None:
        world = _World(*(f"slow/{n}" for n in range(20)), "fast/a")
        world.hang["slow"] = 1e6
        async with world:
            await asyncio.sleep(100)
            fast = Owner("GRPOJob", "fast", "a")
            for _ in range(5):
                await asyncio.sleep(7.7)
                changed = world.now()
                world.loop.enqueue([fast])
                await asyncio.sleep(0.5)
                assert changed <= world.starts(fast)[-1] < changed + 0.4
        assert {who.namespace for _, what, who in world.log if what == "end"} == {"fast"}
        assert len([1 for _, _, who in world.log if who.namespace == "slow"]) == 4, "its share of places"
        assert world.loop.last_pass is not None and world.now() - world.loop.last_pass < 1.5

    _run(scenario)


def test_thirty_hanging_namespaces_delay_a_change_by_seconds_at_most() -> None:
    async def scenario() -> None:
        world = _World(*(f"slow-{n}/{m}" for n in range(30) for m in range(5)))
        world.hang = {f"slow-{n}": 1e6 for n in range(30)}
        async with world:
            fast = world.add("fast/a")
            await asyncio.sleep(5)
        assert len(world.starts(fast)) == 1

    _run(scenario)


def test_an_owner_is_reconciled_once_at_a_time_and_again_after_a_change_meanwhile() -> None:
    async def scenario() -> None:
        world = _World("ns/a")
        world.hang["ns"] = 5
        owner = Owner("GRPOJob", "ns", "a")
        async with world:
            for _ in range(40):
                await asyncio.sleep(0.1)
                world.loop.enqueue([owner])
            await asyncio.sleep(1)
            assert world.starts(owner) == [0]
            await asyncio.sleep(4)
        assert len(world.starts(owner)) == 2
        assert [what for _, what, _ in world.log] == ["start", "end", "start"]

    _run(scenario)


def test_a_burst_of_changes_is_one_reconcile_after_the_first() -> None:
    async def scenario() -> None:
        world = _World("ns/a")
        owner = Owner("GRPOJob", "ns", "a")
        async with world:
            await asyncio.sleep(2)
            before = len(world.log)
            for _ in range(20):
                world.loop.enqueue([owner])
                await asyncio.sleep(0.01)
            await asyncio.sleep(2)
        assert [what for _, what, _ in world.log[before:]] == ["start", "end"] * 2

    _run(scenario)


def test_without_changes_each_owner_is_reconciled_every_resync() -> None:
    async def scenario() -> None:
        world = _World(*(f"ns-{n}/a" for n in range(50)))
        async with world:
            await asyncio.sleep(10 * RESYNC_SECONDS)
        counts = {owner: len(world.starts(owner)) for _, _, owner in world.log}
        assert len(counts) == 50 and set(counts.values()) <= {9, 10}

    _run(scenario)


def test_an_owner_is_reconciled_only_after_an_admission_that_knows_it() -> None:
    async def scenario() -> None:
        world = _World("ns/a")
        world.hang["ns"] = 3
        async with world:
            await asyncio.sleep(1)
            world.add("ns/b")
            await asyncio.sleep(5)
        assert world.admissions == ["update", "started a", "update", "started b", "ended a", "ended b"]

    _run(scenario)


def test_an_error_of_one_owner_delays_no_other_and_is_retried() -> None:
    async def scenario() -> None:
        world = _World("bad/a", "good/a")
        world.broken.add("bad")
        bad, good = Owner("GRPOJob", "bad", "a"), Owner("GRPOJob", "good", "a")
        async with world:
            await asyncio.sleep(0.5)
            world.broken.clear()
            await asyncio.sleep(5)
        assert len(world.starts(bad)) == 2 and world.starts(bad)[1] < 2 and len(world.starts(good)) == 1

    _run(scenario)


def test_a_pass_that_fails_is_counted_and_repeated_and_starts_nothing_meanwhile() -> None:
    async def scenario() -> None:
        counter = ERRORS.labels("the reconcile loop")
        before = counter._value.get()
        world = _World("ns/a")
        world.broken_updates = 3
        async with world:
            await asyncio.sleep(6)
            assert world.starts(Owner("GRPOJob", "ns", "a")) == [] and world.loop.last_pass is None
            await asyncio.sleep(2)
        assert world.starts(Owner("GRPOJob", "ns", "a")) == [7.0], "pauses of 1, 2 and 4 seconds"
        assert counter._value.get() - before == 3

    _run(scenario)


@pytest.mark.parametrize("what", ["while it waits", "while it runs"])
def test_a_deleted_owner_is_forgotten(what: str) -> None:
    async def scenario() -> None:
        world = _World(*(f"ns/{n}" for n in range(8)))
        world.hang["ns"] = 3
        gone = Owner("GRPOJob", "ns", "7" if what == "while it waits" else "0")
        async with world:
            await asyncio.sleep(1)
            del world.cache.jobs[gone.namespace, gone.name]
            await asyncio.sleep(60)
        assert len(world.starts(gone)) == (0 if what == "while it waits" else 1)

    _run(scenario)
