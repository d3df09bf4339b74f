"""Transfer groups use the backend that they are given, and offers of links carry it."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.protocol import link_exchange
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.trainer.links import TrainerLinks
from grpo_worker.weightsync.transport import process_group, rendezvous, torch_group
from grpo_worker.weightsync.transport.cuda_ipc import CudaIpcGroup
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.process_group import CollectiveGroup
from grpo_worker.weightsync.transport.rendezvous import TransferError, TransferGroup

OFFER = LinkOffer("link", "gang", "10.0.0.1", 1234, 2, 4, 2, Backend.GLOO, 64, 1, fp8=False)
CPU = torch.device("cpu")


def test_an_offer_survives_json() -> None:
    received = LinkOffer.from_json(json.loads(json.dumps(OFFER.to_json())))
    assert received == OFFER and received.backend is Backend.GLOO
    with pytest.raises(ValueError, match="carrier-pigeon"):
        LinkOffer.from_json(OFFER.to_json() | {"backend": "carrier-pigeon"})
    assert received.world == 6


def test_messages_are_forwarded_within_a_host_unless_ranks_read_the_trainers_memory() -> None:
    assert [OFFER.host_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    offer = replace(OFFER, backend=Backend.CUDA_IPC)
    assert [offer.host_of(rank) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("backend", "device"), [(Backend.NCCL, "cpu"), (Backend.GLOO, "cuda")])
def test_a_backend_that_cannot_use_the_device_is_refused(backend: Backend, device: str) -> None:
    with pytest.raises(TransferError, match=f"{backend} cannot transfer weights on {device}"):
        join(backend, None, "group", 0, 1, 1, torch.device(device))


@pytest.mark.parametrize(
    ("backend", "kind"), [(Backend.GLOO, CollectiveGroup), (Backend.CUDA_IPC, CudaIpcGroup)]
)
def test_the_backend_selects_the_group(backend: Backend, kind: type) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    group = join(backend, store, f"group-{backend}", 0, 1, 1, CPU)
    assert type(group) is kind
    group.close()


def test_a_member_asks_the_store_less_often_the_longer_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of members of each link ask one process."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    group = join(Backend.CUDA_IPC, store, "group", 0, 1, 1, CPU)
    now = [0.0]
    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(rendezvous, "time", fake)
    looks: list[float] = []

    def done() -> bool:
        looks.append(now[0])
        return False

    with pytest.raises(TransferError, match="nobody in 60 s"):
        group.wait_for(done, lambda: "nobody")
    assert len(looks) < 150
    assert max(after - before for before, after in pairwise(looks)) <= 1.0
    assert sum(look < 1 for look in looks) > 10, "a link that forms at once is noticed at once"


def test_a_process_survives_the_members_of_its_transfer_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reads its environment when a group is created; benchmarks/gpu/lost_member.py kills a member."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in names:
        monkeypatch.setenv(name, "1")
    seen: list[list[str | None]] = []

    def created(*_: object, **__: object) -> tuple[str, None]:
        seen.append([os.environ.get(name) for name in names])
        return "group", None

    monkeypatch.setattr(torch_group, "_new_process_group_helper", created)
    monkeypatch.setattr(torch_group, "_world", SimpleNamespace(pg_group_ranks={}))
    store = PrefixStore("link", TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
    torch_group.join(store, "link", 0, 2, timedelta(seconds=1), "nccl")
    assert seen == [["0", "0"]]


class _Slow:
    """A collective that takes some seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def is_completed(self) -> bool:
        return time.monotonic() >= self._end

    def wait(self) -> None: ...


@pytest.mark.parametrize(("connected", "seconds", "forms"), [(6, 1.6, True), (0, 60.0, False)])
def test_the_first_collective_may_take_long_while_members_connect(
    connected: int, seconds: float, forms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0.5 s of patience it takes 1.6 s, in which another member connects every 0.3 s, or none does."""
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.5)
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: _Slow(seconds))
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def connect() -> None:
        for _ in range(connected):
            time.sleep(0.3)
            PrefixStore("group", store).add("beats", 1)

    others = threading.Thread(target=connect)
    others.start()
    began = time.monotonic()
    try:
        if forms:
            join(Backend.GLOO, store, "group", 0, 1, 1, CPU).close()
            assert time.monotonic() - began > 1
        else:
            with pytest.raises(TransferError, match="first collective did not end"):
                join(Backend.GLOO, store, "group", 0, 1, 1, CPU)
            assert time.monotonic() - began < 2
    finally:
        others.join()


class _Member(TransferGroup):
    """A member that only assembles with the others: a process cannot be two members of a process group."""

    def exchange(self, sends: Any, receives: Any, deadline: float) -> Any: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("beats", [True, False])
def test_an_engine_waits_while_the_ranks_open_earlier_links(
    beats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.5)
    monkeypatch.setattr(link_exchange, "_BEAT_SECONDS", 0.1)
    links = TrainerLinks(0, 1, CPU)
    links._store = store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    connected = TCPStore("127.0.0.1", store.port, None, False)
    with ThreadPoolExecutor(1) as engine:
        waiting = engine.submit(_Member, connected, "second", 1, 2, 1, CPU)
        with links.beating(["second"] if beats else []):
            time.sleep(1.5)
        if beats:
            _Member(store, "second", 0, 2, 1, CPU)
            waiting.result(10)
        else:
            assert "did not come" in str(waiting.exception(10))


def test_members_with_another_nccl_are_refused_before_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    engine = Backend.NCCL, store, "link", 1, 2, 1, torch.device("cuda")
    PrefixStore("link", store).compare_set("nccl", "", "2.28.9")
    monkeypatch.setattr(process_group, "nccl_version", lambda: "2.27.5")
    with pytest.raises(
        TransferError, match=r"has NCCL 2\.27\.5, another member of the group 2\.28\.9: build"
    ):
        CollectiveGroup(*engine)


def test_the_first_member_tells_its_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setattr(process_group, "nccl_version", lambda: "2.28.9")
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.2)
    with pytest.raises(TransferError, match=r"ranks \[1\] did not come"):
        CollectiveGroup(Backend.NCCL, store, "link", 0, 2, 1, torch.device("cuda"))
    assert PrefixStore("link", store).get("nccl") == b"2.28.9"
