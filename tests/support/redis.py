"""A real Redis server, as a process of this machine; on the devcluster, for the heads of jobs."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster.addons import kubectl
from grpo_devcluster.settings import GATEWAY
from support.jobs import apply

_SERVER = "/usr/bin/redis-check-rdb"  # of Debian's redis-tools; under the name redis-server it is the server
_SECRET, _KEY, _PASSWORD = "redis", "password", "a-password-of-tests"


class RedisServer:
    """The server's process, which keeps nothing on disk. ``password``: of clients; empty: they need none."""

    def __init__(self, log: Path, host: str, password: str = "") -> None:
        # Below the ports that the kernel gives away, and above those that Ray gives to its workers.
        self.host, self.port = host, 20_000 + os.getpid() % 10_000
        self._password = password
        lines = [f"bind {host}", f"port {self.port}", 'save ""']
        lines += [f"requirepass {password}"] if password else []
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                ["redis-server", "-"], executable=_SERVER, stdin=subprocess.PIPE, stdout=file,
                stderr=subprocess.STDOUT, cwd=log.parent, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write("\n".join(lines).encode())  # other users do not see it there
        self._process.stdin.close()
        self._await(log)

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def ask(self, *command: str) -> str:
        """Send a command; return the answer."""
        client = ["redis-cli", "-h", self.host, "-p", str(self.port), *command]
        environment = os.environ | ({"REDISCLI_AUTH": self._password} if self._password else {})
        done = subprocess.run(client, env=environment, capture_output=True, text=True, check=False)
        return (done.stdout or done.stderr).strip()

    def stop(self) -> None:
        """Kill the server; what it has kept is lost."""
        self._process.kill()
        self._process.wait()

    def _await(self, log: Path) -> None:
        deadline = time.monotonic() + 30
        while self.ask("ping") != "PONG":
            assert self._process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class HeadState:
    """Redis at an address that pods reach."""

    server: RedisServer

    @property
    def head(self) -> dict[str, Any]:
        """Value of ``spec.head`` for jobs of the namespace ``default``."""
        password = {"secret": _SECRET, "key": _KEY}
        return {"gcsFaultTolerance": {"redisAddress": self.server.address, "redisPassword": password}}


@contextmanager
def head_state(kubeconfig: Path, log: Path) -> Iterator[HeadState]:
    """Start Redis on the devcluster's bridge, with its password in a Secret of the namespace ``default``.

    Jobs must be deleted before the end: KubeRay then removes what their heads have kept.
    """
    server = RedisServer(log, GATEWAY, _PASSWORD)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": _SECRET, "namespace": "default"},
        "stringData": {_KEY: _PASSWORD},
    }
    try:
        apply(kubeconfig, yaml.safe_dump(secret), "apply", "-f", "-")
        yield HeadState(server)
    finally:
        kubectl("-n", "default", "delete", "secret", _SECRET, "--ignore-not-found", kubeconfig=kubeconfig)
        server.stop()
