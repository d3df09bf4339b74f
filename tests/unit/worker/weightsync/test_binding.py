"""The operator binds an engine to a job, again and again until the agent reports it."""

import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from grpo_worker.weightsync.agent import agent as module
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.http import rollout_application

CALLS = 60  # more than the server has threads


def _bind(client: TestClient) -> Any:
    return client.post("/v1/writer", json={"writer": "job-2"})


def test_calls_to_bind_an_engine_that_is_updated_leave_the_server_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BIND_SECONDS", 0.2)
    agent = Agent("engine-0", Engine("http://127.0.0.1:9", 1), 1, 1 << 20, 1)
    agent.bind("job-1")
    with TestClient(rollout_application(agent)) as client:
        with agent._lock:  # as an update does
            answers: list[Any] = []
            threads = [threading.Thread(target=lambda: answers.append(_bind(client))) for _ in range(CALLS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            assert [answer.status_code for answer in answers] == [409] * CALLS
            assert answers[0].json()["error"] == "this engine is being updated for job-1: try again"
            assert client.get("/v1/status").json()["writer"] == "job-1"
        assert _bind(client).json()["writer"] == "job-2"
