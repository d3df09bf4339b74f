"""Weights sent directly from trainer ranks to a real engine, over a process group of both."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import EngineError
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.protocol.direct_load import AGENT, LINK
from grpo_worker.weightsync.protocol.link_exchange import LinkExchange, TensorRow
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.transport import rendezvous
from grpo_worker.weightsync.transport.process_group import CollectiveGroup
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS, TransferError, give_up
from support.direct_trainers import BUCKET, PATIENCE, Trainers, after_version_1, assert_same_as_on_disk
from support.engine_server import JOB, Server, serve, watch_until
from support.weight_layouts import LAYOUTS


@pytest.fixture(scope="module")
def agent(server: Server) -> Agent:
    agent = Agent("engine-0", server.control(), 1, bucket_bytes=BUCKET, timeout=30, writer=JOB)
    watch_until(agent, "STALE", server)
    return agent


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, Backend.GLOO) for name in LAYOUTS), ("TP2 EP2", Backend.CUDA_IPC)]
)
def test_every_tensor_equals_the_exported_checkpoint_after_each_version(
    agent: Agent, server: Server, tmp_path: Path, name: str, backend: Backend
) -> None:
    """Nothing is staged in an agent's memory, whatever the trainers' layout."""
    trainers, seen = Trainers(tmp_path, name, 3, backend=backend), set()
    agent.join(JOB, trainers.offer)
    for version in (1, 2, 3):
        trainers.ready(version)
        status = agent.receive(JOB, version, trainers.offer.name, PATIENCE)
        assert (status["state"], status["weightVersion"], status["stagedVersion"]) == (
            "SERVING",
            version,
            None,
        )
        seen.add(assert_same_as_on_disk(server, tmp_path / f"hf-{version}"))
    assert len(seen) == 3, "the versions do not differ"
    assert trainers.result.result(60) == [[""] * 4] * LAYOUTS[name][0]


def test_an_engine_keeps_its_weights_when_it_joins_another_link(
    agent: Agent, server: Server, tmp_path: Path
) -> None:
    """Its ranks recorded their regions for the first one."""
    for number, folder in enumerate((tmp_path / "first", tmp_path / "second"), start=1):
        folder.mkdir()
        trainers, before = Trainers(folder, "TP2 EP2", 1), server.control().checksum()
        joined = agent.join(JOB, trainers.offer)
        if number == 2:
            assert (joined["state"], joined["weightVersion"]) == ("SERVING", 1)
            assert server.control().checksum() == before
        assert agent.receive(JOB, number, trainers.offer.name, PATIENCE)["state"] == "SERVING"
        assert trainers.result.result(60) == [[""] * 2] * 2


@pytest.mark.fault(
    row="15",
    point="a bit flips in a direct transfer of one rank",
    witness="the message names rank and version",
    bound="in the same update",
    compared="every tensor of the engine and the version's files on disk, bitwise",
)
@pytest.mark.parametrize("backend", [Backend.GLOO, Backend.CUDA_IPC])
def test_a_flipped_bit_is_detected_and_the_version_is_staged(
    agent: Agent, server: Server, tmp_path: Path, backend: Backend
) -> None:
    trainers = after_version_1(agent, tmp_path, flips_at=2, backend=backend)
    wrong = r"version 2, transfer, .*the bytes of trainer ranks \[1\] are not those that were sent"
    with pytest.raises(UpdateError, match=wrong):
        agent.receive(JOB, 2, trainers.offer.name, PATIENCE)
    assert (agent.status()["state"], agent.status()["weightVersion"]) == ("STALE", None)
    trainers.result.result(60)
    assert agent.sync(JOB, 2, serve(tmp_path))["state"] == "SERVING"
    assert_same_as_on_disk(server, tmp_path / "hf-2")


@pytest.mark.fault(
    row="14",
    point="SIGKILL of a rank in the middle of a direct transfer to a real engine",
    witness="the process ended by signal 9",
    bound="45 s",
    partial="no recovery, nothing compared",
)
@pytest.mark.parametrize("backend", [Backend.GLOO, Backend.CUDA_IPC])
def test_a_trainer_rank_that_dies_leaves_a_stale_engine_and_no_hang(
    agent: Agent, server: Server, tmp_path: Path, backend: Backend
) -> None:
    trainers = after_version_1(agent, tmp_path, dies_at=2, backend=backend)
    started = time.monotonic()
    with pytest.raises(UpdateError, match="version 2, transfer"):
        agent.receive(JOB, 2, trainers.offer.name, PATIENCE)
    assert time.monotonic() - started < 45
    assert agent.status()["state"] == "STALE" and server.control().alive()
    with pytest.raises(AssertionError, match="-9"):
        trainers.result.result(120)
    with pytest.raises(UpdateError, match=r"version 3, plan: .*no link"):
        agent.receive(JOB, 3, trainers.offer.name, PATIENCE)


@pytest.mark.fault(
    row="11,13",
    point="a real engine is suspended before a direct transfer",
    witness="the ranks and the agent name the timeout",
    bound="ranks return in 60 s, serves again in 180 s",
    compared="every tensor of the engine and the version's files on disk, bitwise",
    partial="not while it generates",
)
@pytest.mark.slow  # three quarters of a minute of deadlines
def test_a_frozen_engine_does_not_block_the_trainers(server: Server, tmp_path: Path) -> None:
    """The trainers and the engine's agent give up at their deadline."""
    agent = Agent("engine-0", server.control(8), 1, bucket_bytes=BUCKET, timeout=8, writer=JOB)
    watch_until(agent, "STALE", server)
    trainers = after_version_1(agent, tmp_path, patience=5)
    frozen = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    for process in frozen:
        process.suspend()
    with pytest.raises(UpdateError, match=r"version 2, .*Timeout"):
        agent.receive(JOB, 2, trainers.offer.name, PATIENCE)
    problems = trainers.result.result(60)
    assert all(found[1] == "" and f"trainer rank {rank}: " in found[2] for rank, found in enumerate(problems))
    for process in frozen:
        process.resume()
    watch_until(agent, "STALE", server, 90)
    sources = serve(tmp_path)
    deadline = time.monotonic() + 90
    while agent.status()["state"] != "SERVING":
        assert time.monotonic() < deadline, agent.status()
        try:
            agent.sync(JOB, 2, sources)
        except UpdateError:
            time.sleep(0.5)
            agent.watch()
    assert_same_as_on_disk(server, tmp_path / "hf-2")


