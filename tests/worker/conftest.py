"""One engine for all tests of the worker level: its start takes most of a minute."""

from collections.abc import Iterator

import pytest

from support.engine_server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("engine"))
    yield running
    running.kill()
