"""Scoring answers: a user's function may fail in any way without failing the job."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_rehearsal.standins.answer_workers import InlineWorkers
from grpo_worker.data.tasks import Record, open_gym
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.rewards.verifiers import (
    FunctionVerifier,
    Item,
    NoVerifier,
    RewardError,
    TaskVerifier,
    verifier_of,
)
from grpo_worker.rollout.sampling import Sample
from support.processes import runs

FUNCTIONS = """
import os, signal, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("noise on standard output")
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
        open(extra_info.get("pid_file", os.devnull), "w").write(str(child.pid))
        time.sleep(600)
    if solution_str == "eat":
        return float(len(bytearray(8 * 2**30)))
    if solution_str == "secret":
        return float("GRPO_SECRET" in os.environ)
    if solution_str == "read":
        return float(len(sys.stdin.read()))
    if solution_str == "pid":
        open(extra_info["pid_file"], "w").write(str(os.getpid()))
    if solution_str == "dumpable":
        import ctypes
        return float(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
    if solution_str.startswith("broken"):
        for pipe in range(3, 64):
            try:
                os.write(pipe, solution_str[6:].encode() + b"\\n")
            except OSError:
                pass
    if solution_str == "nan":
        return float("nan")
    if solution_str == "inf":
        return {"score": float("inf")}
    if solution_str == "dict":
        return {"score": 0.5, "why": "because", "accuracy": True, "distance": float("inf")}
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


def test_a_function_is_called_with_verls_arguments(function: str) -> None:
    judge = FunctionVerifier(spec(function))
    assert judge.score(items("yes", "no", "dict")) == [11.0, 10.0, 0.5]
    assert judge.failures == 0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("raise", r"compute_score: reward\.py:7: KeyError: 'no such thing'"),
        ("die", "exit code -9"),
        ("eat", "MemoryError"),
        ("nan", "reward.py:4: returned nan"),
        ("inf", "reward.py:4: returned inf"),
        ("brokenno JSON", "wrote into the process's own pipe: b'no JSON'"),
        ("broken[1]", r"wrote into the process's own pipe: b'\[1\]'"),
        ('broken{"score": 1}', "wrote into the process's own pipe"),
    ],
)
def test_a_failing_call_scores_zero_and_spares_the_others(function: str, answer: str, problem: str) -> None:
    judge = FunctionVerifier(spec(function))
    assert judge.score(items("yes", answer, "yes", "no", "yes")) == [11.0, 0.0, 11.0, 10.0, 11.0]
    assert judge.failures == 1
    with pytest.raises(RewardError, match=problem):
        FunctionVerifier(spec(function, on_failure="stop")).score(items("yes", answer))


@pytest.mark.fault(
    row="25",
    point="a reward function hangs in a real process",
    witness="one failure counted, the child is gone",
    bound="30 s",
    partial="its answer scores zero; no job",
)
def test_a_hanging_function_is_killed_with_its_children(function: str, tmp_path: Path) -> None:
    judge = FunctionVerifier(spec(function, timeout_seconds=1))
    pid_file = tmp_path / "pid"
    started = time.monotonic()
    assert judge.score(items("hang", "yes", pid_file=str(pid_file))) == [0.0, 11.0]
    assert time.monotonic() - started < 30 and judge.failures == 1
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while runs(child):
        assert time.monotonic() < deadline, "a process that the function started is still there"
        time.sleep(0.05)
    assert judge.score(items("yes")) == [11.0]  # a new process took its place


