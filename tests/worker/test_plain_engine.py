"""An engine without this project's plugin for weights gets staged versions through SGLang's own routes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_worker.weightsync.agent.agent import Agent
from support.engine_server import JOB, Server, free_port, serve, watch_until
from support.ranks.launcher import run as run_on_ranks

pytestmark = pytest.mark.slow  # starts an engine of its own


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, port=free_port(), plugins="grpo_cpu", return_routed_experts=False)
    yield server
    server.kill()


def test_it_receives_buckets_over_a_process_group(plain: Server, tmp_path: Path) -> None:
    layout = {"tensor": 2, "expert": 2, "expert_tensor": 1}
    run_on_ranks("policy_cases:publish", 2, root=str(tmp_path / "weights"), layout=layout)
    agent = Agent("engine-0", plain.control(), 1, bucket_bytes=64 << 10, timeout=60, writer=JOB)
    watch_until(agent, "STALE", plain)
    status = agent.sync(JOB, 3, serve(tmp_path / "weights"))
    assert (status["state"], status["weightVersion"]) == ("SERVING", 3)
    assert "engine_receive_and_load" not in status["seconds"], "the engine has the plugin"
