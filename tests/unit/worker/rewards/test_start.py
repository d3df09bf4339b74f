"""Starting a reward function: a load error is named and never becomes a reward."""

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.controller.recovery.failures import comes_from_outside
from grpo_worker.data.tasks import Record
from grpo_worker.rewards import function, process
from grpo_worker.rewards.function import START_PAUSES
from grpo_worker.rewards.verifiers import FunctionVerifier, Item, RewardError


def items(*answers: str) -> list[Item]:
    return [Item(i, answer, Record("mine", "yes", {})) for i, answer in enumerate(answers)]


def spec(function: str, **fields: Any) -> RewardSpec:
    return RewardSpec(**({"function": function, "workers": 2, "timeout_seconds": 5} | fields))


BROKEN = """
import json
if __name__:
    {line}

def compute_score(solution_str):
    return 1
"""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between starts, without sleeping."""
    made: list[float] = []
    monkeypatch.setattr("grpo_worker.rewards.sandbox.time.sleep", made.append)
    return made


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("json.no_such_name", r"compute_score: broken\.py:4: AttributeError: module 'json'"),
        ("import no_such_package", r"compute_score: broken\.py:4: ModuleNotFoundError: No module named"),
        ("1 +", r"compute_score: broken\.py:4: SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "did not start: the process died with exit code 3$"),
    ],
)
def test_a_module_that_does_not_load_gives_no_rewards(
    tmp_path: Path, pauses: list[float], line: str, problem: str
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN.format(line=line))
    name = f"{tmp_path}/broken.py:compute_score"
    judge = FunctionVerifier(spec(name))
    with pytest.raises(RewardError, match=rf"^spec\.reward\.function=/.*{problem}"):
        judge.check(items("yes")[0])
    assert not pauses
    with pytest.raises(RewardError, match=rf"^spec\.reward\.function=/.*{problem}"):
        judge.score(items("yes", "no", "yes"))
    assert tuple(pauses) == START_PAUSES


def test_a_module_that_never_finishes_loading_times_out(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "START_FACTOR", 2)
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    judge = FunctionVerifier(spec(f"{tmp_path}/slow.py:compute_score", timeout_seconds=1))
    with pytest.raises(RewardError, match=r"no answer within 2 s .*spec\.reward\.timeoutSeconds=1"):
        judge.check(items("yes")[0])
    assert not pauses


def test_a_module_that_loads_later_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def appear(seconds: float) -> None:
        (tmp_path / "late.py").write_text("def compute_score(solution_str): return 1")

    monkeypatch.setattr("grpo_worker.rewards.sandbox.time.sleep", appear)
    judge = FunctionVerifier(spec(f"{tmp_path}/late.py:compute_score"))
    assert judge.score(items("yes", "no", "yes")) == [1.0] * 3 and judge.failures == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "/nowhere/reward.py:compute_score",
            r"^spec\.reward\.function=/nowhere/reward\.py:compute_score: no file /nowhere/reward\.py; give",
        ),
        ("no_such_package.rewards:f", "No module named 'no_such_package'; give"),
        ("json:no_such_function", "has no attribute 'no_such_function'; give"),
    ],
)
def test_a_missing_function_is_named(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        FunctionVerifier(spec(name)).check(items("yes")[0])


def _verifier(tmp_path: Path, module: str, **fields: Any) -> FunctionVerifier:
    (tmp_path / "own.py").write_text(f"{module}\ndef compute_score(solution_str): return 1")
    return FunctionVerifier(spec(f"{tmp_path}/own.py:compute_score", **fields))


def _waits(judge: FunctionVerifier, problem: str) -> None:
    """Check that a failure to start is one that waiting may change, before the job and in a step."""
    with pytest.raises(RewardError, match=problem) as caught:
        judge.check(items("yes")[0])
    assert comes_from_outside(caught.value)
    with pytest.raises(ConnectionError, match=rf"^spec\.reward\.function=/.*{problem}.*; it is tried again$"):
        judge.score(items("yes", "no", "yes"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("import os; os.kill(os.getpid(), 9)", "did not start: the process died with exit code -9"),
        ("raise OSError(116, 'Stale file handle')", r"own\.py:1: OSError: \[Errno 116\] Stale file handle"),
        ("import time; time.sleep(600)", r"no answer within 2 s .*spec\.reward\.timeoutSeconds=1"),
    ],
    ids=["no memory", "a store that is away", "a cold file system"],
)
def test_a_process_that_does_not_start_for_a_reason_outside_the_function_is_waited_for(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch, line: str, problem: str
) -> None:
    monkeypatch.setattr(process, "START_FACTOR", 2)
    monkeypatch.setattr(function, "START_PAUSES", (1.0,))
    slow = "sleep" in line
    _waits(_verifier(tmp_path, line, timeout_seconds=1 if slow else 30), problem)


def test_a_node_that_starts_no_process_is_waited_for(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = _verifier(tmp_path, "")

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        _waits(judge, "did not start: .*Resource temporarily unavailable")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")  # it ends before it loads the function
        _waits(judge, "did not start: the process died with exit code 1")
    assert judge.score(items("yes")) == [1.0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("import os; os.kill(os.getpid(), 11)", "did not start: the process died with exit code -11$"),
        ("import os; os._exit(1)", "did not start: the process died with exit code 1$"),
        ("open('/nowhere/words.txt')", r"own\.py:1: FileNotFoundError: .*'/nowhere/words\.txt'"),
        ("x = [0] * 10**10", r"own\.py:1: MemoryError"),
    ],
)
def test_a_module_that_ends_its_own_process_is_the_functions_fault(
    tmp_path: Path, pauses: list[float], line: str, problem: str
) -> None:
    judge = _verifier(tmp_path, line)
    with pytest.raises(RewardError, match=problem) as caught:
        judge.check(items("yes")[0])
    assert not comes_from_outside(caught.value)
    with pytest.raises(RewardError, match=problem):
        judge.score(items("yes", "no"))
