"""A further host that does not reach the sources of a version reads them through the first host's agent."""

import http.client
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from grpo_worker.weightsync.agent.detours import Detours
from grpo_worker.weightsync.agent.http_reader import FetchError, HttpReader, UnreachableError
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.relay import RELAY, Relay
from support.clocks import FakeClock
from support.engine_server import free_port
from support.host_world import World
from support.staged_cases import LARGE, covering, shrink

FIRST = "http://first:9000"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


class CutOff(HttpReader):
    """A reader without a way to one source. ``after``: requests that pass before the way is cut."""

    def __init__(self, source: str, after: int = 0) -> None:
        super().__init__(10)
        self._cut, self.after = urlsplit(source).netloc, after
        self.through_relay = 0

    def _request(self, url: str, host: str, path: str, fields: dict[str, str]) -> http.client.HTTPResponse:
        self.through_relay += path.startswith(RELAY)
        if host == self._cut:
            if not self.after:
                raise UnreachableError(f"{url}: ConnectionRefusedError()")
            self.after -= 1
        return super()._request(url, host, path, fields)


def cut_off(world: World, after: int = 0) -> CutOff:
    (source,) = set(world.sources.values())
    reader = CutOff(source, after)
    world.agents.further[0]._fetcher._reader = reader
    return reader


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(covering(LARGE), tmp_path, monkeypatch, relays=True)


def test_a_host_without_a_way_to_the_trainers_reads_its_part_through_the_first_host(world: World) -> None:
    reader = cut_off(world)
    for version in (1, 2):
        world.sync(version)
        world.assert_serves(version)
        first, further = world.agents.received
        assert first and further, "each host has read its own part"
    assert reader.through_relay > 2


def test_a_way_that_is_cut_during_an_update_fails_it_and_the_next_one_goes_another_way(world: World) -> None:
    reader = cut_off(world, after=len(world.sources))
    with pytest.raises(UpdateError, match=r"host 1 .*ConnectionRefused"):
        world.sync(1)
    world.assert_stale()
    assert not reader.through_relay
    world.sync(1)
    world.assert_serves(1)
    assert reader.through_relay


def test_sources_that_nobody_reaches_are_named(world: World) -> None:
    cut_off(world)
    world.sync(1)
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UpdateError, match=f"{nobody}/v1/weights/2/0.json: ConnectionRefusedError"):
        world.agents.sync(2, dict.fromkeys(world.sources, nobody))


def test_nothing_but_the_version_that_is_loaded_passes_the_relay() -> None:
    relay = Relay()
    with relay.of(7, {3: "http://trainer:9000"}):
        assert relay.url(7, 3, "bin") == "http://trainer:9000/v1/weights/7/3.bin"
        for version, rank in ((6, 3), (7, 2)):
            with pytest.raises(LookupError, match=f"does not load rank {rank} of version {version} now"):
                relay.url(version, rank, "bin")
    with pytest.raises(LookupError):
        relay.url(7, 3, "bin")


def test_the_first_host_refuses_files_that_it_does_not_load(world: World) -> None:
    world.sync(1)
    answer = httpx.get(f"{world.agents.url}{RELAY}/v1/weights/1/0.bin")
    assert (answer.status_code, answer.json()["error"]) == (
        409, "the engine does not load rank 0 of version 1 now"
    )  # fmt: skip


def test_a_source_is_tried_again_after_five_minutes() -> None:
    clock, lost, asked = FakeClock(), {"http://a"}, list[dict[int, str]]()
    detours = Detours(FIRST, clock.now)

    def call(sources: Mapping[int, str]) -> str:
        asked.append(dict(sources))
        if gone := lost & set(sources.values()):
            raise UnreachableError("no route", gone)
        return "read"

    sources = {0: "http://a", 1: "http://b"}
    relayed = {0: f"{FIRST}{RELAY}", 1: "http://b"}
    assert detours.read(sources, call) == (relayed, "read") and asked == [sources, relayed]
    clock.sleep(299)
    assert detours.read(sources, call)[0] == relayed and len(asked) == 3, "it is not tried again"
    lost.clear()
    clock.sleep(2)
    assert detours.read(sources, call)[0] == sources


def test_a_first_host_that_does_not_answer_ends_the_reading() -> None:
    def call(sources: Mapping[int, str]) -> str:
        raise UnreachableError("no route", set(sources.values()))

    with pytest.raises(FetchError, match="no route"):
        Detours(FIRST).read({0: "http://a"}, call)
