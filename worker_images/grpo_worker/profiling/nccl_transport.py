"""Transport that NCCL chose, read from its log (pure)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

SOCKET = "Socket"  # NCCL's name of its network without RDMA
_NETWORK = re.compile(r"NCCL INFO Using network (.+)$")
_DEVICES = re.compile(r"NCCL INFO NET/(\w+) : Using (.*)$")
_DEVICE = re.compile(r"\[\d+\]([^:\s]+):")
_CHANNEL = re.compile(r"NCCL INFO Channel .* via (\w+)/(.+)$")
_NO_ADAPTER = "NCCL INFO NET/IB : No device found"
_NAMED = 2  # devices that a text names


@dataclass(frozen=True, slots=True)
class Transport:
    """Transport of one process.

    ``network``: between hosts, by NCCL's name such as IB or Socket, "" if not known. ``devices``: of the
    network, such as mlx5_0 or eth0. ``gpu_direct``: adapters access GPU memory themselves; None: no
    connection has left the host yet. ``local``: transports within the host, such as P2P/IPC.
    ``no_adapter``: NCCL looked for RDMA adapters and found none.
    """

    network: str = ""
    devices: tuple[str, ...] = ()
    gpu_direct: bool | None = None
    local: frozenset[str] = frozenset()
    no_adapter: bool = False

    def __str__(self) -> str:
        """Return the network for people, as in ``IB (8 devices)``."""
        if not self.network:
            return "not known"
        if not self.devices:
            return self.network
        few = len(self.devices) <= _NAMED
        return f"{self.network} ({', '.join(self.devices) if few else f'{len(self.devices)} devices'})"


def transport_of(lines: Iterable[str]) -> Transport:
    """Return what the lines of NCCL's log say, of level INFO and subsystem INIT."""
    network, no_adapter = "", False
    devices: dict[str, tuple[str, ...]] = {}  # by network
    direct: list[bool] = []
    local: set[str] = set()
    for line in map(str.rstrip, lines):
        if match := _NETWORK.search(line):
            network = match[1]
        elif match := _DEVICES.search(line):
            used, _, _ = match[2].partition("; OOB")
            devices[match[1]] = tuple(_DEVICE.findall(used))
        elif match := _CHANNEL.search(line):
            kind, rest = match.groups()
            if kind == "NET":
                direct.append("/GDRDMA" in rest)
            else:
                local.add(f"{kind}/{rest.partition('/')[0]}")
        no_adapter = no_adapter or _NO_ADAPTER in line
    # Plugins for RDMA, such as IBext, use the adapters that the line of NET/IB names.
    own = next((found for name, found in devices.items() if network.startswith(name)), ())
    return Transport(network, own, all(direct) if direct else None, frozenset(local), no_adapter)
