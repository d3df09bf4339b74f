"""Hosts with interfaces of their own on this machine: network namespaces at one switch; needs root."""

import ctypes
import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

_NETWORK = "10.77.0"
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


class _Space:
    """Network and mounts of their own. ``prepare``: shell command that runs in them first."""

    def __init__(self, prepare: str = "true") -> None:
        shell = f"{prepare} && echo ready && exec sleep infinity"
        command = ["unshare", "--net", "--mount", "bash", "-c", shell]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout and self._holder.stdout.readline() == "ready\n", "this needs root"
        self.pid = str(self._holder.pid)

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs ``command`` in them, under the same process id."""
        return ["nsenter", "--target", self.pid, "--net", "--mount", *command]

    def ip(self, *arguments: str) -> None:
        _run(*self.command("ip", *arguments))

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Host:
    """A host with the address ``address``, at the interface eth0. ``memory``: /dev/shm is its own."""

    def __init__(self, switch: _Space, folder: Path, name: str, number: int, memory: bool) -> None:
        self.address = f"{_NETWORK}.{number}"
        self._switch, self._port = switch, f"to-{name}"
        self._system = folder / name  # the kernel's view of the host's interfaces
        self._system.mkdir()
        names = folder / f"{name}.hosts"
        names.write_text(f"127.0.0.1 localhost\n{self.address} {os.uname().nodename}\n")
        mounts = f"mount -t sysfs none {self._system} && mount --bind {names} /etc/hosts"
        self._space = _Space(f"{mounts} && mount -t tmpfs none /dev/shm" if memory else mounts)
        ends = ["type", "veth", "peer", "name", "eth0", "netns", self._space.pid]
        switch.ip("link", "add", self._port, *ends)
        switch.ip("link", "set", self._port, "master", "switch", "up")
        self._space.ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            self._space.ip("link", "set", interface, "up")
        # A route that leads nowhere: SGLang takes the source address of such a one for its own.
        self._space.ip("route", "add", "default", "dev", "eth0")
        self._inside = ThreadPoolExecutor(4, initializer=self._enter)

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs ``command`` on the host, under the same process id."""
        return self._space.command(*command)

    def call(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Call a function in a thread whose connections are the host's."""
        return self._inside.submit(function, *arguments, **keywords).result()

    def plug(self, *, out: bool) -> None:
        """Pull out the cable of the interface, or put it back."""
        self._switch.ip("link", "set", self._port, "down" if out else "up")

    @property
    def carrier(self) -> bool:
        """True while the interface has a carrier."""
        return self._of_interface("carrier") == 1

    @property
    def outages(self) -> int:
        """Number of times that the interface has lost its carrier."""
        return self._of_interface("carrier_down_count")

    @contextmanager
    def flapping(self, times: int, seconds: float) -> Iterator[None]:
        """Pull out the cable ``times``, each for so long, with as long pauses; end with the context."""
        before = self.outages

        def flap() -> None:
            for _ in range(times):
                self.plug(out=True)
                time.sleep(seconds)
                self.plug(out=False)
                time.sleep(seconds)

        with ThreadPoolExecutor(1) as thread:
            flaps = thread.submit(flap)
            yield
            flaps.result()
        assert self.outages - before >= times, "the interface was always up"

    @contextmanager
    def losing(self, share: float) -> Iterator[None]:
        """Drop a share of all packets, of both directions; check that some were lost."""
        lost = ["-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
        rules = [["INPUT", "-i", "eth0", *lost], ["OUTPUT", "-o", "eth0", *lost]]
        for rule in rules:
            _run(*self.command("iptables", "-I", *rule))
        try:
            yield
            shown = _run(*self.command("iptables", "-nvxL"))
            counts = [int(line.split()[0]) for line in shown.splitlines() if " DROP " in line]
            assert len(counts) == len(rules) and min(counts) > 0, f"no packet was lost: {shown}"
        finally:
            for rule in rules:
                _run(*self.command("iptables", "-D", *rule))

    @contextmanager
    def slow(self, rate: str) -> Iterator[None]:
        """Limit what the host sends to ``rate`` (tc syntax); check that packets were held back."""
        shape = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s"]
        _run(*self.command("tc", "qdisc", "add", "dev", "eth0", *shape))
        try:
            yield
            shown = _run(*self.command("tc", "-s", "qdisc", "show", "dev", "eth0"))
            held = re.search(r"overlimits (\d+)", shown)
            assert held and int(held[1]), f"no packet had to wait: {shown}"
        finally:
            _run(*self.command("tc", "qdisc", "delete", "dev", "eth0", "root"))

    def remove(self) -> None:
        self._inside.shutdown(wait=False)
        self._space.end()

    def _of_interface(self, name: str) -> int:
        return int(_run(*self.command("cat", str(self._system / "class" / "net" / "eth0" / name))))

    def _enter(self) -> None:
        with Path(f"/proc/{self._space.pid}/ns/net").open() as space:
            failed = ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET)
            assert not failed, os.strerror(ctypes.get_errno())


@contextmanager
def hosts(*names: str, memory: Collection[str] = ()) -> Iterator[list[Host]]:
    """Make hosts that reach each other and nothing else.

    ``memory``: those with a /dev/shm of their own, by which SGLang's ranks tell whether they share a host.
    """
    switch, made = _Space(), list[Host]()
    with TemporaryDirectory() as folder:
        try:
            switch.ip("link", "add", "switch", "type", "bridge")
            switch.ip("link", "set", "switch", "up")
            for number, name in enumerate(names, 2):
                made.append(Host(switch, Path(folder), name, number, name in memory))
            yield made
        finally:
            for host in made:
                host.remove()
            switch.end()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
