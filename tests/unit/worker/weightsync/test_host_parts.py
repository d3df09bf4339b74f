"""An engine of several hosts loads a version in one transaction; each pod's agent reads only its part."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.part_source import PartSource
from grpo_worker.weightsync.agent.rank_streams import RankStreams
from grpo_worker.weightsync.planner.regions import Box
from support import host_agents
from support.host_world import World
from support.random_plans import Case
from support.staged_cases import (
    LARGE,
    RANKS,
    TRAINERS,
    covering,
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
    return World.serving(tmp_path, monkeypatch)


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