def _engines_offer(store: TCPStore, name: str) -> LinkOffer:
    """Offer the engine a link with one trainer rank."""
    LinkExchange(PrefixStore(name, store)).put_tensors([TensorRow("model.norm.weight", (64,), "float32")])
    return LinkOffer(name, "gang", "127.0.0.1", store.port, 1, 1, 1, Backend.GLOO, BUCKET, 1, False)


@pytest.mark.parametrize("how", ["nobody comes", "one comes and goes"])
def test_a_failed_rendezvous_leaves_the_engine_in_use(server: Server, tmp_path: Path, how: str) -> None:
    """The scheduler is blocked while it waits, so the wait must be bounded."""
    agent = Agent("engine-0", server.control(5), 1, bucket_bytes=BUCKET, timeout=30, writer=JOB)
    watch_until(agent, "STALE", server)
    store, name = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), f"{LINK}1-{how[:3]}"
    if how == "one comes and goes":
        PrefixStore(name, store).add("here", 1)
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(agent.join, JOB, _engines_offer(store, name))
        time.sleep(2)  # the engine waits by now
        assert not joining.done()
        started = time.monotonic()
        give_up(store, name)
        with pytest.raises(EngineError, match=r"another member gave up|did not form"):
            joining.result(JOIN_SECONDS)
    server.admin("/destroy_weights_update_group", group_name="of-nobody")  # answered by the scheduler
    assert time.monotonic() - started < JOIN_SECONDS / 2


def test_waiting_members_give_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with ThreadPoolExecutor(1) as thread:
        forming = thread.submit(
            CollectiveGroup, Backend.GLOO, store, f"{LINK}1-x", 0, 2, 1, torch.device("cpu")
        )
        give_up(store, f"{LINK}1-x")
        with pytest.raises(TransferError, match="another member gave up"):
            forming.result(10)
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.1)
    with pytest.raises(TransferError, match=r"ranks \[1, 2\] did not come"):
        CollectiveGroup(Backend.GLOO, store, f"{LINK}1-y", 0, 3, 1, torch.device("cpu"))


def test_a_request_of_a_dead_agent_ends_at_once(server: Server) -> None:
    """A frozen engine finds such requests in its queue, before those of the new agent."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = store.port
    del store
    with pytest.raises(EngineError, match="refused"):
        server.control(20).join_group("127.0.0.1", port, f"{AGENT}gone", 2)
