"""An agent or a source of one host that fails ends the update of the whole engine."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_worker.weightsync.agent import further_parts
from grpo_worker.weightsync.agent.host_part import HostPart
from grpo_worker.weightsync.agent.http_reader import HttpReader
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.part_messages import (
    PartPhase,
    PartRequest,
)
from grpo_worker.weightsync.agent.part_source import PartSource
from grpo_worker.weightsync.trainer.publisher import publish
from support.engine_server import serve
from support.host_world import World
from support.staged_cases import (
    LARGE,
    TRAINERS,
    covering,
    cut,
    shrink,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """An engine that serves version 1."""
    return World.serving(tmp_path, monkeypatch)


def test_an_agent_that_is_away_before_an_update_leaves_the_engine_serving(world: World) -> None:
    world.agents.report(1, "http://127.0.0.1:9")
    with pytest.raises(UpdateError, match=r"version 2, plan: host 1 \(http.*:9\): ConnectError"):
        world.sync(2)
    assert world.engine.calls == []
    world.assert_serves(1)
    world.agents.report(1, world.agents.further[0].url)
    world.sync(2)
    world.assert_serves(2)


def before_chunk(patch: pytest.MonkeyPatch, number: int, call: Callable[[HostPart], None]) -> list[int]:
    """Call ``call`` before a further host sends the chunk of that number; return the chunks."""
    sent: list[int] = []
    original = HostPart._check

    def check(self: HostPart) -> None:
        if self._state.phase == PartPhase.STREAM:
            sent.append(len(sent))
            if len(sent) == number:
                call(self)
        original(self)

    patch.setattr(HostPart, "_check", check)
    return sent


def test_an_agent_that_loses_its_part_in_the_middle_aborts_the_whole_update(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        sent = before_chunk(patch, 2, HostPart.close)
        with pytest.raises(
            UpdateError, match=r"version 2, transfer, .*host 1 \(http.*\): the update has ended"
        ):
            world.sync(2)
    assert len(sent) == 2
    world.assert_stale()
    world.sync(2)
    world.assert_serves(2)


def test_an_agent_that_restarts_in_the_middle_aborts_the_whole_update(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is back knows nothing of the part; the ranks' connections are closed."""

    def restart(part: HostPart) -> None:
        world.agents.further[0].parts._current = None
        part.close()

    with monkeypatch.context() as patch:
        sent = before_chunk(patch, 2, restart)
        with pytest.raises(UpdateError, match=r"host 1 .*(has restarted|has ended)"):
            world.sync(2)
    assert len(sent) == 2
    world.assert_stale()
    world.sync(2)
    world.assert_serves(2)


def test_a_source_that_fails_for_one_host_only_aborts_the_whole_update(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is named, and the ranks of the others do not wait for the rest of their bytes."""
    original, lost = HttpReader.get, list[str]()
    further = world.agents.further[0]._fetcher._reader

    def get(self: HttpReader, url: str, part: Any = None) -> Any:
        if self is further and part is not None and "begin" in world.engine.calls:
            lost.append(url)
            return original(self, "http://127.0.0.1:9/gone", part)
        return original(self, url, part)

    with monkeypatch.context() as patch:
        patch.setattr(HttpReader, "get", get)
        with pytest.raises(UpdateError, match=r"host 1 \(http.*\): http.*:9/gone: ConnectionRefused"):
            world.sync(2)
    assert lost
    world.assert_stale()
    world.sync(2)
    world.assert_serves(2)


def test_a_first_host_that_fails_ends_the_parts_of_the_others_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, first = HttpReader.get, world.agents.first._fetcher._reader

    def get(self: HttpReader, url: str, part: Any = None) -> Any:
        if self is first and part is not None and "begin" in world.engine.calls:
            url = "http://127.0.0.1:9/gone"
        return original(self, url, part)

    started = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(HttpReader, "get", get)
        with pytest.raises(UpdateError, match=":9/gone"):
            world.sync(2)
    assert time.monotonic() - started < 8, "a part waited for its limit of 10 s"
    world.assert_stale()
    world.sync(2)
    world.assert_serves(2)


def test_a_part_whose_leader_is_gone_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks then give up, instead of waiting for the leader's word."""
    made = World(covering(LARGE), tmp_path, monkeypatch, timeout=1)
    original, asked = further_parts._Part.look, threading.Event()

    def look(self: Any, *limit: Any) -> None:
        if self.state.phase.reached(PartPhase.READY):
            asked.set()  # and is never asked again, as by an agent that was killed
            return
        original(self, *limit)

    with monkeypatch.context() as patch:
        patch.setattr(further_parts._Part, "look", look)
        with pytest.raises(UpdateError):
            made.sync(1)
    assert asked.is_set()
    part = made.agents.further[0].parts._current
    assert part is not None
    part.join()
    assert part.state().phase == PartPhase.FAILED
    made.assert_stale()
    made.sync(1)
    made.assert_serves(1)


def test_other_bytes_that_were_published_between_two_hosts_readings_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers that start again from a checkpoint may publish the same version with other bytes."""
    for rank, parts in enumerate(cut(world.case, 3)):
        publish(world.root / "other", 2, rank, TRAINERS, parts)
    others, original, opened = serve(world.root / "other", TRAINERS), PartSource.open, list[int]()

    def open_others(self: PartSource, request: PartRequest, cancelled: Any) -> Any:
        opened.append(request.version)
        return original(self, replace(request, sources=others), cancelled)

    with monkeypatch.context() as patch:
        patch.setattr(PartSource, "open", open_others)
        with pytest.raises(UpdateError, match=r"version 2, plan: host 1 .*published other bytes"):
            world.sync(2)
    assert opened == [2] and world.engine.calls == []
    world.assert_serves(1)


def test_an_agent_that_has_not_reported_yet_leaves_the_engine_serving(world: World) -> None:
    del world.agents.rendezvous._seen[1]
    with pytest.raises(UpdateError, match="version 2, plan: host 1 of 2 has not reported yet"):
        world.sync(2)
    world.assert_serves(1)


def test_a_new_part_waits_until_the_memory_of_the_one_before_is_free(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that leads and is restarted begins another part while the old one still reads."""
    running, most = list[int](), list[int]()
    original = HostPart._load

    def load(self: HostPart) -> None:
        running.append(1)
        most.append(len(running))
        try:
            original(self)
        finally:
            running.pop()

    with monkeypatch.context() as patch:
        patch.setattr(HostPart, "_load", load)
        for version in (2, 1, 2):
            world.sync(version)
            world.assert_serves(version)
    assert len(most) == 3 and set(most) == {1}
