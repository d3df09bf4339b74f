"""A late engine of two gibibytes of weights: its agent has 512 MiB, and the trainers do not notice."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from grpo_devcluster.results import record_from_test
from grpo_operator.plan.planner.agent_memory import AGENT_MEMORY
from support.engine_server import Server, free_port
from support.late_engine import MODEL, limited_agent, publish_model, trainers

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="memory limits need root")
LIMIT = AGENT_MEMORY >> 20


@pytest.fixture(scope="module")
def published() -> Iterator[Path]:
    """Version 1 in memory, as in a trainer's pod."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))
    manifests = publish_model(root, 1)
    assert sum(manifest.blob_bytes for manifest in manifests) >= 2e9
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine of its own, with dummy weights."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "config.json").write_text(json.dumps(MODEL))
    server = Server(folder, str(folder), free_port(), return_routed_experts=False)
    server.await_answer()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def sources(published: Path) -> Iterator[dict[int, str]]:
    with trainers(published) as urls:
        yield urls


@pytest.mark.fault(
    row="23",
    point="an engine's agent needs more than its memory limit",
    witness="SIGKILL by the kernel, counted",
    bound="10 s",
    partial="the engine lives; nothing compared",
)
@pytest.mark.slow  # starts an engine of 2 GB
def test_an_agent_that_is_killed_for_its_memory_leaves_the_engine_running(
    engine: Server, sources: dict[int, str], tmp_path: Path
) -> None:
    with limited_agent(96, engine.url, engine.key, tmp_path) as (agent, limit):
        agent.await_state("STALE", 30)
        with pytest.raises(httpx.HTTPError):
            agent.sync(1, sources)
        assert agent.ended(10) == -signal.SIGKILL and limit.kills == 1
    assert engine.control().alive() and engine.process.poll() is None


@pytest.mark.slow  # moves 2 GB three times; make bench-late-engine runs it too
def test_a_late_and_a_restarted_engine_get_the_version_through_a_small_agent(
    engine: Server, sources: dict[int, str], published: Path, tmp_path: Path
) -> None:
    with limited_agent(LIMIT, engine.url, engine.key, tmp_path) as (agent, limit):
        agent.await_state("STALE", 30)
        late = agent.sync(1, sources)
        assert (late["state"], late["weightVersion"]) == ("SERVING", 1), late
        assert late["receivedBytes"] >= 2e9
        weights = engine.control(120).checksum()

        engine.kill()
        agent.await_state("RESTARTING", 60)
        engine.start()
        agent.await_state("STALE", 300)
        started = time.monotonic()
        again = agent.await_state("SERVING", 200)
        seconds = time.monotonic() - started
        assert (again["weightVersion"], again["checksum"]) == (1, late["checksum"])
        assert engine.control(120).checksum() == weights

        publish_model(published, 2)
        newer = agent.sync(2, sources)
        assert (newer["state"], newer["weightVersion"]) == ("SERVING", 2), newer
        assert newer["checksum"] != late["checksum"] and engine.control(120).checksum() != weights

        peak = agent.peak_mebibytes()
        assert peak < LIMIT and limit.kills == 0
    figures = {"agent_rss_mib_max": round(peak, 1), "late_engine_seconds_2gb": round(seconds, 2)}
    record_from_test("sync", figures)
    print(figures, late["seconds"], newer["seconds"])
