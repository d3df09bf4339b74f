"""The agent of an engine remembers who may write when its container restarts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from grpo_worker.weightsync.agent.writer_guard import WriterError, WriterGuard
from support.engine_server import JOB, free_port
from support.late_engine import Process

Start = Callable[[], Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the agent of a pool's engine, as its container does; no server runs."""
    arguments = f"rollout --engine http://127.0.0.1:{free_port()} --timeout 1 --name engine-0"
    arguments += f" --writer-file {tmp_path / 'writer.json'}"
    processes: list[Process] = []

    def begin() -> Process:
        if processes:
            processes[-1].end()  # SIGKILL, like a container without memory
        processes.append(Process(arguments, tmp_path / "log"))
        processes[-1].await_answer()
        return processes[-1]

    yield begin
    processes[-1].end()


def _accepts(agent: Process, attempt: int) -> bool:
    """Return whether a call of the attempt gets as far as the engine, which does not run."""
    answer = agent.sync(7, {0: "http://127.0.0.1:9"}, attempt)
    refused = f"attempt {attempt} of {JOB} may not write: attempt 3 does" == answer["error"]
    assert refused or answer["attempt"] == attempt
    return not refused


def test_an_older_controller_is_refused_after_a_restart_of_the_agent(start: Start) -> None:
    agent = start()
    httpx.post(f"{agent.url}/v1/writer", json={"writer": JOB}).raise_for_status()
    assert _accepts(agent, 3) and not _accepts(agent, 2)
    before = agent.status()
    agent = start()
    after = agent.status()
    assert after["instance"] != before["instance"], "another process"
    assert (after["writer"], after["attempt"]) == (JOB, 3)
    assert not _accepts(agent, 2) and _accepts(agent, 3) and _accepts(agent, 4)
    httpx.post(f"{agent.url}/v1/writer", json={"writer": "job-2"}).raise_for_status()
    again = start().status()
    assert (again["writer"], again["attempt"]) == ("job-2", 0)


def test_the_job_of_a_pod_is_not_changed_by_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "writer.json"
    WriterGuard("job-1", file).admit("job-1", 5)
    assert WriterGuard("job-2", file).attempt == 0
    assert WriterGuard("job-1", file).attempt == 5


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"writer": "job-1"})])
def test_a_damaged_file_costs_the_memory_and_no_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "writer.json"
    file.write_text(text)
    guard = WriterGuard("job-1", file)
    guard.admit("job-1", 2)
    with pytest.raises(WriterError, match="attempt 1 of job-1 may not write: attempt 2 does"):
        WriterGuard("job-1", file).check("job-1", 1)


def test_a_volume_that_is_full_ends_no_call(tmp_path: Path) -> None:
    guard = WriterGuard("job-1", tmp_path / "missing" / "writer.json")
    guard.admit("job-1", 2)
    assert guard.attempt == 2
