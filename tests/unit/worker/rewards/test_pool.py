"""Answer workers: other processes decode and judge, and one that dies is replaced once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_worker.common.cpus import available_cpus
from grpo_worker.data.tasks import open_gym
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.rewards.answers import AnswerWorker
from grpo_worker.rewards.base import Item, RewardError
from grpo_worker.rewards.manager import RewardManager, open_reward
from grpo_worker.rewards.pool import WorkerDiedError, WorkerPool, WorkError
from grpo_worker.rewards.verifiers import TaskVerifier
from grpo_worker.rollout.sampling import Sample
from support.pool_worker import Misbehaving

GCD = "reasoning-gym:gcd"


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("GRPO_SECRET", "x")
    made = WorkerPool(Misbehaving(), 2)
    yield made
    made.close()


def test_methods_run_in_processes_that_see_no_secrets(pool: WorkerPool) -> None:
    found = {pool.submit("where").result() for _ in range(4)}
    assert os.getpid() not in found and len(found) == 1, "an idle process is used again"
    assert not pool.submit("sees", "GRPO_SECRET").result() and pool.submit("sees", "PATH").result()
    assert not pool.submit("is_dumpable").result()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in found)


def test_a_call_whose_process_dies_is_made_once_more(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.submit("die", 1, tmp_path / "once").result(30) == 2
    with pytest.raises(WorkerDiedError, match=r"died in die with exit code -9: raise the memory"):
        pool.submit("die", 9, tmp_path / "always").result(30)
    assert (tmp_path / "always").read_text() == "xx"


def test_a_process_that_died_while_idle_is_replaced(pool: WorkerPool) -> None:
    first = pool.submit("where").result()
    os.kill(first, signal.SIGKILL)
    assert pool.submit("where").result(30) != first


def test_an_error_is_passed_on_and_the_process_goes_on(pool: WorkerPool) -> None:
    pid = pool.submit("where").result()
    task = open_gym(GCD, 3)
    with pytest.raises(WorkError, match=r"KeyError\('ground'\)"):
        pool.submit("score", 0, "1").result()
    with pytest.raises(RewardError, match=r"spec\.data\.train: gcd's verifier: KeyError\('ground'\)"):
        TaskVerifier(task, pool).check(Item(0, "1", task.record(0)))
    assert pool.submit("where").result() == pid


def test_a_task_judges_the_same_in_the_workers() -> None:
    task, tokenizer = open_gym(GCD, 3), load_tokenizer("preset:tiny-moe")
    reward = open_reward(task, tokenizer, None)
    reward.check()
    answers = ["", "1", "7 ", str(task.record(3).ground_truth), f" {task.record(4).ground_truth}\n"]
    samples = [
        Sample(index, 0, ids, (0.0,) * len(ids), 0, "e")
        for index, ids in enumerate(tokenizer.encode(answer) for answer in answers)
    ]
    own = [task.score(s.prompt_index, tokenizer.decode(s.ids).strip()) for s in samples]
    assert reward.start(samples).result(60) == own and 1.0 in own and len(set(own)) > 1
    reward.close()


def test_workers_are_small() -> None:
    """They import neither torch nor transformers, which would take 500 MB in each."""
    code = (
        "import sys, grpo_worker.rewards.worker, grpo_worker.rewards.answers; "
        "sys.exit(sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()) or 0)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_there_are_no_more_workers_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def start(worker: AnswerWorker, count: int) -> WorkerPool:
        counts.append(count)
        return WorkerPool(worker, count)

    for cpus in (2, 16):
        monkeypatch.setattr("grpo_worker.rewards.manager.available_cpus", lambda cpus=cpus: cpus)
        made: RewardManager = open_reward(open_gym(GCD, 3), load_tokenizer("preset:tiny-moe"), None, start)
        made.close()
    assert counts == [2, 4]


@pytest.mark.parametrize(("text", "count"), [("max 100000", 99), ("150000 100000", 2), ("1000 100000", 1)])
def test_cpus_are_those_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, count: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(99)))
    (tmp_path / "cpu.max").write_text(text)
    assert available_cpus(tmp_path / "cpu.max") == count
    assert available_cpus(tmp_path / "missing") == 99
