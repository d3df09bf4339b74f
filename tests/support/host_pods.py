"""Keys and clocks of a job's pods on their hosts: epochs may change, and clocks may be wrong."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx

from grpo_operator.api.keys import token
from grpo_worker.common import auth
from support.hosts import Host
from support.memory_limits import MemoryLimit
from support.pod_keys import PodKeys, first_epochs, owner

OVERLAP = 70.0  # seconds of a change of the key's epoch; more than clocks differ


class Pods:
    """The key of a job and the clock of a host, for all pods there."""

    def __init__(self, folder: Path, all_hosts: list[Host]) -> None:
        self.epochs = first_epochs(OVERLAP)
        self._folder, of = folder, owner("GRPOJob", "whole", "whole-uid")
        self._keys = {
            host.address: PodKeys(folder / f"keys-{host.address}", "master", of, self.epochs)
            for host in all_hosts
        }

    def environment(self, host: Host) -> dict[str, str]:
        """Return the variables of the containers with the key in the pods on a host."""
        return self._keys[host.address].env | self.clock(host)

    def clock(self, host: Host) -> dict[str, str]:
        """Return the variables of Python's processes that have the clock of a host."""
        return python_path() | {"GRPO_TEST_CLOCK": str(self._clock(host))}

    def set_clock(self, host: Host, ahead: float) -> None:
        """Set the clock of a host wrong by some seconds."""
        self._clock(host).write_text(str(ahead))

    def change_key(self, value: str, pause: float) -> None:
        """Begin another epoch, which the hosts see one after the other."""
        self.epochs = self.epochs.next(value, time.time(), OVERLAP)
        for keys in self._keys.values():
            keys.see(self.epochs)
            time.sleep(pause)

    def headers(self, epoch: str | None = None) -> dict[str, str]:
        """Return what a caller with the key sends, by default now."""
        key = next(iter(self._keys.values())).env[auth.FILE]
        sent = epoch or self.epochs.sent(time.time())
        return {"authorization": f"Bearer {token(Path(key).read_text(), sent)}"}

    def _clock(self, host: Host) -> Path:
        return self._folder / f"clock-{host.address}"


def python_path() -> dict[str, str]:
    """Return the variable by which Python finds what this process finds, and the clock."""
    here = Path(__file__).parent
    paths = [str(here / "clock_ahead"), str(here.parent), os.environ.get("PYTHONPATH", ""), *sys.path]
    absolute = [str(Path(path).resolve()) for text in paths for path in text.split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(absolute)}


def popen(
    host: Host, log: Path, environment: dict[str, str], *arguments: str, limit: MemoryLimit | None = None
) -> "subprocess.Popen[bytes]":
    """Start Python on a host, in a session of its own."""
    command = host.command(sys.executable, *arguments)
    own = os.environ | {"OMP_NUM_THREADS": "1"} | python_path() | environment
    with log.open("ab") as output:
        return subprocess.Popen(
            limit.command(shlex.join(command)) if limit else command, env=own, start_new_session=True,
            stdout=output, stderr=output,
        )  # fmt: skip


def kill_session(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answers(host: Host, url: str) -> bool:
    """Return whether a GET on the host has an answer with status 200."""
    with suppress(httpx.HTTPError):
        return bool(host.call(httpx.get, url, timeout=5).status_code == httpx.codes.OK)
    return False


def until(check: Callable[[], bool], seconds: float, words: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, words()
        time.sleep(0.2)
