"""Two real engines of one pool, each with its agent, which can read each other's weights."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.peers import Peers
from grpo_worker.weightsync.agent.region_source import RegionSource
from support.engine_server import Server, free_port, serve_app

TIMEOUT = 60


class PeerEngine:
    """An engine, and an agent that finds the other one by ``urls``. ``writer``: None as in a new pod."""

    def __init__(self, server: Server, ranks: int, urls: list[str], writer: str | None = None) -> None:
        self.server, self._ranks, self._urls = server, ranks, urls
        self.url = ""
        self.replace_agent(writer)

    def replace_agent(self, writer: str | None = None) -> None:
        """Start an agent that knows nothing, as that of a new pod."""
        if self.url in self._urls:
            self._urls.remove(self.url)
        place = EnginePlace(peers=Peers(lambda: list(self._urls), TIMEOUT))
        engine = self.server.control(TIMEOUT)
        self.agent = Agent(
            "engine", engine, self._ranks, bucket_bytes=1 << 20, timeout=TIMEOUT, writer=writer, place=place
        )
        self.url = serve_app(rollout_application(self.agent))
        self._urls.append(self.url)

    def weights(self) -> str:
        """Return the checksum of all parameters in the engine."""
        return self.server.control(120).checksum()

    def watch(self, state: str, seconds: float = 150) -> list[str]:
        """Let the agent watch until it reports ``state``; return the errors of failed updates."""
        deadline, errors = time.monotonic() + seconds, list[str]()
        while self.agent.status()["state"] != state:
            assert time.monotonic() < deadline, f"{self.agent.status()} {errors}: {self.server.last_words()}"
            try:
                self.agent.watch()
            except UpdateError as error:
                errors.append(str(error))
            time.sleep(0.2)
        return errors

    def first_failure(self, seconds: float = 120) -> str:
        """Let the agent watch until an update fails; return the error."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.agent.watch()
            except UpdateError as error:
                return str(error)
            assert self.agent.status()["state"] != "SERVING", "the update did not fail"
            time.sleep(0.2)
        raise AssertionError(f"no update in {seconds} s: {self.agent.status()}")


@contextmanager
def engines(folder: Path, model: dict[str, Any], count: int = 2, **shape: Any) -> Iterator[list[PeerEngine]]:
    """Start ``count`` engines of ``shape``, whose agents are bound to no job."""
    urls: list[str] = []
    servers = []
    try:
        for name in ("a", "b")[:count]:
            home = folder / name
            home.mkdir()
            (home / "config.json").write_text(json.dumps(model))
            servers.append(Server(home, str(home), free_port(), return_routed_experts=False, **shape))
        for server in servers:
            server.await_answer()
        yield [PeerEngine(server, shape.get("tensor_parallel", 1), urls) for server in servers]
    finally:
        for server in servers:
            server.kill()


@contextmanager
def generating(server: Server) -> Iterator[list[dict[str, Any]]]:
    """Let the engine generate all the time; yield its answers, which are added as they come."""
    answers: list[dict[str, Any]] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            params = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0}
            body = {"input_ids": list(range(10, 30)), "sampling_params": params}
            answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
            answers.append(answer.raise_for_status().json())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join(120)


def before_read(patch: pytest.MonkeyPatch, number: int, call: Callable[[], Any]) -> list[int]:
    """Call ``call`` before the read of that number from a peer's rank, once; return the list of reads."""
    reads: list[int] = []
    original, lock = RegionSource.read, threading.Lock()

    def read(self: RegionSource, rank: int, first: int, end: int) -> tuple[memoryview, str]:
        with lock:
            reads.append(end - first)
            if len(reads) == number:
                call()
        return original(self, rank, first, end)

    patch.setattr(RegionSource, "read", read)
    return reads
