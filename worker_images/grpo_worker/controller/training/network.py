"""Network between the ranks of one gang at the start of an attempt: chosen by NCCL, and asked for."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_worker.profiling.nccl_transport import SOCKET, Transport
from grpo_worker.roles.host import RankHost

log = logging.getLogger(__name__)
_NAMED = 4  # pods that a text names
_NO_ADAPTER = (
    "NCCL found no RDMA adapter there: compare scheduling.rdma.devices with what the device plugin "
    "advertises, /dev/infiniband in the container with the node's, and NCCL_IB_HCA in scheduling.ncclEnv "
    "with `ibv_devices`"
)
_NOT_TRIED = (
    "NCCL did not get as far as looking for RDMA adapters there: remove NCCL_IB_DISABLE and NCCL_NET from "
    "scheduling.ncclEnv, and use an image with libibverbs"
)


@dataclass(frozen=True, slots=True)
class GangNetwork:
    """``text``: what NCCL uses, or "". ``problem``: it uses sockets although RDMA was asked for, or ""."""

    text: str = ""
    problem: str = ""


def gang_network(
    hosts: Sequence[RankHost], transports: Sequence[Transport], nccl: str, rdma: bool
) -> GangNetwork:
    """Return the network of a gang, and log it. ``nccl``: its version. ``rdma``: RDMA was asked for."""
    text = f"NCCL {nccl}: {_text(hosts, transports)}"
    log.info("%s", text)
    slow = [(host, t) for host, t in zip(hosts, transports, strict=True) if t.network == SOCKET]
    if not slow or not rdma:
        return GangNetwork(text)
    remedy = _NO_ADAPTER if any(transport.no_adapter for _, transport in slow) else _NOT_TRIED
    problem = (
        f"NCCL uses sockets in {_pods([h for h, _ in slow])}, but scheduling.rdma asks for RDMA. {remedy}"
    )
    log.warning("%s", problem)
    return GangNetwork(text, problem)


def _text(hosts: Sequence[RankHost], transports: Sequence[Transport]) -> str:
    """Return the networks, each with its pods if they differ, and the transports within hosts."""
    pods: dict[str, list[RankHost]] = {}
    for host, transport in zip(hosts, transports, strict=True):
        pods.setdefault(str(transport), []).append(host)
    several = len(pods) > 1
    networks = [f"{network} in {_pods(members)}" if several else network for network, members in pods.items()]
    direct = {t.gpu_direct for t in transports if t.network != SOCKET} - {None}
    gpu_direct = [f"{'without' if False in direct else 'with'} GPUDirect RDMA"] if direct else []
    local = sorted(frozenset().union(*(transport.local for transport in transports)))
    within = [f"{' and '.join(local)} within hosts"] if local else []
    return ", ".join([f"network {'; '.join(networks)}", *gpu_direct, *within])


def _pods(hosts: Sequence[RankHost]) -> str:
    names = list(dict.fromkeys(host.pod or host.address for host in hosts))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
