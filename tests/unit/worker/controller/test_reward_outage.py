"""No reward process starts, or the server fails, for hours: the trainers wait, alive, and nothing is lost."""

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.api.weight_path import WeightPath
from grpo_worker.controller.main import run
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.data.tasks import Record
from grpo_worker.rewards.verifiers import FunctionVerifier, HttpVerifier, Item
from grpo_worker.rollout.sampling import Sample
from support.clocks import FakeClock
from support.loop_world import World
from support.objects import job, spec_of
from support.parking import OUTAGE
from support.reward_servers import reward_server

FUNCTION = "def compute_score(solution_str): return float(int(solution_str) % 2)"


@pytest.fixture
def verifier(tmp_path: Path) -> FunctionVerifier:
    (tmp_path / "own.py").write_text(FUNCTION)
    name = f"{tmp_path}/own.py:compute_score"
    return FunctionVerifier(RewardSpec(function=name, workers=2, timeout_seconds=30))


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeClock, Callable[[], bool]], None]:
    """Return a function that lets processes start only while it is so; pauses before retries are virtual."""
    popen = subprocess.Popen

    def install(clock: FakeClock, starts: Callable[[], bool]) -> None:
        def start(*args: Any, **kwargs: Any) -> Any:
            if not starts():
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            return popen(*args, **kwargs)

        monkeypatch.setattr(subprocess, "Popen", start)
        monkeypatch.setattr("grpo_worker.rewards.sandbox.time.sleep", clock.sleep)

    return install


@pytest.mark.fault(
    row="25",
    point="no process of the reward starts for two hours",
    witness="the message names the field; parked once",
    compared="ledger of an undisturbed run, with its rewards",
    partial="stand-in ranks and time",
)
def test_a_step_whose_reward_processes_do_not_start_for_hours_waits(
    tmp_path: Path, verifier: FunctionVerifier, outage: Any
) -> None:
    calm = World(tmp_path / "calm").run()
    world = World(tmp_path / "late")
    began: list[float] = []

    def starts() -> bool:
        began.append(world.clock.now())
        return world.clock.now() >= began[0] + OUTAGE

    def score(samples: list[Sample]) -> list[float]:
        record = Record("mine", "", {})
        return verifier.score([Item(s.prompt_index, str(s.ids[0]), record) for s in samples])

    outage(world.clock, starts)
    world.engines.score = score  # type: ignore[method-assign]
    assert world.run() == calm, "the same samples of the same attempt, with the same rewards"
    status = world.board.get()
    assert (status.phase, status.attempt, world.starts, status.times_parked) == (Phase.SUCCEEDED, 1, 1, 1)
    assert world.clock.now() >= 1000 + OUTAGE
    assert any("spec.reward.function=" in seen.waiting for seen in world.seen)


@pytest.mark.fault(
    row="25",
    point="the reward server answers all requests with status 500 for half an hour",
    witness="the message names the field and the status; parked once",
    compared="ledger of an undisturbed run, with its rewards",
    partial="stand-in ranks and time",
)
def test_a_step_whose_reward_server_fails_waits_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = World(tmp_path / "calm").run()
    world = World(tmp_path / "late")
    monkeypatch.setattr(
        "grpo_worker.rewards.server.time", SimpleNamespace(sleep=world.clock.sleep, monotonic=world.clock.now)
    )
    began: list[float] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        began.append(world.clock.now())
        if world.clock.now() < began[0] + OUTAGE / 4:
            return 500, {}
        return 200, {"scores": [float(int(item["solution_str"]) % 2) for item in body["items"]]}

    with reward_server(answer) as (url, _):
        judge = HttpVerifier(RewardSpec(url=url, timeout_seconds=300))
        record = Record("mine", "", {})

        def score(samples: list[Sample]) -> list[float]:
            return judge.score([Item(s.prompt_index, str(s.ids[0]), record) for s in samples])

        world.engines.score = score  # type: ignore[method-assign]
        assert world.run() == calm, "the same samples of the same attempt, with the same rewards"
    status = world.board.get()
    assert (status.phase, status.attempt, world.starts, status.times_parked) == (Phase.SUCCEEDED, 1, 1, 1)
    assert world.clock.now() >= began[0] + OUTAGE / 4
    reasons = [seen.waiting for seen in world.seen if seen.waiting]
    assert reasons and all("spec.reward.url=" in reason and "500" in reason for reason in reasons)


def test_a_job_that_begins_on_such_a_node_waits_with_a_back_off(
    tmp_path: Path, verifier: FunctionVerifier, outage: Any
) -> None:
    clock, board, ran = FakeClock(), ProgressBoard(), []
    config = JobConfig(
        name="j", namespace="n", spec=spec_of(job()), rollout_service="s", min_available=1, fp8=False,
        weight_path=WeightPath(), writer="w", store=tmp_path / "store",
    )  # fmt: skip
    outage(clock, lambda: clock.now() >= 1000 + OUTAGE)

    class Loop:
        def run(self) -> None:
            ran.append(clock.now())

    def build(_failures: Any) -> Any:
        verifier.check(Item(0, "1", Record("mine", "", {})))
        return Loop()

    run(config, board, build, clock)
    assert ran and ran[0] >= 1000 + OUTAGE
    status = board.get()
    assert status.restarts.job == 0 and 0 < status.restarts.infrastructure < 40
    assert "Resource temporarily unavailable; it is tried again" in status.last_failure
