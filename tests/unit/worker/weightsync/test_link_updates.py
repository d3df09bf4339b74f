"""Requests of an agent to its engine for a version that comes over a link."""

from typing import Any

import pytest

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.installer import Installer, UpdateError
from grpo_worker.weightsync.agent.link_calls import LinkCalls
from grpo_worker.weightsync.agent.update import Phase


class LinkedEngine(Engine):
    """Engine that takes every version; ``serves``: the version that it reports instead."""

    def __init__(self, serves: str = "") -> None:
        super().__init__("http://127.0.0.1:9", 1)
        self.calls: list[tuple[str, str, str, bool]] = []
        self.serves = serves
        self.refuses = ""

    def alive(self) -> bool:
        return True

    def _whole_update(
        self, link: str, load_format: str, version: str, keep_buffers: bool, timeout: float | None
    ) -> dict[str, Any]:
        if self.refuses:
            raise EngineError(self.refuses)
        self.calls.append((link, load_format, version, keep_buffers))
        seconds = {"receive_and_load": 0.1}
        return {
            "seconds": seconds, "received": 5, "checksum": "abc", "weightVersion": self.serves or version
        }  # fmt: skip

    def _call(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        return {}


def update(installer: Installer, engine: Engine, link: str, version: int, fetched: bool = False) -> str:
    with installer.updating(version):
        return installer.receive(link, version, 60.0, LinkCalls(engine), fetched)


def test_an_engine_keeps_its_buffers_from_its_second_version_over_a_link_on() -> None:
    engine = LinkedEngine()
    installer = Installer("engine-0", engine, 1, 1)
    for version, link in enumerate(["a", "a", "a", "b", "b"], 1):
        assert update(installer, engine, link, version, fetched=version == 3) == "abc"
    assert engine.calls == [
        ("a", "grpo:link:60.0", "1", False),
        ("a", "grpo:link:60.0", "2", True),
        ("a", "grpo:install:3", "3", True),
        ("b", "grpo:link:60.0", "4", False),
        ("b", "grpo:link:60.0", "5", True),
    ]
    assert installer.update.phase == Phase.COMMITTED and {"pause", "engine_receive_and_load"} <= set(
        installer.seconds
    )


def test_an_engine_that_shares_its_gpus_returns_the_memory_each_time() -> None:
    engine = LinkedEngine()
    installer = Installer("engine-0", engine, 1, 1, shares_gpus=True)
    for version in (1, 2):
        update(installer, engine, "a", version)
    assert [keep for *_, keep in engine.calls] == [False, False]


def test_a_refused_version_is_aborted_in_its_transfer() -> None:
    engine = LinkedEngine()
    installer = Installer("engine-0", engine, 1, 1)
    engine.refuses = "a wave is missing"
    with pytest.raises(UpdateError, match=r"engine-0: version 1, transfer, .*a wave is missing"):
        update(installer, engine, "a", 1)
    assert installer.update.phase == Phase.ABORTED


def test_an_engine_that_serves_another_version_afterwards_is_refused() -> None:
    engine = LinkedEngine(serves="6")
    with pytest.raises(UpdateError, match="6"):
        update(Installer("engine-0", engine, 1, 1), engine, "a", 7)
