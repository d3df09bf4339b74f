"""Judging answers: a user's function may do what it likes, the job goes on and says so."""

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.data import RewardSpec
from grpo_worker.data.tasks import Record, open_gym
from grpo_worker.rewards import verifiers
from grpo_worker.rewards.verifiers import (
    FunctionVerifier,
    HttpVerifier,
    Item,
    RewardError,
    TaskVerifier,
    verifier_of,
)

FUNCTIONS = """
import os, signal, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("noise on standard output")
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(extra_info["pid_file"], "w").write(str(child.pid))
        time.sleep(600)
    if solution_str == "eat":
        return float(len(bytearray(8 * 2**30)))
    if solution_str == "secret":
        return float("GRPO_SECRET" in os.environ)
    if solution_str == "dict":
        return {"score": 0.5, "why": "because"}
    return float(solution_str == ground_truth) + 10 * (data_source == "mine")

def word(**_):
    return "not a number"
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    file = tmp_path / "reward.py"
    file.write_text(FUNCTIONS)
    return f"{file}:compute_score"


def items(*answers: str, **extra: Any) -> list[Item]:
    return [Item(i, answer, Record("mine", "yes", extra)) for i, answer in enumerate(answers)]


def spec(function: str, **fields: Any) -> RewardSpec:
    return RewardSpec(**({"function": function, "workers": 2, "timeout_seconds": 5} | fields))


def test_a_function_judges_with_verls_arguments(function: str) -> None:
    judge = FunctionVerifier(spec(function))
    assert judge.score(items("yes", "no", "dict")) == [11.0, 10.0, 0.5]
    assert judge.failures == 0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [("raise", "KeyError: 'no such thing'"), ("die", "exit code -9"), ("eat", "MemoryError")],
)
def test_one_that_raises_dies_or_eats_memory_gives_zero_and_the_others_their_due(
    function: str, answer: str, problem: str
) -> None:
    judge = FunctionVerifier(spec(function))
    assert judge.score(items("yes", answer, "yes", "no", "yes")) == [11.0, 0.0, 11.0, 10.0, 11.0]
    assert judge.failures == 1
    with pytest.raises(RewardError, match=problem):
        FunctionVerifier(spec(function, on_failure="stop")).score(items("yes", answer))


def test_one_that_hangs_is_ended_with_what_it_started(function: str, tmp_path: Path) -> None:
    judge = FunctionVerifier(spec(function, timeout_seconds=1))
    pid_file = tmp_path / "pid"
    started = time.monotonic()
    assert judge.score(items("hang", "yes", pid_file=str(pid_file))) == [0.0, 11.0]
    assert time.monotonic() - started < 30 and judge.failures == 1
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < deadline, "a process that the function started is still there"
        time.sleep(0.05)
    assert judge.score(items("yes")) == [11.0]  # a new process took its place


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_it_sees_no_secret_of_the_pod(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "GRPO_SECRET", "x")
    assert FunctionVerifier(spec(function)).score(items("secret")) == [0.0]


def test_what_is_no_number_is_a_failure(function: str) -> None:
    judge = FunctionVerifier(spec(function.replace("compute_score", "word")))
    assert judge.score(items("yes")) == [0.0] and judge.failures == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/reward.py:compute_score", r"spec\.reward\.function=.*no file /nowhere/reward\.py"),
        ("no_such_package.rewards:f", "No module named 'no_such_package'"),
        ("json:no_such_function", "has no attribute 'no_such_function'"),
    ],
)
def test_a_function_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        FunctionVerifier(spec(name)).score(items("yes"))


class _Server(BaseHTTPRequestHandler):
    answers: list[tuple[int, Any]]
    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        code, answer = self.answers.pop(0)
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[_Server]]]:
    monkeypatch.setattr(verifiers.time, "sleep", lambda _s: None)
    handler = type("Handler", (_Server,), {"answers": [], "asked": []})
    with HTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/judge", handler
        running.shutdown()


def test_a_server_judges_and_is_asked_again_when_it_stumbles(server: tuple[str, type[_Server]]) -> None:
    url, handler = server
    handler.answers += [(500, {}), (200, {"scores": [1]}), (200, {"scores": [1, 0.5]})]
    judge = HttpVerifier(RewardSpec(url=url, timeout_seconds=5))
    assert judge.score(items("a", "b")) == [1.0, 0.5]
    assert judge.failures == 2 and len(handler.asked) == 3
    assert handler.asked[0]["items"][1] == {
        "data_source": "mine",
        "ground_truth": "yes",
        "extra_info": {},
        "solution_str": "b",
    }


def test_a_server_that_never_answers_stops_the_step(server: tuple[str, type[_Server]]) -> None:
    url, handler = server
    handler.answers += [(503, {})] * 3
    with pytest.raises(RewardError, match=r"spec\.reward\.url=http://127.*503.*3 times in a row"):
        HttpVerifier(RewardSpec(url=url, timeout_seconds=5)).score(items("a"))


def test_a_task_judges_itself_unless_the_job_says_otherwise(function: str) -> None:
    task = open_gym("reasoning-gym:gcd", seed=3)
    judge = verifier_of(task, None)
    assert isinstance(judge, TaskVerifier)
    record = task.record(5)
    assert judge.score([Item(5, str(record.ground_truth), record)]) == [1.0]
    assert isinstance(verifier_of(task, spec(function)), FunctionVerifier)
    with pytest.raises(ValueError, match=r"spec\.reward: prompts from files need a reward"):
        verifier_of(object(), None)  # type: ignore[arg-type]
