"""Containers of real engines, each with its agent, on hosts; an engine may have several of them."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from grpo_operator.api.names import AGENT_PORT
from support.engine_server import Server
from support.host_pods import Pods, answers, popen
from support.hosts import Host

WRITER = "whole-job"  # of all jobs, one after the other
DEADLINE = 20  # seconds of weightSync.timeoutSeconds


class EngineOnHost(Server):
    """The engine's container and the agent beside it on one host. ``starts``: when its process was started.

    ``first``: the engine's first host, if this is a further one.
    """

    def __init__(
        self, host: Host, pods: Pods, folder: Path, name: str, hosts: int = 1, index: int = 0,
        first: "EngineOnHost | None" = None, **engine: Any,
    ) -> None:  # fmt: skip
        self.name, self.host, self.starts = name, host, list[float]()
        self._pods, self._pid, self._own = pods, folder / name, folder / f"files-{name}"
        self._own.mkdir()
        self.agent_log = self._own / "agent.log"
        shape = {"nodes_per_engine": hosts, "tensor_parallel": hosts} if hosts > 1 else {}
        super().__init__(self._own, host=index, return_routed_experts=False, **shape | engine)
        self._arguments = ["rollout", "--name", name, "--writer", WRITER, "--admin-key", str(self.key)]
        self._arguments += ["--bucket-megabytes", "1"]
        self._arguments += ["--model-config", str(self._own / "model" / "config.json")]
        self._arguments += ["--timeout", str(DEADLINE), "--engine-ranks", str(hosts)]
        if hosts > 1:
            self._arguments += ["--hosts", str(hosts), "--host-index", str(index), "--address", host.address]
        if first is not None:
            self._arguments += ["--first-host", first.url_of_agent]
        self.start_agent()

    def start(self) -> None:
        self.starts.append(time.time())
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self.host.command("/bin/bash", "-c", self._command), start_new_session=True,
                env=self._env | self._pods.clock(self.host), stdout=log, stderr=log,
            )  # fmt: skip
        self._pid.write_text(str(self.process.pid))

    def start_agent(self) -> None:
        program = ["-m", "grpo_worker.weightsync.main", *self._arguments]
        environment = self._pods.environment(self.host)
        self.agent = popen(self.host, self.agent_log, environment, *program)

    def lives(self) -> bool:
        """Return what the probe of its container finds."""
        return answers(self.host, f"{self.url_of_agent}/enginez")

    @property
    def url_of_agent(self) -> str:
        return f"http://{self.host.address}:{AGENT_PORT}"

    def status(self) -> dict[str, Any]:
        """Return the status of the agent; {} if it does not answer."""
        with suppress(httpx.HTTPError):
            return dict(self.host.call(httpx.get, f"http://127.0.0.1:{AGENT_PORT}/v1/status").json())
        return {}

    def end(self) -> None:
        """SIGKILL all processes at once."""
        self.agent.kill()
        self.kill()
        self.agent.wait()
