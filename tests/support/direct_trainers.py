"""Trainer ranks that send versions directly to an engine, and what the engine must have then."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from support.engine_server import JOB, Server
from support.ranks.launcher import run as run_on_ranks
from support.weight_layouts import LAYOUTS, from_disk

BUCKET = 1 << 20
PATIENCE = 30.0


class Trainers:
    """Ranks that send consecutive versions."""

    def __init__(self, root: Path, name: str, versions: int, **more: Any) -> None:
        self._root = root
        world, layout = LAYOUTS[name]
        arguments: dict[str, Any] = {"layout": layout, "versions": versions, "bucket": BUCKET} | more
        self._threads = ThreadPoolExecutor(1)
        self.result: Future[list[Any]] = self._threads.submit(
            run_on_ranks, "weight_cases:send_versions", world, root=str(root), **arguments
        )
        self.offer = LinkOffer.from_json(json.loads(self.await_file("offer")))

    def ready(self, version: int) -> None:
        self.await_file(f"ready-{version}")

    def await_file(self, name: str) -> str:
        deadline = time.monotonic() + 240
        while not (self._root / name).exists():
            assert not self.result.done(), self.result.result()
            assert time.monotonic() < deadline, f"{name} does not come"
            time.sleep(0.05)
        return (self._root / name).read_text()


def after_version_1(agent: Agent, root: Path, **how: Any) -> Trainers:
    """Return two ranks that are about to send version 2."""
    trainers = Trainers(root, "TP2 EP2", 2, **how)
    agent.join(JOB, trainers.offer)
    agent.receive(JOB, 1, trainers.offer.name, PATIENCE)
    trainers.ready(2)
    return trainers


def assert_same_as_on_disk(server: Server, folder: Path) -> str:
    """Check that the engine's weights equal the exported checkpoint loaded by SGLang; return the checksum."""
    ours = server.control().checksum()
    from_disk(server, folder)
    assert server.control().checksum() == ours, f"{folder.name} is another in the engine"
    return ours
