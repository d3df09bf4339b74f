"""Trainers that have published two versions, and an engine of several hosts that loads them."""

from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import EngineState
from support.engine_server import serve
from support.host_agents import HostAgents
from support.random_plans import Case
from support.rank_threads import ThreadedEngine
from support.staged_cases import (
    BUCKET,
    LARGE,
    TRAINERS,
    checksum_of_union,
    covering,
    engine_of,
    publish_case,
    wrong,
)

HOSTS = 2


class World:
    """Trainers that have published two versions, and an engine of several hosts."""

    def __init__(
        self, case: Case, root: Path, patch: pytest.MonkeyPatch, hosts: int = HOSTS, **more: Any
    ) -> None:
        self.case, self.root = case, root
        self.engine: ThreadedEngine = engine_of(case, patch)
        self.agents = HostAgents(self.engine, hosts, BUCKET, **more)
        self.sources = serve(root, TRAINERS)
        for version in (1, 2):
            publish_case(root, case, version)

    @classmethod
    def serving(cls, root: Path, patch: pytest.MonkeyPatch) -> "World":
        """Return one whose engine serves version 1."""
        made = cls(covering(LARGE), root, patch)
        made.sync(1)
        made.assert_serves(1)
        made.engine.calls = []
        return made

    def sync(self, version: int) -> dict[str, Any]:
        return self.agents.sync(version, self.sources)

    def state(self) -> tuple[str, int | None]:
        status = self.agents.first.status()
        return status["state"], status["weightVersion"]

    def assert_serves(self, version: int) -> None:
        assert self.state() == (EngineState.SERVING, version)
        assert not wrong(self.case, self.engine, version)
        found = self.agents.first.status()["checksum"]
        assert found == checksum_of_union(self.case, self.engine, version)

    def assert_stale(self) -> None:
        assert self.state() == (EngineState.STALE, None) and "resume" not in self.engine.calls