@pytest.mark.fault(
    row="25",
    point="a process of the reward function dies",
    witness="two failures counted",
    bound="no pause",
    partial="its answers score zero; no job",
)
def test_a_process_that_dies_is_replaced_without_a_pause(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("grpo_worker.rewards.sandbox.time.sleep", pauses.append)
    judge = FunctionVerifier(spec(function, workers=1))
    assert judge.score(items("die", "die", "yes")) == [0.0, 0.0, 11.0]
    assert judge.failures == 2 and not pauses


def test_a_function_sees_no_secret_of_the_pod(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "GRPO_SECRET", "x")
    assert FunctionVerifier(spec(function)).score(items("secret", "dumpable")) == [0.0, 0.0]


def test_a_process_that_stops_reading_is_killed(function: str, tmp_path: Path) -> None:
    judge = FunctionVerifier(spec(function, workers=1, timeout_seconds=1))
    pid_file = tmp_path / "pid"
    judge.score(items("pid", pid_file=str(pid_file)))
    os.kill(int(pid_file.read_text()), signal.SIGSTOP)
    assert judge.score(items("x" * 2**20, "yes")) == [0.0, 11.0]  # more than a pipe holds
    assert judge.failures == 1


def test_many_open_files_do_not_matter(function: str) -> None:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert FunctionVerifier(spec(function)).score(items("yes")) == [11.0]
    finally:
        for file in files:
            os.close(file)


def test_a_function_cannot_read_other_requests(function: str) -> None:
    assert FunctionVerifier(spec(function)).score(items("read", "yes")) == [0.0, 11.0]


def test_a_result_that_is_not_a_number_is_a_failure(function: str) -> None:
    judge = FunctionVerifier(spec(function.replace("compute_score", "word")))
    assert judge.score(items("yes")) == [0.0] and judge.failures == 1


class _Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class _Task:
    """Prompts with a given ground truth."""

    def __init__(self, ground_truth: Any) -> None:
        self._ground_truth = ground_truth

    def prompt(self, index: int, tokenizer: Any) -> list[int]:
        return [index]

    def record(self, index: int) -> Record:
        assert index == 0
        return Record("mine", self._ground_truth, {})


def _manager(task: Any, judge: FunctionVerifier) -> RewardManager:
    letters: Any = _Letters()
    return RewardManager(task, letters, judge, InlineWorkers(letters))


def test_the_first_call_checks_the_ground_truth_of_the_first_row(function: str) -> None:
    def check(ground_truth: Any, **fields: Any) -> None:
        _manager(_Task(ground_truth), FunctionVerifier(spec(function, **fields))).check()

    check("yes")
    check({"is": "no text"})
    with pytest.raises(RewardError, match=r"reward\.py:7: KeyError: 'no such thing'"):
        check("raise", on_failure="zero")
    with pytest.raises(RewardError, match="no answer within 1 s"):
        check("hang", on_failure="zero", timeout_seconds=1)


def test_a_function_receives_token_ids_and_the_step(tmp_path: Path) -> None:
    (tmp_path / "ids.py").write_text(
        "def f(completion_ids, trainer_state, **_):\n"
        "    return [100 * trainer_state.global_step + len(completion_ids[0])]"
    )
    judge = FunctionVerifier(spec(f"{tmp_path}/ids.py:f"))
    manager = _manager(_Task("yes"), judge)
    manager.check()
    assert manager.score([Sample(0, 0, (110, 111, 32), (0.0,) * 3, 4, "engine")]) == [403.0]


def test_task_verifiers_are_checked_too() -> None:
    task = open_gym("reasoning-gym:gcd", seed=3)
    record = task.record(0)
    TaskVerifier(task, InlineWorkers(task)).check(Item(0, str(record.ground_truth), record))
    NoVerifier().check(Item(0, "", record))


def test_a_task_scores_itself_unless_the_job_names_a_reward(function: str) -> None:
    task = open_gym("reasoning-gym:gcd", seed=3)
    judge = verifier_of(task, None, InlineWorkers(task))
    assert isinstance(judge, TaskVerifier)
    record = task.record(5)
    assert judge.score([Item(5, str(record.ground_truth), record)]) == [1.0]
    assert isinstance(verifier_of(task, spec(function), InlineWorkers(task)), FunctionVerifier)
    assert isinstance(verifier_of(task, RewardSpec(builtin="math"), InlineWorkers(task)), FunctionVerifier)
    with pytest.raises(ValueError, match=r"spec\.reward: prompts from files need a reward"):
        verifier_of(object(), None, InlineWorkers(task))  # type: ignore[arg-type]
