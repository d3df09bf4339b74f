"""Controllers that die during an update of a real engine, or were superseded."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_worker.weightsync.agent import metrics
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.agent.update import Phase, Update
from support.engine_server import JOB, Server, generate, serve, serve_app, watch_until
from support.ranks.launcher import run as run_on_ranks
from support.weight_layouts import LAYOUTS, copy_version

pytestmark = pytest.mark.slow

_POST = "import httpx, json, sys; print(httpx.post(sys.argv[1], json=json.loads(sys.argv[2]), timeout=60))"


class Pool:
    """One engine, its agent over HTTP, and two versions of weights under every number."""

    def __init__(self, agent: Agent, root: Path) -> None:
        self.agent = agent
        self.url = serve_app(rollout_application(agent))
        self._root = root
        self._sources = serve(root)
        self.version = 2

    def body(self, attempt: int) -> dict[str, Any]:
        """Return a controller's request for the next version."""
        self.version += 1
        copy_version(self._root, 2 - self.version % 2, self.version)
        sources = {str(rank): url for rank, url in self._sources.items()}
        return {"writer": JOB, "attempt": attempt, "version": self.version, "sources": sources}

    def sync(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/sync", json=body, timeout=60)

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/v1/status").json())


@pytest.fixture(scope="module")
def pool(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    root = tmp_path_factory.mktemp("coordinators")
    world, layout = LAYOUTS["TP2 EP2"]
    run_on_ranks("weight_cases:publish_versions", world, root=str(root), layout=layout, versions=2)
    (root / "update-2" / "v2").rename(root / "update-1" / "v2")
    agent = Agent("engine-0", server.control(), 1, bucket_bytes=64 << 10, timeout=30, writer=JOB)
    watch_until(agent, "STALE", server)
    return Pool(agent, root / "update-1")


def _checksums(pool: Pool, server: Server) -> dict[int, str]:
    """Return the engine's checksums of odd and even versions."""
    found = {}
    for _ in range(2):
        pool.sync(pool.body(1)).raise_for_status()
        found[pool.version % 2] = server.control().checksum()
    assert found[0] != found[1], "the versions do not differ"
    return found


@pytest.mark.fault(
    row="18",
    point="SIGKILL of the process that asks for an update, in each of its four phases",
    witness="it ended by signal 9 in that phase",
    bound="the version is served in 60 s",
    compared="checksums of the same versions without a death",
)
@pytest.mark.parametrize("phase", [Phase.PLAN, Phase.PREPARE, Phase.TRANSFER, Phase.COMMIT])
def test_a_controller_killed_in_any_phase_leaves_a_whole_version(
    pool: Pool, server: Server, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    whole, entered = _checksums(pool, server), metrics.record_phase
    body = pool.body(1)
    child = subprocess.Popen([sys.executable, "-c", _POST, f"{pool.url}/v1/sync", json.dumps(body)])
    killed_in: list[Phase] = []

    def kill(update: Update) -> None:
        entered(update)
        if update.phase == phase and not killed_in:
            child.kill()
            killed_in.append(update.phase)
            assert child.wait() == -9

    monkeypatch.setattr(metrics, "record_phase", kill)
    deadline = time.monotonic() + 60
    while pool.status()["weightVersion"] != body["version"]:
        assert time.monotonic() < deadline, pool.status()
        time.sleep(0.05)
    assert killed_in == [phase] and pool.status()["state"] == "SERVING"
    assert server.control().checksum() == whole[body["version"] % 2]
    assert generate([5, 6, 7])["meta_info"]["weight_version"] == str(body["version"])
    pool.sync(pool.body(1)).raise_for_status()
    assert server.control().checksum() == whole[pool.version % 2]


@pytest.mark.fault(
    row="18",
    point="calls of an older attempt",
    witness="the agent answers 409",
    bound="at once",
    compared="status and checksum before",
    partial="no second controller runs",
)
def test_a_superseded_attempt_changes_nothing(pool: Pool, server: Server) -> None:
    """Two controllers of one job: the older one was partitioned and does not know its successor."""
    pool.sync(pool.body(2)).raise_for_status()
    before, inside = pool.status(), server.control().checksum()
    late = pool.body(1)
    answers = [pool.sync(late)]
    answers.append(httpx.post(f"{pool.url}/v1/take", json=late | {"link": "any", "patience": 30}, timeout=60))
    for answer in answers:
        assert answer.status_code == 409
        assert answer.json()["error"] == f"attempt 1 of {JOB} may not write: attempt 2 does"
    assert pool.status() == before and server.control().checksum() == inside
    pool.sync(pool.body(3)).raise_for_status()
    assert pool.status()["weightVersion"] == pool.version
