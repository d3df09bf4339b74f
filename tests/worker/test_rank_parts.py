"""A real engine of two ranks gets a staged version in parts: each rank what it keeps, byte for byte."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.plan.planner.agent_memory import AGENT_MEMORY
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_stream import EngineStream
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from support import late_engine
from support.engine_server import JOB, Server, free_port, serve, watch_until
from support.late_engine import UNPADDED, limited_agent, publish_model, trainers

pytestmark = pytest.mark.slow  # an engine of each shape starts
RANKS = 2
SHAPES = (
    pytest.param(1, id="tensor parallel"),
    pytest.param(RANKS, id="expert parallel"),
)


@pytest.fixture(scope="module", params=SHAPES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "config.json").write_text(json.dumps(UNPADDED))
    shape = {"tensor_parallel": RANKS, "expert_parallel": request.param}
    server = Server(folder, str(folder), free_port(), return_routed_experts=False, **shape)
    server.await_answer()
    yield server
    server.kill()


def new_agent(engine: Server) -> Agent:
    agent = Agent("engine-0", engine.control(120), RANKS, bucket_bytes=1 << 20, timeout=60, writer=JOB)
    watch_until(agent, "STALE", engine)
    return agent


def whole(self: StagedVersion, record: bool, **_: Any) -> DirectLoad:
    return DirectLoad(self.plan.plan_id, tuple(map(len, self.plan.buckets)), record)


def test_each_rank_gets_about_half_and_holds_the_weights_of_a_whole_stream(
    engine: Server, two_versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, agent = serve(two_versions), new_agent(engine)
    found: dict[int, Any] = {}
    for version in (1, 2):
        status = agent.sync(JOB, version, sources)
        report = agent._installer.load_report
        found[version] = status["checksum"], engine.control(60).checksum(), report["sent"]
    assert agent._installer.load_report["recorded"] == 0, "the second version repeats the copies of the first"
    with monkeypatch.context() as patch:
        patch.setattr(StagedVersion, "direct_load", whole)
        other = new_agent(engine)
        for version in (1, 2):
            status = other.sync(JOB, version, sources)
            assert (status["checksum"], engine.control(60).checksum()) == found[version][:2]
    nbytes, (first, second) = int(found[1][0].split(":")[0]), found[1][2]
    assert nbytes <= first + second < 1.2 * nbytes, "only norms, router and latent projections go to both"
    assert max(first, second) < 0.6 * nbytes


def test_a_flipped_bit_on_the_way_to_one_rank_leaves_the_engine_stale(
    engine: Server, two_versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, agent = serve(two_versions), new_agent(engine)
    agent.sync(JOB, 1, sources)
    before, original = engine.control(60).checksum(), EngineStream.send_parts

    def send_parts(self: EngineStream, parts: Any, given_up: Any) -> None:
        def flipped(rank: int) -> Iterator[memoryview]:
            for part in parts(rank):
                data = bytearray(part)
                if rank == RANKS - 1 and len(data) > 1000:
                    data[500] ^= 16
                yield memoryview(data)

        original(self, flipped, given_up)

    with monkeypatch.context() as patch:
        patch.setattr(EngineStream, "send_parts", send_parts)
        with pytest.raises(UpdateError, match=r"rank 1: bucket \d+: its bytes are not those that were sent"):
            agent.sync(JOB, 2, sources)
    status = agent.status()
    assert status["state"] == "STALE" and status["weightVersion"] is None
    assert agent.sync(JOB, 1, sources)["state"] == "SERVING"
    assert engine.control(60).checksum() == before


def test_the_agent_of_two_ranks_needs_no_more_memory_than_that_of_one(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))
    (tmp_path / "config.json").write_text(json.dumps(late_engine.MODEL))
    limit, shape = AGENT_MEMORY >> 20, dict[str, Any](tensor_parallel=RANKS)
    engine = Server(tmp_path, str(tmp_path), free_port(), return_routed_experts=False, **shape)
    try:
        nbytes = sum(manifest.blob_bytes for manifest in publish_model(root, 1))
        place = limit, engine.url, engine.key, tmp_path
        with trainers(root) as sources, limited_agent(*place, ranks=RANKS) as (agent, memory):
            engine.await_answer()
            agent.await_state("STALE", 30)
            status = agent.sync(1, sources)
            assert status["state"] == "SERVING" and 2e9 < status["receivedBytes"] <= 1.01 * nbytes
            peak = agent.peak_mebibytes()
            assert peak < limit and memory.kills == 0
        print(f"agent {peak:.0f} MiB", status["seconds"])
    finally:
        engine.kill()
        shutil.rmtree(root)
