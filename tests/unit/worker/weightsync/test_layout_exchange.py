"""Trainer ranks exchange their layouts, plan alike, and leave the layouts at the store for the agents."""

import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.agent import transfer_group
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.transfer_group import join
from grpo_worker.weightsync.protocol.group_offer import GroupOffer
from grpo_worker.weightsync.protocol.packed_layouts import join as join_layouts
from grpo_worker.weightsync.protocol.packed_layouts import pack, split, unpack
from grpo_worker.weightsync.protocol.tiling import PlanError
from grpo_worker.weightsync.trainer.endpoint import TrainerEndpoint
from grpo_worker.weightsync.trainer.layout_server import LayoutServer

CPU, BUCKET = torch.device("cpu"), 64


def parts(rank: int) -> list[Any]:
    whole = [(f"{name}{rank}", (4,), 0, 0, torch.zeros(4)) for name in "ab"]
    return [*whole, ("split", (8,), 0, 4 * rank, torch.zeros(4))]


class Gang:
    """Ranks that gather in threads. ``exchanges``: how often all of them did."""

    def __init__(self, world: int) -> None:
        self.exchanges = 0
        self._barrier = threading.Barrier(world)
        self._sent: list[bytes] = [b""] * world
        self.ranks = [TrainerEndpoint(rank, world, CPU, self._gather(rank)) for rank in range(world)]

    def _gather(self, rank: int) -> Any:
        def gather(own: bytes) -> Sequence[bytes]:
            self._sent[rank] = own
            self.exchanges += self._barrier.wait(5) == 0
            return list(self._sent)

        return gather

    def exchange(self, of_rank: Any = parts) -> None:
        calls = [(end.exchange_layouts, of_rank(end.rank)) for end in self.ranks]
        threads = [threading.Thread(target=call, args=(own, False)) for call, own in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class JoiningEngine:
    """Engine that joins every group."""

    def check_responsive(self) -> None: ...

    def join_group(self, *place: Any) -> bool:
        return True


def offer_of(end: TrainerEndpoint, name: str, plan_id: str) -> GroupOffer:
    return GroupOffer(name, "127.0.0.1", *end.listen(name), 3, 2, Backend.GLOO, plan_id, BUCKET)


def test_all_ranks_plan_alike_and_an_agent_reads_the_same_plan() -> None:
    gang = Gang(2)
    gang.exchange()
    first, second = (end.plan(BUCKET, False) for end in gang.ranks)
    assert first == second and first.plan_id and not first.problem
    joined = join(cast(Engine, JoiningEngine()), offer_of(gang.ranks[0], "group", first.plan_id), BUCKET)
    assert (joined.name, joined.transfer_plan.plan_id) == ("group", first.plan_id)
    assert sorted(tensor.name for tensor in joined.transfer_plan.tensors) == ["a0", "a1", "b0", "b1", "split"]
    assert gang.ranks[0].knows_layouts(False) and not gang.ranks[0].knows_layouts(True)
    assert gang.ranks[0].plan(BUCKET // 4, False).plan_id != first.plan_id and gang.exchanges == 1


def test_an_agent_reads_a_plan_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gang, engine, reads = Gang(2), cast(Engine, JoiningEngine()), []

    def counted(data: bytes) -> list[str]:
        reads.append(data)
        return split(data)

    monkeypatch.setattr(transfer_group, "split", counted)
    gang.exchange()
    known = None
    for name in ("one", "two"):
        plan_id = gang.ranks[0].plan(BUCKET, False).plan_id
        known = join(engine, offer_of(gang.ranks[0], name, plan_id), BUCKET, known).transfer_plan
    assert len(reads) == 1
    other = gang.ranks[0].plan(BUCKET // 4, False).plan_id
    join(engine, offer_of(gang.ranks[0], "three", other), BUCKET // 4, known)
    assert len(reads) == 2


def test_members_of_another_release_are_refused() -> None:
    gang = Gang(2)
    gang.exchange()
    plan_id = gang.ranks[0].plan(BUCKET, False).plan_id
    wrong = offer_of(gang.ranks[0], "group", "another")
    with pytest.raises(PlanError, match=f"here is {plan_id}, the offered one is another: use one release"):
        join(cast(Engine, JoiningEngine()), wrong, BUCKET)
    assert "trainer rank 0: the transfer plan here is" in gang.ranks[0].open(wrong)
    assert "trainer rank 1: it has planned no transfers" in gang.ranks[1].open(wrong)


def test_layouts_that_do_not_tile_are_an_answer_and_no_failure_of_the_rank() -> None:
    gang = Gang(2)
    gang.exchange(lambda rank: parts(rank) if rank else parts(0)[:2])
    planned = gang.ranks[1].plan(BUCKET, False)
    assert planned.plan_id == "" and "trainer rank 1: split: gap at 0" in planned.problem


def test_layouts_travel_behind_each_other() -> None:
    layouts = [f"layout {rank} " * 9 for rank in range(5)]
    packed = [pack(each) for each in layouts]
    assert unpack(packed) == split(join_layouts(packed)) == layouts
    with pytest.raises(PlanError, match=r"\d+ bytes of layouts came, expected \d+"):
        split(join_layouts(packed)[:-1])
    with pytest.raises(PlanError, match="no layouts: b'<html>'"):
        split(b"<html>")


def test_only_who_knows_the_name_of_the_group_gets_the_layouts() -> None:
    server = LayoutServer("grpo-link-2-secret", b"layouts")
    url = f"http://127.0.0.1:{server.port}/"
    with urllib.request.urlopen(url + "grpo-link-2-secret") as response:
        assert response.read() == b"layouts"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url + "grpo-link-2-another")
    server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url + "grpo-link-2-secret")


def test_trainer_ranks_that_do_not_answer_are_named() -> None:
    server = LayoutServer("group", b"")
    server.close()
    offer = GroupOffer("group", "127.0.0.1", 1, server.port, 3, 2, Backend.GLOO, "plan", BUCKET)
    with pytest.raises(PlanError, match="the trainer ranks' layouts do not come"):
        join(cast(Engine, JoiningEngine()), offer, BUCKET)
