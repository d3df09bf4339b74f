"""A STALE engine gets the version of the newest checkpoint from the store, when trainers and peers are away."""

from pathlib import Path

import pytest

from support.engine_server import JOB, Server, serve, watch_until
from support.stored_versions import JobStore

CHECKPOINT, LAST = 2, 3  # steps


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> JobStore:
    """A job whose trainers have saved step 2, published version 3, and ended."""
    root = tmp_path_factory.mktemp("job")
    store = JobStore(root / "store", root / "memory")
    store.train(LAST, CHECKPOINT, {"tensor": 2, "expert": 2})
    return store


def test_an_engine_without_trainers_and_peers_gets_the_version_of_the_checkpoint(
    server: Server, trained: JobStore
) -> None:
    agent = trained.agent(server)
    watch_until(agent, "STALE", server)
    sources = serve(trained.memory)
    wanted = agent.sync(JOB, CHECKPOINT, sources, attempt=1)
    weights = server.control().checksum()
    newer = agent.sync(JOB, LAST, sources, attempt=1)
    assert newer["checksum"] != wanted["checksum"] and server.control().checksum() != weights

    trained.begin_attempt()  # the trainers will start again, from the checkpoint
    late = trained.agent(server)
    watch_until(late, "SERVING", server, 60)
    status = late.status()
    assert (status["weightVersion"], status["checksum"]) == (CHECKPOINT, wanted["checksum"])
    assert status["stagedVersion"] is None, "it is in no trainer's memory"
    assert server.control().checksum() == weights
