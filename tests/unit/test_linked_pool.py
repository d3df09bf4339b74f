"""When a link is opened, who is in it, and what becomes of it after a failure."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from grpo_operator.api.status import EngineState
from grpo_worker.controller.trainers import TrainerGang
from grpo_worker.data.fp8 import Part
from grpo_worker.rollout.linked import LinkedPool
from grpo_worker.rollout.pool import RolloutPool, SyncError
from grpo_worker.rollout.routing import EngineEntry
from grpo_worker.weightsync.link.peers import LinkError
from grpo_worker.weightsync.manifest import layout

A, B = (
    EngineEntry(name, f"10.0.0.{n}", EngineState.SERVING, 1, ranks=n, bucket_bytes=64)
    for n, name in enumerate(("a", "b"), start=1)
)


PARTS: list[list[Part]] = [[(f"w{rank}", (4,), 0, 0, torch.zeros(4))] for rank in (0, 1)]


class Gang:
    """Two ranks that write down what they are asked for."""

    world, address = 2, "10.0.1.1"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.problem = ""

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        if method == "listen":
            return 1234
        if method == "weight_layout":
            return [layout(rank, 2, PARTS[rank]).to_json() for rank in (0, 1)]
        return ["", self.problem if method == "send_weights" else ""]

    def tell(self, method: str) -> None:
        self.calls.append(method)


class Pool:
    """Engines whose agents answer at once."""

    fp8 = False

    def __init__(self, *engines: EngineEntry) -> None:
        self.engines = list(engines)
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    @contextmanager
    def reserved(self) -> Iterator[list[EngineEntry]]:
        yield self.engines

    def ask(self, engine: EngineEntry, what: str, timeout: float, **body: Any) -> "Future[Any]":
        self.asked.append((engine.name, what, body))
        future: Future[Any] = Future()
        answer = self.answers.get(engine.name, {"seconds": {"pause": float(engine.ranks)}})
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return future


def linked(gang: Gang, pool: Pool) -> LinkedPool:
    return LinkedPool(cast(TrainerGang, gang), cast(RolloutPool, pool), "gloo", 1.0)


def test_the_members_of_a_link_have_ranks_after_the_trainers() -> None:
    gang, pool = Gang(), Pool(A, B)
    assert linked(gang, pool).send(1) == {"pause": 2.0}, "the slowest engine counts"
    offers = {name: body["offer"] for name, what, body in pool.asked if what == "link"}
    assert [(offers[n]["first"], offers[n]["world"], offers[n]["port"]) for n in "ab"] == [
        (2, 5, 1234),
        (3, 5, 1234),
    ]


def test_a_link_stays_open_while_its_members_are_the_same() -> None:
    gang, pool = Gang(), Pool(A)
    link = linked(gang, pool)
    for version in (1, 2):
        link.send(version)
    assert gang.calls.count("open_link") == 1
    pool.engines = [replace(A, restarts=1)]
    link.send(3)
    pool.engines.append(B)
    link.send(4)
    pool.engines[1] = replace(B, instance="another")
    link.send(5)
    assert gang.calls.count("open_link") == 4
    link.begin_attempt()
    link.send(6)
    assert gang.calls.count("open_link") == 5, "the new gang is in no link"


def test_after_failures_the_same_members_are_tried_ever_more_seldom() -> None:
    gang, pool = Gang(), Pool(A)
    link = linked(gang, pool)
    link.send(0)
    gang.problem = "trainer rank 1: peer is gone"
    tried = []
    for version in range(1, 13):
        before = gang.calls.count("send_weights")
        with pytest.raises(LinkError):
            link.send(version)
        if gang.calls.count("send_weights") > before:
            tried.append(version)
    assert tried == [1, 3, 7] and link.failures == 3
    pool.engines = [replace(A, restarts=1)]
    gang.problem = ""
    link.send(13)
    assert gang.calls.count("send_weights") == 5, "another engine is tried at once"


def test_a_member_that_fails_ends_it_for_all_and_is_named() -> None:
    gang, pool = Gang(), Pool(A, B)
    link = linked(gang, pool)
    link.send(1)
    pool.answers = {"a": {"error": "a: version 2, prepare: no answer"}, "b": SyncError("b: gone")}
    gang.problem = "trainer rank 1: another member gave up"
    with pytest.raises(LinkError) as failure:
        link.send(2)
    assert all(part in str(failure.value) for part in ("a: version 2, prepare", "b: gone", "trainer rank 1"))
    assert gang.calls.count("give_up_link") == 2
    assert gang.calls[-1] == "close_link"


def test_nobody_to_link_and_buckets_that_differ_are_said() -> None:
    gang = Gang()
    with pytest.raises(LinkError, match="no engine is there"):
        linked(gang, Pool()).send(1)
    with pytest.raises(LinkError, match=r"different sizes: \[64, 128\] bytes"):
        linked(gang, Pool(A, replace(B, bucket_bytes=128))).send(1)
    assert "open_link" not in gang.calls
