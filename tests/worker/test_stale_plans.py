"""A real engine with another layout than the trainers planned for is refused, and planned for again."""

import time
from pathlib import Path

import pytest

from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.installer import UpdateError
from support.direct_trainers import BUCKET, PATIENCE, Trainers, after_version_1, assert_same_as_on_disk
from support.engine_server import JOB, Server, free_port, watch_until

REFUSED = 60.0  # seconds in which the trainers give up the engine that they planned for
PLANNED_AGAIN = 120.0


def _engine(folder: Path, port: int, ranks: int) -> tuple[Server, Agent]:
    """Start an engine with its agent, as a pod at the address of the one before."""
    folder.mkdir()
    server = Server(folder, port=port, tensor_parallel=ranks, return_routed_experts=False)
    agent = Agent("engine-0", server.control(), ranks, bucket_bytes=BUCKET, timeout=30, writer=JOB)
    try:
        watch_until(agent, "STALE", server)
    except BaseException:
        server.kill()
        raise
    return server, agent


@pytest.mark.slow  # two engines start
@pytest.mark.fault(
    row="16",
    point="an engine is replaced by one with tensor parallel 2 after the trainers have planned a transfer",
    witness="the engine that was planned for is killed; the message says that the other one has no link",
    bound="refused at once, the trainers return in 60 s; planned again and served in 120 s",
    compared="every tensor of the engine and the version's files on disk, bitwise",
)
def test_an_engine_with_another_layout_is_planned_for_again(tmp_path: Path) -> None:
    port = free_port()
    server, agent = _engine(tmp_path / "first", port, 1)
    try:
        (tmp_path / "old-ranks").mkdir()
        trainers = after_version_1(agent, tmp_path / "old-ranks", patience=10)
    finally:
        server.kill()
    started = time.monotonic()
    problems = trainers.result.result(REFUSED)
    assert all(f"trainer rank {rank}: " in found[2] for rank, found in enumerate(problems))
    assert time.monotonic() - started < REFUSED
    server, agent = _engine(tmp_path / "second", port, 2)
    try:
        with pytest.raises(UpdateError, match=r"version 2, plan: .*no link"):
            agent.receive(JOB, 2, trainers.offer.name, PATIENCE)
        assert (agent.status()["state"], agent.status()["weightVersion"]) == ("STALE", None)
        (tmp_path / "new-ranks").mkdir()
        again = Trainers(tmp_path / "new-ranks", "TP2 EP2", 1, engine_ranks=2)
        started = time.monotonic()
        agent.join(JOB, again.offer)
        assert agent.receive(JOB, 1, again.offer.name, PATIENCE)["state"] == "SERVING"
        assert time.monotonic() - started < PLANNED_AGAIN
        assert again.result.result(60) == [["", ""]] * 2
        assert_same_as_on_disk(server, tmp_path / "new-ranks" / "hf-1")
    finally:
        server.kill()
