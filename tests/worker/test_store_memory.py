"""An engine of two gibibytes restarts, and its agent of 512 MiB fills it from the checkpoint store."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_operator.plan.planner.agent_memory import AGENT_MEMORY
from grpo_worker.checkpointing.store import WEIGHTS, directory
from grpo_worker.weightsync.trainer.version_copy import VersionCopy
from support.engine_server import Server, free_port
from support.late_engine import MODEL, WORLD, limited_agent, publish_model, trainers
from support.stored_versions import JobStore

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="memory limits need root"),
    pytest.mark.slow,  # starts an engine of 2 GB twice
]
LIMIT = AGENT_MEMORY >> 20
STEP = 1


@pytest.fixture
def memory() -> Iterator[Path]:
    """Version 1 in the memory of the trainers' pod."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))
    publish_model(root, STEP)
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    server = Server(tmp_path, str(tmp_path), free_port(), return_routed_experts=False)
    server.await_answer()
    yield server
    server.kill()


def test_an_engine_that_restarts_gets_its_weights_from_the_store(
    engine: Server, memory: Path, tmp_path: Path
) -> None:
    store = JobStore(tmp_path / "store")
    store.begin_attempt()
    store.finish_steps(1, STEP)
    weights = directory(store.checkpoints, STEP, store.attempt) / WEIGHTS
    weights.mkdir(parents=True)
    for rank in range(WORLD):
        VersionCopy(memory, STEP, rank, weights).run()
    # The agent comes before the checkpoint counts, or it would not wait for the trainers.
    with limited_agent(LIMIT, engine.url, engine.key, tmp_path, store=store.folder) as (agent, limit):
        agent.await_state("STALE", 30)
        with trainers(memory) as sources:
            served = agent.sync(STEP, sources)
        assert served["state"] == "SERVING", served
        checksum = engine.control(120).checksum()
        shutil.rmtree(memory)
        store.commit(STEP)

        engine.kill()
        agent.await_state("RESTARTING", 60)
        engine.start()
        status = agent.await_state("SERVING", 500)
        assert (status["weightVersion"], status["restarts"]) == (STEP, 1)
        assert status["checksum"] == served["checksum"] and status["stagedVersion"] is None
        assert engine.control(120).checksum() == checksum
        peak = agent.peak_mebibytes()
        assert peak < LIMIT and limit.kills == 0
    print(f"{peak:.0f} MiB")
