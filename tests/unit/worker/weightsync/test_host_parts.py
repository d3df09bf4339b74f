"""An engine of several hosts loads a version in one transaction; each pod's agent reads only its part."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_worker.weightsync.agent import further_parts
from grpo_worker.weightsync.agent.host_part import HostPart
from grpo_worker.weightsync.agent.http_reader import HttpReader
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.part_messages import (
    PartPhase,
    PartRequest,
    PartState,
    table_bytes,
    table_from,
)
from grpo_worker.weightsync.agent.part_source import PartSource
from grpo_worker.weightsync.agent.rank_streams import RankStreams
from grpo_worker.weightsync.planner.rank_parts import part_of, table_of
from grpo_worker.weightsync.planner.regions import Box, Tensor
from grpo_worker.weightsync.protocol.agent_stream import place_of_rank, places_of_hosts
from grpo_worker.weightsync.trainer.publisher import publish
from support import host_agents
from support.engine_server import serve
from support.host_world import World
from support.random_plans import Case
from support.staged_cases import (
    LARGE,
    RANKS,
    TRAINERS,
    covering,
    cut,
    publish_case,
    shrink,
)
from support.stored_versions import JobStore

LAST = RANKS - 1  # a rank of the last host


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """An engine that serves version 1."""
    made = World(covering(LARGE), tmp_path, monkeypatch)
    made.sync(1)
    made.assert_serves(1)
    made.engine.calls = []
    return made


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_every_rank_of_every_host_holds_what_its_own_loader_would_have_loaded(
    seed: int, hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the checksum counts each byte once, also one that ranks of several hosts keep."""
    made = World(covering(seed), tmp_path, monkeypatch, hosts)
    for version in (1, 2):
        status = made.sync(version)
        made.assert_serves(version)
        assert status["receivedBytes"] == sum(made.agents.received)
        assert len(made.agents.first._installer.load_report["sent"]) == RANKS


def test_each_agent_reads_what_the_ranks_of_its_own_pod_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, names = (256, 64), [f"model.layers.{number}.m.weight" for number in range(9)]
    tensor = 4 * 256 * 64
    held = [[(name, 0, 0, 256)] for name in names]
    # Tensor 0 is kept by all ranks, and each rank keeps two of the others; the last is kept by the last host.
    kept = [
        [(name, Box(0, 256, 0, 64)) for name in (names[0], names[1 + 2 * rank], names[2 + 2 * rank])]
        for rank in range(RANKS)
    ]
    made = World(Case(dict.fromkeys(names, (shape, "float32")), held, kept, 0), tmp_path, monkeypatch)
    made.sync(1)
    made.assert_serves(1)
    own = 5 * tensor
    for received in made.agents.received:
        assert own <= received <= own + 9000, "and the chunk read before the engine pauses"


def stored(root: Path, case: Case, version: int) -> Path:
    """Return the folder of a job whose newest checkpoint is that of the step of ``version``."""
    publish_case(root, case, version)
    store = JobStore(root / "store")
    store.keep(root, version, TRAINERS)
    return store.folder


def test_the_agents_of_all_hosts_read_their_parts_in_the_checkpoint_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = covering(LARGE)
    made = World(case, tmp_path, monkeypatch, store=stored(tmp_path, case, 3))
    made.assert_serves(3)
    assert all(made.agents.received)


def test_a_further_host_reads_only_the_store_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, other = covering(LARGE), tmp_path / "other"
    monkeypatch.setattr(host_agents, "PartSource", lambda f, n, _, *more: PartSource(f, n, other, *more))
    with pytest.raises(UpdateError, match=r"host 1.*this agent may read .*/other"):
        World(case, tmp_path, monkeypatch, store=stored(tmp_path, case, 3))


def test_bits_that_flip_on_the_way_to_a_rank_of_a_further_host_leave_the_engine_stale(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, flipped = RankStreams.send_parts, list[int]()

    def send_parts(self: RankStreams, parts: Callable[[int], Iterator[memoryview]], given_up: Any) -> None:
        def sent(position: int) -> Iterator[memoryview]:
            for part in parts(position):
                data = bytearray(part)
                if self._ranks[position] == LAST and len(data) > 100:
                    data[50] ^= 16
                    flipped.append(50)
                yield memoryview(data)

        original(self, sent, given_up)

    with monkeypatch.context() as patch:
        patch.setattr(RankStreams, "send_parts", send_parts)
        with pytest.raises(UpdateError, match=rf"rank {LAST}: bucket \d: its bytes are not those that were"):
            world.sync(2)
    assert flipped
    world.assert_stale()
    world.sync(2)
    world.assert_serves(2)


@pytest.mark.parametrize("trainer", range(TRAINERS))
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_damage_in_a_trainers_memory_is_noticed_by_the_agent_that_reads_it(
    trainer: int, place: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = World(covering(LARGE), tmp_path, monkeypatch)
    blob = tmp_path / "v1" / f"rank-{trainer}.bin"
    good = blob.read_bytes()
    at = int(place * (len(good) - 1)) // 256 * 256
    blob.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(UpdateError, match="another digest"):
        made.sync(1)
    made.assert_stale()
    blob.write_bytes(good)
    made.sync(1)
    made.assert_serves(1)


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


@pytest.mark.parametrize("seed", range(30))
def test_what_another_host_counts_is_left_out_byte_for_byte(seed: int) -> None:
    rng = random.Random(seed)
    tensors = [Tensor(rng.randint(1, 12), rng.randint(1, 9), "bfloat16") for _ in range(3)]

    def drawn() -> dict[str, list[Box]]:
        found: dict[str, list[Box]] = {}
        for number, tensor in enumerate(tensors):
            for _ in range(rng.randint(0, 3)):
                rows = sorted(rng.sample(range(tensor.rows + 1), 2))
                columns = sorted(rng.sample(range(tensor.columns + 1), 2))
                found.setdefault(f"t{number}", []).append(Box(*rows, *columns))
        return found

    own, other = drawn(), drawn()
    names = ["before", "t0", "t1", "t2"]
    part = part_of([table_of(names, own)], 1, tensors, table_of(names, other))
    for number, tensor in enumerate(tensors):
        wanted = np.zeros((tensor.rows, 2 * tensor.columns), dtype=int)
        for kept, value in ((own, 1), (other, 0)):
            for box in kept.get(f"t{number}", ()):
                wanted[box.top : box.bottom, 2 * box.left : 2 * box.right] = value
        found = np.zeros_like(wanted)
        for band in part.bands.get(number, ()):
            for left, right in band.columns:
                found[band.top : band.bottom, left:right] += 1
        assert (found == wanted).all()


def test_messages_survive_the_wire() -> None:
    request = PartRequest("grpo-stream-1", 3, "plan", {0: "http://a", 1: "http://b"}, ["d"], 2, 4)
    assert PartRequest.from_json(request.to_json()) == request and not request.from_peer
    state = PartState(PartPhase.DONE, 5, 6, 7, -8, (9, 10))
    assert PartState.from_json(state.to_json()) == state
    table = np.arange(15, dtype=np.int32).reshape(3, 5)
    assert np.array_equal(table_from(table_bytes(table)), table)
    with pytest.raises(ValueError, match="reshape"):
        table_from(b"1234")


def test_each_rank_connects_to_the_agent_of_its_own_host() -> None:
    address = places_of_hosts([7, 8])
    assert [place_of_rank(address, 7, rank, 4)[1] for rank in range(4)] == [7, 7, 8, 8]
    assert place_of_rank("10.0.0.7", 5, 3, 4) == ("10.0.0.7", 5)
