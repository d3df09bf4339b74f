"""Summary and warning of the network between the ranks of a gang."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_worker.controller.training.network import GangNetwork, gang_network
from grpo_worker.profiling.nccl_transport import Transport
from grpo_worker.roles.host import RankHost
from support.loop_world import World
from support.objects import job

HOSTS = [RankHost(f"10.0.0.{n // 2}", n, f"trainer-{n // 2}") for n in range(8)]  # two ranks in a pod
IB = Transport("IB", tuple(f"mlx5_{n}" for n in range(8)), None, frozenset({"P2P/IPC"}))
SOCKET = Transport("Socket", ("eth0",), no_adapter=True)


def network(*transports: Transport, rdma: bool = True) -> GangNetwork:
    return gang_network(HOSTS, transports, "2.30.7", rdma)


def test_one_network_is_one_line() -> None:
    sends = replace(IB, gpu_direct=True, local=frozenset())  # a rank whose neighbours are in other pods
    expected = "NCCL 2.30.7: network IB (8 devices), with GPUDirect RDMA, P2P/IPC within hosts"
    assert network(*[IB] * 7, sends) == GangNetwork(expected)
    assert network(*[IB] * 8).text == "NCCL 2.30.7: network IB (8 devices), P2P/IPC within hosts"
    slower = network(*[IB] * 6, sends, replace(sends, gpu_direct=False)).text
    assert "without GPUDirect RDMA" in slower


def test_pods_with_sockets_are_named_with_a_remedy() -> None:
    found = network(*[IB] * 6, SOCKET, SOCKET)
    assert "IB (8 devices) in trainer-0, trainer-1, trainer-2; Socket (eth0) in trainer-3" in found.text
    assert found.problem.startswith("NCCL uses sockets in trainer-3, but scheduling.rdma asks for RDMA.")
    assert "scheduling.rdma.devices" in found.problem and "/dev/infiniband" in found.problem


def test_disabled_rdma_has_another_remedy() -> None:
    found = network(*[replace(SOCKET, no_adapter=False)] * 8)
    assert "remove NCCL_IB_DISABLE and NCCL_NET from scheduling.ncclEnv" in found.problem


def test_many_pods_are_counted() -> None:
    hosts = [RankHost(f"10.0.0.{n}", n, f"trainer-{n}") for n in range(9)]
    problem = gang_network(hosts, [SOCKET] * 9, "2.30.7", True).problem
    assert "in trainer-0, trainer-1, trainer-2, trainer-3 and 5 more, but" in problem


@pytest.mark.parametrize("transport", [IB, Transport(), Transport("AWS Libfabric")])
def test_only_sockets_are_a_problem(transport: Transport) -> None:
    assert network(*[transport] * 8).problem == ""


def test_sockets_are_no_problem_where_nothing_was_asked_for() -> None:
    found = network(*[SOCKET] * 8, rdma=False)
    assert found == GangNetwork("NCCL 2.30.7: network Socket (eth0)")


@pytest.mark.parametrize(("device", "asks"), [("cuda", True), ("cuda", False), ("cpu", False)])
def test_the_status_shows_it_before_the_first_step(tmp_path: Path, device: str, asks: bool) -> None:
    rdma: dict[str, Any] = {"scheduling": {"rdma": {"devices": [{"resource": "rdma/hca"}]}}} if asks else {}
    trainer = job()["spec"]["trainer"] | {"device": device}
    world = World(tmp_path, steps=1, trainer=trainer, **rdma)
    world.transport = SOCKET
    world.run()
    first = next(status for status in world.seen if status.network or status.step)
    expected = "network Socket (eth0)" if device == "cuda" else ""
    assert expected in first.network and bool(first.network) == (device == "cuda")
    assert bool(first.network_problem) == asks
    assert ("transport" in world.calls) == (device == "cuda"), "ranks without GPUs are not asked"
