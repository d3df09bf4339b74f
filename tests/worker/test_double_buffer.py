"""A double buffer: the engine generates with one version while it receives the next one."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.installer import UpdateError
from support.direct_trainers import BUCKET, PATIENCE, Trainers, after_version_1, assert_same_as_on_disk
from support.engine_server import JOB, Server, generate, serve, watch_until


@pytest.fixture(scope="module")
def agent(server: Server) -> Agent:
    agent = Agent(
        "engine-0", server.control(), 1, bucket_bytes=BUCKET, timeout=30, writer=JOB, double_buffer=True
    )
    watch_until(agent, "STALE", server)
    return agent


def _tokens() -> list[int]:
    tokens: list[int] = generate([1, 2, 3], temperature=0, max_new_tokens=8)["output_ids"]
    return tokens


@pytest.mark.parametrize("backend", [Backend.GLOO, Backend.CUDA_IPC])
def test_an_engine_generates_while_it_receives_a_version(
    agent: Agent, server: Server, tmp_path: Path, backend: Backend
) -> None:
    trainers = after_version_1(agent, tmp_path, holds_at=2, backend=backend)
    before = _tokens()
    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(agent.receive, JOB, 2, trainers.offer.name, PATIENCE)
        trainers.await_file("held")
        for _ in range(3):
            assert _tokens() == before, "the first version, of which no byte was replaced"
        assert server.control().weight_version() == "1" and agent.status()["weightVersion"] == 1
        time.sleep(2)
        (tmp_path / "go").touch()
        status = receiving.result(60)
    assert (status["state"], status["weightVersion"]) == ("SERVING", 2)
    seconds = status["seconds"]
    assert seconds["fetch"] > 2 > 10 * seconds["engine_install"], "the engine paused for the copy alone"
    assert seconds["pause"] < 2
    assert_same_as_on_disk(server, tmp_path / "hf-2")
    assert trainers.result.result(60) == [[""] * 3] * 2


def test_every_version_equals_the_exported_checkpoint(agent: Agent, server: Server, tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, "TP2 EP2", 4)
    agent.join(JOB, trainers.offer)
    for version in (1, 2, 3, 4):
        trainers.ready(version)
        status = agent.receive(JOB, version, trainers.offer.name, PATIENCE)
        assert "fetch" in status["seconds"]
        assert_same_as_on_disk(server, tmp_path / f"hf-{version}")
    trainers.result.result(60)


@pytest.mark.parametrize("fault", ["flips_at", "dies_at"])
def test_an_engine_serves_on_when_a_version_does_not_arrive_whole(
    agent: Agent, server: Server, tmp_path: Path, fault: str
) -> None:
    """Without a double buffer it has half a version then, and leaves service."""
    trainers = after_version_1(agent, tmp_path, **{fault: 2})
    before = server.control().checksum()
    with pytest.raises(UpdateError, match=r"version 2, plan: .*fetch failed: rank 0: "):
        agent.receive(JOB, 2, trainers.offer.name, PATIENCE)
    assert (agent.status()["state"], agent.status()["weightVersion"]) == ("SERVING", 1)
    assert server.control().checksum() == before and _tokens()
    if fault == "dies_at":
        with pytest.raises(AssertionError, match="-9"):
            trainers.result.result(120)
    else:
        trainers.result.result(60)
        assert agent.sync(JOB, 2, serve(tmp_path))["state"] == "SERVING"
        assert_same_as_on_disk(server, tmp_path / "hf-2")


def test_an_engine_that_leaves_its_link_serves_on(agent: Agent, server: Server, tmp_path: Path) -> None:
    """A restarted agent does not know of the fetch, and makes the engine leave the link."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    trainers = after_version_1(agent, first, holds_at=2)
    before = server.control().checksum()
    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(agent.receive, JOB, 2, trainers.offer.name, PATIENCE)
        trainers.await_file("held")
        server.control().leave_group(trainers.offer.name)
        with pytest.raises(UpdateError, match="has not been joined"):
            receiving.result(10)
        (first / "go").touch()
        trainers.result.result(60)
    assert (agent.status()["state"], agent.status()["weightVersion"]) == ("SERVING", 1)
    assert server.control().checksum() == before
    others = after_version_1(agent, second)
    assert agent.receive(JOB, 2, others.offer.name, PATIENCE)["weightVersion"] == 2
    assert_same_as_on_disk(server, second / "hf-2")
    others.result.result(60)
