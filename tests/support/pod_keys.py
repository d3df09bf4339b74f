"""Key files of pods, as kubelet mounts them, and agents that run with them."""

import base64
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from grpo_operator.api.keys import Epochs, secret_data, token
from grpo_operator.api.names import EPOCH, EPOCH_SECRET, KEY, key_secret
from grpo_worker.common import auth
from support.engine_server import free_port

FILES = {auth.FILE: "key", auth.EPOCH_FILE: "epoch", auth.PAIR_FILE: "pair"}


class PodKeys:
    """The key files of one pod. ``owner``: GRPOJob or RolloutPool. ``pool``: the shared one of a job."""

    def __init__(
        self, folder: Path, master: str, owner: dict[str, Any], epochs: Epochs, pool: str | None = None
    ) -> None:
        folder.mkdir()
        self._folder = folder
        for name, value in secret_data(master, owner, pool).items():
            (folder / name).write_text(value)
        self.see(epochs)

    def see(self, epochs: Epochs) -> None:
        """Replace the epochs in one step, as kubelet does."""
        new = self._folder / "epoch.new"
        new.write_text(epochs.text())
        new.replace(self._folder / "epoch")

    @property
    def env(self) -> dict[str, str]:
        """Variables of the pod's containers."""
        paths = {variable: self._folder / file for variable, file in FILES.items()}
        return {variable: str(path) for variable, path in paths.items() if path.is_file()}

    @contextmanager
    def inside(self, serves: str | None = None) -> Iterator[None]:
        """Let this process be one of the pod. ``serves``: job that an agent of a shared pool serves."""
        outside = {name: value for name, value in os.environ.items() if name not in FILES}
        with mock.patch.dict(os.environ, outside | self.env, clear=True):
            auth.serve(serves)
            try:
                yield
            finally:
                auth.serve(None)


def owner(kind: str, name: str, uid: str) -> dict[str, Any]:
    """Return a GRPOJob or RolloutPool."""
    return {"kind": kind, "metadata": {"name": name, "uid": uid}}


def first_epochs(overlap: float) -> Epochs:
    """Return the epochs of a namespace that has had no other."""
    return Epochs("first", time.time(), None, overlap)


@contextmanager
def agent_process(env: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Run the agent of a training pod as a process with these variables; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "grpo_worker.weightsync.main", "trainer", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--weights", str(folder)]
    process = subprocess.Popen(command, env=os.environ | dict(env))
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not _lives(url):
            assert process.poll() is None and time.monotonic() < deadline, "the agent does not start"
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def _lives(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def bearer(kubectl: Callable[..., str], of: dict[str, Any], entry: str = KEY) -> dict[str, str]:
    """Return the headers of a call to the pods of a job or pool, as its Secret in the cluster has it.

    ``entry``: of that Secret.
    """

    def read(secret: str, entry: str) -> str:
        encoded = kubectl("get", "secret", secret, "-o", f"jsonpath={{.data.{entry}}}")
        return base64.b64decode(encoded).decode()

    epochs = Epochs.read(read(EPOCH_SECRET, EPOCH))
    return {"authorization": f"Bearer {token(read(key_secret(of), entry), epochs.sent(time.time()))}"}
