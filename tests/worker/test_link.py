"""Weights from trainer ranks straight into a real engine, over one process group of both."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import EngineError
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.protocol.direct_load import AGENT, LINK
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, transfer_plan_of
from grpo_worker.weightsync.protocol.manifest import layout
from grpo_worker.weightsync.protocol.tiling import PlanError
from grpo_worker.weightsync.transport import rendezvous
from grpo_worker.weightsync.transport.factory import IPC
from grpo_worker.weightsync.transport.process_group import CollectiveGroup
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS, TransferError, give_up
from support.engine_server import JOB, Server, serve, watch_until
from support.ranks import partial_cases
from support.ranks.launcher import run as run_on_ranks
from support.weight_layouts import LAYOUTS, from_disk

BUCKET = 64 << 10


@pytest.fixture(scope="module")
def agent(server: Server) -> Agent:
    agent = Agent("engine-0", server.control(), 1, bucket_bytes=BUCKET, timeout=30, writer=JOB)
    watch_until(agent, "STALE", server)
    return agent


class Trainers:
    """Ranks that send versions one after the other."""

    def __init__(self, root: Path, name: str, versions: int, **more: Any) -> None:
        self._root = root
        world, layout = LAYOUTS[name]
        arguments = {"root": str(root), "layout": layout, "versions": versions, "bucket": BUCKET} | more
        self._threads = ThreadPoolExecutor(1)
        self.result: Future[list[Any]] = self._threads.submit(
            run_on_ranks, "weight_cases:send_versions", world, **arguments
        )
        self.offer = GroupOffer.from_json(json.loads(self._await("offer")))

    def ready(self, version: int) -> None:
        self._await(f"ready-{version}")

    def _await(self, name: str) -> str:
        deadline = time.monotonic() + 240
        while not (self._root / name).exists():
            assert not self.result.done(), self.result.result()
            assert time.monotonic() < deadline, f"{name} does not come"
            time.sleep(0.05)
        return (self._root / name).read_text()


def after_version_1(agent: Agent, root: Path, **how: Any) -> Trainers:
    """Two ranks that are about to send version 2."""
    trainers = Trainers(root, "TP2 EP2", 2, **how)
    agent.join(JOB, trainers.offer)
    agent.take(JOB, 1, trainers.offer.name)
    trainers.ready(2)
    return trainers


def assert_same_as_on_disk(server: Server, folder: Path) -> str:
    """The engine holds what the exported checkpoint is when SGLang loads it; its checksum."""
    ours = server.control().checksum()
    from_disk(server, folder)
    assert server.control().checksum() == ours, f"{folder.name} is another in the engine"
    return ours


@pytest.mark.parametrize(("name", "backend"), [*((name, "gloo") for name in LAYOUTS), ("TP2 EP2", IPC)])
def test_every_tensor_equals_the_exported_checkpoint_after_each_version(
    agent: Agent, server: Server, tmp_path: Path, name: str, backend: str
) -> None:
    """Nothing goes through an agent's memory, whatever the trainers' layout."""
    trainers, seen = Trainers(tmp_path, name, 3, backend=backend), set()
    agent.join(JOB, trainers.offer)
    for version in (1, 2, 3):
        trainers.ready(version)
        status = agent.take(JOB, version, trainers.offer.name)
        assert (status["state"], status["weightVersion"], status["hostCopy"]) == ("SERVING", version, None)
        seen.add(assert_same_as_on_disk(server, tmp_path / f"hf-{version}"))
    assert len(seen) == 3, "the versions do not differ"
    assert trainers.result.result(60) == [[""] * 4] * LAYOUTS[name][0]


def test_a_link_of_another_plan_is_not_joined(agent: Agent) -> None:
    before = agent.status()
    one = layout(0, 1, [("w", (4,), 0, 0, torch.zeros(4))]).to_json()
    with pytest.raises(PlanError, match="the controller's is another"):
        agent.join(JOB, GroupOffer("grpo-link-1-x", "127.0.0.1", 1, 2, 1, "gloo", [one], "another"))
    assert agent.status() == before


@pytest.mark.parametrize("backend", ["gloo", IPC])
def test_a_bit_that_flips_on_the_way_is_noticed_and_the_version_comes_by_memory(
    agent: Agent, server: Server, tmp_path: Path, backend: str
) -> None:
    trainers = after_version_1(agent, tmp_path, flips_at=2, backend=backend)
    wrong = r"version 2, transfer, .*bucket \d+: the bytes of trainer rank 1 are not those it sent"
    with pytest.raises(UpdateError, match=wrong):
        agent.take(JOB, 2, trainers.offer.name)
    assert (agent.status()["state"], agent.status()["weightVersion"]) == ("STALE", None)
    trainers.result.result(60)
    assert agent.sync(JOB, 2, serve(tmp_path))["state"] == "SERVING"
    assert_same_as_on_disk(server, tmp_path / "hf-2")


@pytest.mark.parametrize("backend", ["gloo", IPC])
def test_a_trainer_rank_that_dies_leaves_a_stale_engine_and_no_hang(
    agent: Agent, server: Server, tmp_path: Path, backend: str
) -> None:
    trainers = after_version_1(agent, tmp_path, dies_at=2, backend=backend)
    started = time.monotonic()
    with pytest.raises(UpdateError, match="version 2, transfer"):
        agent.take(JOB, 2, trainers.offer.name)
    assert time.monotonic() - started < 45
    assert agent.status()["state"] == "STALE" and server.control().alive()
    with pytest.raises(AssertionError, match="-9"):
        trainers.result.result(120)
    with pytest.raises(UpdateError, match=r"version 3, plan: .*no link"):
        agent.take(JOB, 3, trainers.offer.name)


def test_an_engine_that_stands_still_does_not_keep_the_trainers(server: Server, tmp_path: Path) -> None:
    """They give up at their deadline, and so does its agent."""
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
        agent.take(JOB, 2, trainers.offer.name)
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


def _engines_offer(store: TCPStore, name: str) -> GroupOffer:
    """To a link of a trainer rank and the engine."""
    text = layout(0, 1, [("w", (4,), 0, 0, torch.zeros(4))]).to_json()
    plan_id = transfer_plan_of([text], BUCKET).plan_id
    return GroupOffer(name, "127.0.0.1", store.port, 2, 1, "gloo", [text], plan_id)


@pytest.mark.parametrize("how", ["nobody comes", "one comes and goes"])
def test_a_link_that_does_not_form_gives_the_engine_back(server: Server, tmp_path: Path, how: str) -> None:
    """Its scheduler does nothing else while it waits, so nobody may keep it waiting."""
    agent = Agent("engine-0", server.control(5), 1, bucket_bytes=BUCKET, timeout=30, writer=JOB)
    watch_until(agent, "STALE", server)
    store, name = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), f"{LINK}1-{how[:3]}"
    if how == "one comes and goes":
        PrefixStore(name, store).add("here", 1)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"/init_weights_update_group"):
        agent.join(JOB, _engines_offer(store, name))
    give_up(store, name)
    server.admin("/destroy_weights_update_group", group_name="of-nobody")  # answered by the scheduler
    assert time.monotonic() - started < JOIN_SECONDS


def test_members_that_wait_give_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with ThreadPoolExecutor(1) as thread:
        forming = thread.submit(CollectiveGroup, store, f"{LINK}1-x", 0, 2, 1, torch.device("cpu"))
        give_up(store, f"{LINK}1-x")
        with pytest.raises(TransferError, match="another member gave up"):
            forming.result(10)
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.1)
    with pytest.raises(TransferError, match=r"ranks \[1, 2\] did not come"):
        CollectiveGroup(store, f"{LINK}1-y", 0, 3, 1, torch.device("cpu"))


def test_a_request_of_an_agent_that_is_gone_ends_at_once(server: Server) -> None:
    """An engine that was away finds such requests in its queue, and the living agent's behind them."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = store.port
    del store
    with pytest.raises(EngineError, match="refused"):
        server.control(20).join_group("127.0.0.1", port, f"{AGENT}gone", 2)


@pytest.mark.parametrize("backend", ["gloo", IPC])
def test_an_engine_of_two_ranks_gets_only_what_each_keeps(tmp_path: Path, backend: str) -> None:
    """Of the first version every byte, by which a rank learns what it takes; later its own experts alone."""
    arguments = {"root": str(tmp_path), "backend": backend, "count": 4, "moves_at": 4}
    *trainers, first, second = run_on_ranks("partial_cases:versions", partial_cases.WORLD, 120, **arguments)
    assert trainers == [[""] * 5] * 2
    whole = sum(tensor.nbytes for tensor in partial_cases.tensors(1).values())
    for engine in (first, second):
        assert [held for _, held, _ in engine[:3]] == [True] * 3
        received = [nbytes for nbytes, *_ in engine]
        assert received[0] == whole and received[1:] == received[1:2] * 3
        # Half of the experts and of the rows, all columns; dealt out in whole pieces.
        assert received[1] == whole - (2 * 128 * 64 + 32 * 32) * 4
    assert "elsewhere" in first[3][2], "a load that would have to be watched again is refused"
    assert second[3][1:] == (True, "")
