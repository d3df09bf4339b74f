"""A version of two gibibytes goes from one engine to another through two agents of 512 MiB."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_operator.api.names import AGENT_PORT
from grpo_operator.plan.planner.agent_memory import AGENT_MEMORY
from support.engine_server import Server, free_port
from support.late_engine import MODEL, limited_agent, publish_model, trainers

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="memory limits need root"),
    pytest.mark.slow,  # moves 2 GB twice
]
LIMIT = AGENT_MEMORY >> 20


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Server]]:
    servers = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODEL))
        servers.append(Server(folder, str(folder), free_port(), return_routed_experts=False))
    yield servers
    for server in servers:
        server.kill()


def test_agents_of_both_engines_stay_within_their_memory(pair: list[Server]) -> None:
    for server in pair:
        server.await_answer()
    first, second = pair
    folders = [server.key.parent for server in pair]
    with limited_agent(LIMIT, first.url, first.key, folders[0], port=AGENT_PORT) as (peer, limit_of_peer):
        peer.await_state("STALE", 30)
        root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        try:
            publish_model(root, 1)
            with trainers(root) as sources:
                served = peer.sync(1, sources)
        finally:
            shutil.rmtree(root)
        assert served["state"] == "SERVING" and served["receivedBytes"] >= 2e9
        place = LIMIT, second.url, second.key, folders[1]
        with limited_agent(*place, peers="localhost") as (agent, limit):
            status = agent.await_state("SERVING", 300)
            assert status["checksum"] == served["checksum"]
            peaks = peer.peak_mebibytes(), agent.peak_mebibytes()
            assert max(peaks) < LIMIT and limit.kills == limit_of_peer.kills == 0
        assert first.control(120).checksum() == second.control(120).checksum()
    print(f"peer {peaks[0]:.0f} MiB, reader {peaks[1]:.0f} MiB")
