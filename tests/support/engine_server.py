"""A real SGLang server, started as in a rollout pod, and helpers to use it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn

from grpo_devcluster.cpu_engine import environment
from grpo_operator.api.names import AGENT_PORT, ENGINE_PORT
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec, RolloutTemplate
from grpo_operator.render.sglang_command import (
    API_KEY_FOLDER,
    KEYED_ENGINE_ENV,
    MODEL_DIRECTORY,
    SERVING_ENV,
    cpu_engine_env,
    engine_command,
    serving_command,
)
from grpo_worker.common import tls
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.trainer.agent import application

JOB = "tiny-12345678"
URL = f"http://127.0.0.1:{ENGINE_PORT}"  # of the session's engine


class Server:
    """The engine exactly as a rollout pod starts it, on this machine."""

    def __init__(
        self, directory: Path, model: str = "preset:tiny-moe", port: int = ENGINE_PORT,
        agent_port: int = AGENT_PORT, host: int = 0, plugins: str | None = None, address: str = "127.0.0.1",
        serve_key: str | None = None, **engine: Any,
    ) -> None:  # fmt: skip
        """``engine``: fields of EngineSpec. ``port``: differs for an engine beside the session's.

        ``agent_port``, ``host``: of a host of an engine of several. ``plugins``: None: all of this project's.
        ``address``: ::1 for an engine that listens on IPv6, as in pods without IPv4. ``serve_key``: key of
        the users of an engine that serves the weights in ``model`` by the name policy.
        """
        spec = {"context_length": 256, "max_total_tokens": 8192, "return_routed_experts": True} | engine
        pool = RolloutTemplate(engine=EngineSpec(device="cpu", dtype="float32", **spec))
        command = (
            (engine_command(model, pool) if serve_key is None else serving_command(model, pool, "policy"))
            .replace(API_KEY_FOLDER, str(directory))
            .replace(MODEL_DIRECTORY, str(directory / "model"))
            .replace(f"--port {ENGINE_PORT}", f"--port {port}")
            .replace("--host 0.0.0.0", "--host ::" if ":" in address else "--host 0.0.0.0")
            .replace(f":{AGENT_PORT}/hostz", f":{agent_port}/hostz")
        )
        self.url = tls.url(address, port)
        self.key = directory / "model" / "admin-key"
        self.experts = directory / "routed-experts"
        url = f"http://127.0.0.1:{AGENT_PORT}"
        kept = {"GRPO_ROUTED_EXPERTS": str(self.experts), "GRPO_ROUTED_EXPERTS_URL": url}
        self._env = environment(directory) | cpu_engine_env(pool.engine) | kept | {"HOST_INDEX": str(host)}
        self._api_key: Path | None = None
        if serve_key is not None:
            (directory / "api-key").write_text(serve_key)
            self._api_key = directory / "model" / "api-key"
            self._env |= SERVING_ENV | KEYED_ENGINE_ENV | {"GRPO_API_KEY_FILE": str(self._api_key)}
        if plugins is not None:
            self._env["SGLANG_PLUGINS"] = plugins
        self._command = command.replace("python3", sys.executable)
        self._log = directory / "log"
        self.start()

    def start(self) -> None:
        command = ["/bin/bash", "-c", self._command]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self._env, start_new_session=True, stdout=log, stderr=log
            )

    def control(self, timeout: float = 30) -> Engine:
        """Return a client of its control routes, as its agent uses them."""
        return Engine(self.url, timeout, self.key, api_key=self._api_key)

    def admin(self, path: str, **body: Any) -> httpx.Response:
        """Call a control route."""
        headers = {"authorization": f"Bearer {self.key.read_text()}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=120, verify=tls.own())

    def answers(
        self, ids: Sequence[int], params: Sequence[dict[str, Any]], **more: Any
    ) -> list[dict[str, Any]]:
        """Return an answer to the prompt ``ids`` for each of the sampling parameters."""
        body = {"input_ids": [list(ids)] * len(params), "sampling_params": list(params)} | more
        response = httpx.post(f"{self.url}/generate", json=body, timeout=120)
        response.raise_for_status()
        return list(response.json())

    def last_words(self) -> str:
        return f"exit code {self.process.poll()}\n{self._log.read_text()[-4000:]}"

    def await_answer(self, timeout: float = 480) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + timeout
        while not self.control().alive():
            assert self.process.poll() is None and time.monotonic() < deadline, self.last_words()
            time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL every process of the engine, as the end of its container does."""
        for pid in self.processes():  # a host's server has a session of its own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[int]:
        """Return the ids of all processes, the first one first."""
        try:
            own = psutil.Process(self.process.pid)
            return [process.pid for process in (own, *own.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []


def serve(root: Path, ranks: int = 2) -> dict[int, str]:
    """Serve the versions published in ``root`` by a trainer's agent; return rank -> URL."""
    return dict.fromkeys(range(ranks), serve_app(application(root)))


def serve_app(app: Any, port: int | None = None) -> str:
    """Serve the ASGI application ``app`` from a daemon thread and return its base URL."""
    port = port or free_port()
    config = uvicorn.Config(app, port=port, log_level="error")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "the application did not start"
        time.sleep(0.05)
    return f"http://127.0.0.1:{port}"


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds used by the processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(time.user + time.system for time in times)


def watch_until(agent: Agent, state: str, server: Server, timeout: float = 480) -> None:
    deadline = time.monotonic() + timeout
    while agent.status()["state"] != state:
        assert time.monotonic() < deadline, f"{agent.status()}: {server.last_words()}"
        agent.watch()
        time.sleep(0.2)


def generate(ids: list[int], experts: bool = False, **params: Any) -> dict[str, Any]:
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 8} | params,
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_routed_experts": experts,
    }
    return dict(httpx.post(f"{URL}/generate", json=body, timeout=60).json())
