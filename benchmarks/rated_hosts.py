"""Hosts of a benchmark: network namespaces on one bridge, with interfaces that tc limits. Needs root."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "eth0"  # of every host
ADDRESS = "10.232.9.254"  # of this machine, as the hosts see it
_SUBNET = ADDRESS.rpartition(".")[0]
_BRIDGE = "grpo-bridge"


def inside(host: int) -> tuple[str, ...]:
    """Return the beginning of a command that runs on a host."""
    return "ip", "netns", "exec", f"grpo-host-{host}"


@contextmanager
def rated_hosts(count: int, megabits: int) -> Iterator[None]:
    """Create ``count`` hosts whose interfaces carry ``megabits`` per second in each direction."""
    _remove(count)
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    try:
        _run("ip", "address", "add", f"{ADDRESS}/24", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        for host in range(count):
            _add(host, megabits)
        yield
    finally:
        _remove(count)


def _add(host: int, megabits: int) -> None:
    limit = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "30ms")
    space, outer = f"grpo-host-{host}", f"grpo-h{host}"
    _run("ip", "netns", "add", space)
    _run("ip", "link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", space)
    _run("ip", "link", "set", outer, "master", _BRIDGE, "up")
    _run("tc", "qdisc", "add", "dev", outer, *limit)  # towards the host
    for command in (
        ("ip", "address", "add", f"{_SUBNET}.{host + 1}/24", "dev", INTERFACE),
        ("ip", "link", "set", INTERFACE, "up"),
        ("ip", "link", "set", "lo", "up"),
        ("tc", "qdisc", "add", "dev", INTERFACE, *limit),  # away from it
    ):
        _run(*inside(host), *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _remove(count: int) -> None:
    for host in range(count):
        _try("ip", "netns", "delete", f"grpo-host-{host}")
    _try("ip", "link", "delete", _BRIDGE)


def _try(*command: str) -> None:
    subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
