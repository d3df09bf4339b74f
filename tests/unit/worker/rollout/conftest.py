"""Fixtures of tests of generation."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.generation_world import World, Worlds


@pytest.fixture
def world() -> Iterator[Worlds]:
    made: list[World] = []

    def make(count: int, **fields: Any) -> World:
        made.append(World(count, **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()
