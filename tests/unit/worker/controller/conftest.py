"""Two pods with agents, and the tier of snapshots over them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_worker.controller.recovery.memory_tier import MemoryTier
from support.snapshot_pods import Gang, Pod, open_tier


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    found = [Pod(tmp_path / name) for name in ("a", "b")]
    yield found
    for pod in found:
        pod.end()


@pytest.fixture
def gang(pods: list[Pod]) -> Gang:
    return Gang(pods)


@pytest.fixture
def tier(gang: Gang, tmp_path: Path) -> MemoryTier:
    return open_tier(gang, tmp_path)
