"""Memory that crosses containers as a file descriptor, and the sockets over which it does."""

import gc
import os
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from grpo_operator.api.names import SOCKETS_VARIABLE
from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.transport import descriptors, rendezvous
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import TransferError, TransferGroup
from grpo_worker.weightsync.transport.shared_memory import SharedMemory, open_memory

CPU = torch.device("cpu")


@pytest.fixture
def stores() -> list[TCPStore]:
    """Return a store as the trainer rank and the engine rank see it."""
    own = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return [own, TCPStore("127.0.0.1", own.port, None, False)]


def _join(stores: list[TCPStore], rank: int) -> TransferGroup:
    return join(Backend.CUDA_IPC, stores[rank], "group", rank, 2, 1, CPU)


@pytest.fixture
def node() -> Iterator[Path]:
    """Return a folder with a short name, as paths of sockets must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def members(
    stores: list[TCPStore], node: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[TransferGroup]]:
    """Return a trainer rank and an engine rank of one group, which meet in the folder ``node``."""
    monkeypatch.setenv(SOCKETS_VARIABLE, str(node))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: _join(stores, rank), (0, 1)))
    yield found
    for member in found:
        member.close()


def test_both_ends_see_the_same_bytes_and_the_descriptor_is_closed() -> None:
    memory = SharedMemory.allocate(4096, CPU)
    passed = os.dup(memory.descriptor)
    other = open_memory(passed, memory.nbytes, CPU)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(passed)
    memory.data.fill_(7)
    memory.close()
    del memory
    gc.collect()
    assert other.eq(7).all() and other.nbytes == 4096


def test_members_meet_in_the_folder_of_the_node_and_leave_nothing(
    members: list[TransferGroup], node: Path
) -> None:
    trainer, engine = members
    assert not list(node.iterdir())
    sent, received = trainer.buffer(8192), torch.zeros(8192, dtype=torch.uint8)
    for value in (3, 4):
        sent.fill_(value)
        transfers = trainer.send([(sent, 1)], 1e12), engine.receive([(received, 0)], 1e12)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda transfer: transfer.wait(), transfers))
        assert received.eq(value).all()


def test_memory_that_cannot_be_shared_is_refused(members: list[TransferGroup]) -> None:
    with pytest.raises(TransferError, match=r"8192 bytes are not in a buffer\(\) of the group"):
        members[0].send([(torch.zeros(8192, dtype=torch.uint8), 1)], 1e12)


def test_pods_without_a_common_folder_are_named(
    stores: list[TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.5)
    own = descriptors.call
    monkeypatch.setattr(descriptors, "call", lambda path, rank: own(f"/nonexistent{path}", rank))
    with ThreadPoolExecutor(2) as pool:
        trainer, engine = (pool.submit(_join, stores, rank) for rank in (0, 1))
        with pytest.raises(TransferError, match=r"trainer rank 0 is not reached .*: do both pods mount it\?"):
            engine.result()
        with pytest.raises(TransferError, match="an engine rank did not connect"):
            trainer.result()


def test_a_member_that_ends_before_it_passes_its_memory_is_named() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(ConnectionResetError, match="buffer 0 did not come"):
        descriptors.take(ours, "buffer 0 did not come")
    ours.close()


def test_an_engine_that_ends_when_it_has_connected_is_an_error_of_the_link(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKETS_VARIABLE, str(node))
    listener = descriptors.Listener(1)
    with socket.socket(socket.AF_UNIX) as engine:
        engine.connect(str(listener.path))
    with pytest.raises(TransferError, match="an engine rank ended"), rendezvous.transfer_errors():
        listener.complete()
    listener.close()
