"""A Ray head that can be lost and comes back, and nodes that can be lost, as processes of this machine."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from grpo_operator.render.job_pods import _LEAVING, _RAY_NODE, _UNTIL_LEFT
from grpo_operator.render.pod_template import _HEAD_ENV
from support.redis import RedisServer

HEAD = "127.0.0.10"
_RAY = Path(sys.executable).parent / "ray"
# A container: its first process, the shell, sees the processes that it has started and no others.
_POD = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
_STANDS = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
_CHECKS = {name: value for name, value in _HEAD_ENV.items() if "health_check" in name}
SLOW_START = {"RAY_raylet_start_wait_time_s": "60", "RAY_AUTH_MODE": "disabled"}
# What KubeRay sets in the pods of workers if gcsFaultToleranceOptions is given.
_RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}


class RayCluster:
    """Redis, a head that keeps its state there, and nodes: IP address -> number of ranks that fit.

    ``environment``: of the nodes' processes. ``folder``: for logs; Ray's own files are in a short path.
    """

    def __init__(self, folder: Path, nodes: Mapping[str, int], environment: dict[str, str]) -> None:
        self._folder = folder
        self._temp = Path(f"/tmp/grpo-ray-{os.getpid()}")
        self._environment = environment | SLOW_START
        self._redis = RedisServer(folder / "redis.log", "127.0.0.1")
        self._port = self._redis.port + 1
        self._heads, self._wanted, self._ended = 0, threading.Event(), threading.Event()
        self._head: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._keep_head, daemon=True).start()
        self.start_head()
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        for address, ranks in nodes.items():
            self.add_node(address, ranks)

    @property
    def address(self) -> str:
        """Address of the head."""
        return f"{HEAD}:{self._port}"

    def add_node(self, address: str, ranks: int, weights: Path | None = None) -> None:
        """Start a node and wait until it runs. ``weights``: as a training pod, with this folder for them."""
        command = [
            _RAY, "start", "--block", f"--address={self.address}", f"--node-ip-address={address}",
            "--num-cpus=0", f'--resources={{"trainer": {ranks}}}' if ranks else "--resources={}",
            "--object-store-memory=100000000",
        ]  # fmt: skip
        more = _RECONNECT
        if weights is not None:
            more = more | {"KUBERAY_GEN_RAY_START_CMD": shlex.join(map(str, command))}
            more |= {"GRPO_WEIGHTS_DIR": str(weights)}
            shell = f"trap ': > {_LEAVING}' TERM; ({_RAY_NODE}; exit $rc) {_UNTIL_LEFT}"
            command = [*_POD, shell.replace(str(Path(_LEAVING).parent), str(weights))]
        deadline, log = time.monotonic() + 300, self._folder / f"{address}.log"
        started = self._nodes[address] = self._popen(command, more, address)
        while "Ray runtime started" not in log.read_text():
            if started.poll() is not None:  # on a busy machine Ray gives up a start that takes too long
                started = self._nodes[address] = self._popen(command, more, address)
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def kill_node(self, address: str) -> list[str]:
        """Kill all processes of a node at once; return their names."""
        return _kill(self._nodes.pop(address))

    def terminate_pod(self, address: str) -> "subprocess.Popen[bytes]":
        """Send SIGTERM to the first process of a pod, as kubelet does; return the pod's process."""
        pod = self._nodes.pop(address)
        (first,) = psutil.Process(pod.pid).children()
        first.terminate()
        return pod

    def stop_node(self, address: str) -> list[str]:
        """Stop all processes of a node at once, which never go on; return their names."""
        processes = _family(self._nodes[address])
        for process in processes:
            process.suspend()
        deadline = time.monotonic() + 10
        while not all(process.status() in _STANDS for process in processes):
            assert time.monotonic() < deadline, [(p.name(), p.status()) for p in processes]
            time.sleep(0.05)
        return [process.name() for process in processes]

    def kill_head(self) -> list[str]:
        """Kill all processes of the head at once; return their names."""
        self._wanted.clear()
        assert self._head is not None
        names = _kill(self._head)
        assert not self._listens(), "the head lives"
        return names

    def start_head(self) -> None:
        """Start the head and wait until it listens."""
        self._wanted.set()
        self._await_head(120)

    def _keep_head(self) -> None:
        """Start the head whenever it has ended, as kubelet does."""
        while not self._ended.wait(0.5):
            if self._wanted.is_set() and (self._head is None or self._head.poll() is not None):
                (self._temp / "ray_current_cluster").unlink(missing_ok=True)  # the node of a pod has its own
                self._head = self._start_head()

    def end(self) -> None:
        """Kill everything."""
        self._ended.set()
        time.sleep(1)  # for the thread that keeps the head
        for process in (*self._nodes.values(), self._head):
            if process is not None:
                _kill(process)
        self._redis.stop()
        shutil.rmtree(self._temp, ignore_errors=True)

    def _start_head(self) -> "subprocess.Popen[bytes]":
        self._heads += 1
        command = [
            _RAY, "start", "--head", "--block", f"--port={self._port}", f"--node-ip-address={HEAD}",
            "--num-cpus=0", "--include-dashboard=false", "--object-store-memory=100000000",
            "--disable-usage-stats", f"--temp-dir={self._temp}",
        ]  # fmt: skip
        state = {"RAY_REDIS_ADDRESS": self._redis.address, "RAY_external_storage_namespace": "job"} | _CHECKS
        return self._popen(command, state, f"head-{self._heads}")

    def _popen(self, command: list[Any], more: dict[str, str], log: str) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{log}.log").open("wb") as file:
            return subprocess.Popen(
                [str(part) for part in command], env=self._environment | more, cwd=self._folder, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _await_head(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._listens():
            assert time.monotonic() < deadline, "the head does not start"
            time.sleep(0.2)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HEAD, self._port)) == 0


def _kill(process: "subprocess.Popen[bytes]") -> list[str]:
    """Kill a process and all that it has started; return their names."""
    if process.poll() is not None:
        return []
    processes = _family(process)
    names = [process.name() for process in processes]
    for each in processes:
        each.kill()
    process.wait()
    psutil.wait_procs(processes[1:], timeout=10)
    return names


def _family(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Return a process and all that it has started."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]
