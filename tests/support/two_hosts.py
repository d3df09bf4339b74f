"""An engine of two hosts: real SGLang servers with tensor parallel 2 over gloo, each with its host's agent.

The first host's agent runs in the test's process, so that a test can do harm to it, or in one of its own. The
further host's runs in one of its own.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.host_rendezvous import HostRendezvous
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.peers import Peers
from grpo_worker.weightsync.agent.whole_blobs import WholeBlobs
from support.engine_server import JOB, Server, free_port, serve_app
from support.late_engine import Process
from support.memory_limits import MemoryLimit

HOSTS = RANKS = 2
LOCAL = "127.0.0.1"


class TwoHosts:
    """The engine of ``model`` in ``folder``, and its agents. ``timeout``: of the agents, in seconds.

    ``deltas``: agents hold whole versions and fetch changes. ``bucket``: MiB of a bucket.
    """

    def __init__(
        self, folder: Path, model: dict[str, Any], timeout: float = 60, bucket: int = 1,
        deltas: bool = False, peers: Peers | None = None, writer: str | None = JOB, **shape: Any,
    ) -> None:  # fmt: skip
        self._timeout, self._bucket, self._deltas, self._writer, self._peers = (
            timeout, bucket, deltas, writer, peers
        )  # fmt: skip
        self._folder = folder
        self._agent_ports = [free_port(), free_port()]
        self.rendezvous = HostRendezvous(HOSTS)
        self.servers: list[Server] = []
        for host in range(HOSTS):
            own = folder / f"host-{host}"
            own.mkdir()
            (own / "config.json").write_text(json.dumps(model))
            fields = {
                "nodes_per_engine": HOSTS,
                "tensor_parallel": RANKS,
                "return_routed_experts": False,
            } | shape
            port = self._agent_ports[host]
            self.servers.append(Server(own, str(own), free_port(), port, host, **fields))
        self.agent = self._first_agent()
        self.first_process: Process | None = None
        serve_app(_Current(self), self._agent_ports[0])
        self.further = self.start_further()

    def control(self, timeout: float = 120) -> Engine:
        """Return a client of the engine, which the first host's server answers."""
        return self.servers[0].control(timeout)

    def replace_agents(self, timeout: float | None = None, deltas: bool = False) -> None:
        """Start agents that know nothing of the engine, whose servers go on."""
        self._timeout, self._deltas = timeout or self._timeout, deltas
        self.further.end()
        self.further = self.start_further()
        self.agent = self._first_agent()

    def start_further(self, limit: MemoryLimit | None = None) -> Process:
        """Start the agent of the further host at its port, as its container does."""
        arguments = (
            f"rollout --hosts {HOSTS} --host-index 1 --first-host http://{LOCAL}:{self._agent_ports[0]}"
            f" --address {LOCAL} --engine {self.servers[1].url} --engine-ranks {RANKS} --name pod-1"
            f" --bucket-megabytes {self._bucket} --timeout {self._timeout}" + " --deltas" * self._deltas
        )
        further = Process(arguments, self._folder / "further.log", limit, self._agent_ports[1])
        further.await_answer()
        return further

    def start_first(self, limit: MemoryLimit | None = None) -> Process:
        """Start the agent of the first host in a process of its own, in place of the one in this process."""
        server = self.servers[0]
        arguments = (
            f"rollout --hosts {HOSTS} --host-index 0 --address {LOCAL} --engine {server.url}"
            f" --engine-ranks {RANKS} --name pod-0 --admin-key {server.key} --writer {JOB}"
            f" --bucket-megabytes {self._bucket} --timeout {self._timeout}" + " --deltas" * self._deltas
        )
        self.first_process = Process(arguments, self._folder / "first.log", limit)
        self.first_process.await_answer()
        return self.first_process

    def watch(self, state: str, seconds: float = 300) -> list[str]:
        """Let the first agent watch until it reports ``state``; return the errors of failed updates."""
        deadline, errors = time.monotonic() + seconds, list[str]()
        while self.agent.status()["state"] != state:
            words = [server.last_words()[-1500:] for server in self.servers]
            assert time.monotonic() < deadline, f"{self.agent.status()} {errors}: {words}"
            errors += self.watch_once()
        return errors

    def watch_once(self) -> list[str]:
        """Let the first agent look at the engine; return the error of a failed update, if there was one."""
        time.sleep(0.2)
        try:
            self.agent.watch()
        except (UpdateError, EngineError) as error:
            return [str(error)]
        return []

    def sync(self, version: int, sources: dict[int, str]) -> dict[str, Any]:
        return self.agent.sync(JOB, version, sources)

    def weights(self) -> str:
        """Return the checksum of all parameters of both ranks."""
        return self.control().checksum()

    def round(self) -> str:
        """Return the round in which the servers run; another one means that they were restarted."""
        return self.rendezvous._round

    def end(self) -> None:
        for server in self.servers:
            server.kill()
        self.further.end()
        if self.first_process is not None:
            self.first_process.end()

    def _first_agent(self) -> Agent:
        fetcher = Fetcher(self._timeout, WholeBlobs(self._timeout, deltas=True) if self._deltas else None)
        server = self.servers[0]
        engine = Engine(server.url, self._timeout, server.key, self.rendezvous)
        place = EnginePlace(LOCAL, self.rendezvous, peers=self._peers)
        return Agent(
            "pod-0", engine, RANKS, self._bucket << 20, self._timeout, self._writer, fetcher, place=place
        )  # fmt: skip


class _Current:
    """Passes the calls of the engine's hosts on to the first host's current agent."""

    def __init__(self, engine: TwoHosts) -> None:
        self._engine = engine
        self._made: tuple[Agent, Starlette] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._engine.first_process is not None:
            await self._forward(Request(scope, receive), scope, receive, send)
            return
        agent = self._engine.agent
        if self._made is None or self._made[0] is not agent:
            place = EnginePlace(LOCAL, self._engine.rendezvous)
            self._made = agent, rollout_application(agent, None, place)
        await self._made[1](scope, receive, send)

    async def _forward(self, request: Request, scope: Any, receive: Any, send: Any) -> None:
        process = self._engine.first_process
        assert process is not None
        async with httpx.AsyncClient(timeout=5) as client:
            url = f"{process.url}{request.url.path}"
            try:
                answer = await client.request(
                    request.method, url, params=request.query_params, content=await request.body()
                )
                response = Response(answer.content, answer.status_code, media_type="application/json")
            except httpx.HTTPError as error:
                response = Response(repr(error), 503)
        await response(scope, receive, send)


@contextmanager
def two_hosts(folder: Path, model: dict[str, Any], **more: Any) -> Iterator[TwoHosts]:
    """Run an engine of two hosts until it answers, STALE."""
    engine = TwoHosts(folder, model, **more)
    try:
        engine.watch("STALE")
        yield engine
    finally:
        engine.end()
