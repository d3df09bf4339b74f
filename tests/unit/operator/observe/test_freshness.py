"""The proofs that the cache is up to date, beside an API server that can fail."""

import asyncio
from typing import Any

import pytest
from kubernetes.client import ApiException

from grpo_operator.observe.cache import Cache
from grpo_operator.observe.freshness import CHECK_SECONDS, Freshness
from support.clocks import FakeClock

Versions = dict[tuple[str, str], str]


class _Server:
    """Versions by kind, or the error with which the listing of a kind is answered."""

    def __init__(self) -> None:
        self.objects: dict[str, Versions] = {}
        self.errors: dict[str, Exception] = {}
        self.asked: list[tuple[str, str]] = []

    async def versions(self, group: str, plural: str, namespace: str, selector: str) -> Versions:
        self.asked.append((plural, namespace))
        if plural in self.errors:
            raise self.errors[plural]
        found = self.objects.get(plural, {})
        return {key: version for key, version in found.items() if namespace in ("", key[0])}


class _World:
    def __init__(self, namespaces: tuple[str, ...] = ()) -> None:
        self.clock, self.cache, self.server = FakeClock(), Cache(), _Server()
        self.freshness = Freshness(self.server, self.cache, namespaces, self.clock.now)

    def event(self, plural: str, name: str, version: str, namespace: str = "default") -> None:
        meta: dict[str, Any] = {"name": name, "namespace": namespace, "resourceVersion": version, "uid": name}
        obj = {"metadata": meta, "spec": {}}
        self.cache.store(plural, {"type": "MODIFIED", "object": obj})
        self.freshness.seen(plural, obj)

    def check(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.sleep(CHECK_SECONDS)
            asyncio.run(self.freshness.check())


def test_quiet_kinds_stay_fresh_by_listings_that_agree() -> None:
    world = _World()
    world.event("grpojobs", "a", "5")
    world.server.objects["grpojobs"] = {("default", "a"): "5"}
    world.check(100)
    assert max(world.freshness.ages().values()) == 0 and world.freshness.problems() == {}


def test_a_kind_with_events_is_not_listed() -> None:
    world = _World()
    world.clock.sleep(CHECK_SECONDS)
    world.event("pods", "p", "1")
    asyncio.run(world.freshness.check())
    assert "pods" not in {plural for plural, _ in world.server.asked}
    assert world.freshness.ages()["pods"] == 0


@pytest.mark.parametrize("cached", ["", "4"], ids=["never delivered", "an old version"])
def test_a_watch_that_delivers_nothing_is_named(cached: str) -> None:
    world = _World()
    if cached:
        world.event("rayclusters", "a", cached)
    world.server.objects["rayclusters"] = {("default", "a"): "5"}
    world.check(1)
    assert world.freshness.problems() == {}, "the event may be on its way"
    world.check(3)
    problem = world.freshness.problems()["rayclusters"]
    assert problem.silent and "rayclusters" in problem.text and "default/a" in problem.text
    assert world.freshness.ages()["rayclusters"] == 4 * CHECK_SECONDS
    assert world.freshness.ages()["pods"] == 0
    world.event("rayclusters", "a", "5")
    assert world.freshness.problems() == {} and world.freshness.ages()["rayclusters"] == 0


def test_a_watch_that_lags_behind_a_busy_object_is_no_problem() -> None:
    world = _World()
    for version in range(10):
        world.cache.store(
            "nodes",
            {"type": "MODIFIED", "object": {"metadata": {"name": "n", "resourceVersion": str(version)}}},
        )
        world.server.objects["nodes"] = {("", "n"): str(version + 1)}
        world.check()
        assert world.freshness.problems() == {}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ApiException(403, "configmaps is forbidden"), "configmaps cannot be listed: 403 configmaps is forb"),
        (ValueError("Expecting value"), "configmaps cannot be listed: Expecting value"),
    ],
)
def test_a_kind_that_cannot_be_listed_is_named_and_no_other(error: Exception, text: str) -> None:
    world = _World()
    world.server.errors["configmaps"] = error
    world.check(5)
    problems = world.freshness.problems()
    assert problems.keys() == {"configmaps"} and problems["configmaps"].text.startswith(text)
    assert not problems["configmaps"].silent
    assert world.freshness.ages()["configmaps"] == 5 * CHECK_SECONDS
    assert world.freshness.ages()["services"] == 0
    del world.server.errors["configmaps"]
    world.check()
    assert world.freshness.problems() == {}


def test_each_watched_namespace_has_its_own_proof() -> None:
    world = _World(("a", "b"))
    world.server.objects["pods"] = {("b", "p"): "1"}
    for _ in range(4):
        world.event("pods", "q", "1", namespace="a")
        world.check()
    assert "b/p" in world.freshness.problems()["pods"].text
    assert world.freshness.ages()["pods"] == 4 * CHECK_SECONDS
    assert {namespace for plural, namespace in world.server.asked if plural == "nodes"} == {""}
