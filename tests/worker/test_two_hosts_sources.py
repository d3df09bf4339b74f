"""An engine of two hosts is filled from a peer, and with a version of two gibibytes through small agents."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.plan.planner.agent_memory import AGENT_MEMORY
from grpo_worker.weightsync.agent.peers import Peers
from grpo_worker.weightsync.agent.region_source import RegionSource
from support.engine_server import JOB
from support.late_engine import MODEL, UNPADDED, publish_model, trainers
from support.memory_limits import MemoryLimit
from support.peer_engines import TIMEOUT, PeerEngine, engines
from support.two_hosts import RANKS, two_hosts

pytestmark = pytest.mark.slow  # engines of two servers start, beside another one or with 2 GB
LIMIT = AGENT_MEMORY >> 20


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory, two_versions: Path) -> Iterator[PeerEngine]:
    """An engine of one host and two ranks, which serves version 1 of a job whose trainers are gone."""
    with engines(tmp_path_factory.mktemp("pool"), UNPADDED, count=1, tensor_parallel=RANKS) as (only,):
        only.replace_agent(JOB)
        with trainers(two_versions) as sources:
            assert only.agent.sync(JOB, 1, sources)["state"] == "SERVING"
        yield only


def test_both_hosts_read_their_parts_from_a_peer_and_a_flipped_bit_is_noticed(
    peer: PeerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, reads, flip = RegionSource.read, list[int](), [True]

    def read(self: RegionSource, rank: int, first: int, end: int) -> tuple[memoryview, str]:
        data, digest = original(self, rank, first, end)
        reads.append(end - first)
        if flip[0] and len(reads) >= 3:
            data[len(data) // 2] ^= 4
        return data, digest

    monkeypatch.setattr(RegionSource, "read", read)
    found = Peers(lambda: [peer.url], TIMEOUT)
    with two_hosts(tmp_path, UNPADDED, peers=found, writer=None) as stale:
        errors: list[str] = []
        while not errors:
            errors = [
                text for text in stale.watch_once() if "other bytes than the peer's rank has read" in text
            ]
        assert stale.agent.status()["state"] == "STALE" and len(reads) >= 3
        flip[0] = False
        stale.watch("SERVING")
        status, before = stale.agent.status(), peer.agent.status()
        assert (status["weightVersion"], status["checksum"]) == (1, before["checksum"])
        assert stale.weights() == peer.weights()
        assert before["state"] == "SERVING" and stale.agent._installer.received_elsewhere > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="memory limits need root")
def test_agents_of_both_hosts_stay_within_their_memory(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))
    limits = [MemoryLimit(LIMIT), MemoryLimit(LIMIT)]
    shape: dict[str, Any] = {"bucket": 512, "timeout": 120, "expert_parallel": RANKS}
    try:
        nbytes = sum(manifest.blob_bytes for manifest in publish_model(root, 1))
        with trainers(root) as sources, two_hosts(tmp_path, MODEL, **shape) as engine:
            engine.further.end()
            engine.further = engine.start_further(limits[1])
            first = engine.start_first(limits[0])
            first.await_state("STALE", 60)
            status = first.sync(1, sources)
            assert status["state"] == "SERVING", status
            assert nbytes >= 2e9 and status["receivedBytes"] < 1.2 * nbytes, "experts are read by one host"
            peaks = [first.peak_mebibytes(), engine.further.peak_mebibytes()]
            assert max(peaks) < LIMIT and [limit.kills for limit in limits] == [0, 0]
        print("agents", peaks, status["receivedBytes"] / nbytes, status["seconds"])
    finally:
        for limit in limits:
            limit.remove()
        shutil.rmtree(root)
