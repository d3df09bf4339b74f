"""Profiles ordered from a running gang: a real trace by torch's profiler, and the stacks of a stuck rank."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from grpo_operator.api.messages import ControllerStatus, ProfileReport
from grpo_worker.controller.profiles.background import BackgroundProfiles
from grpo_worker.controller.profiles.step_traces import StepTraces
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application
from grpo_worker.controller.training.worker_group import WorkerGroup
from grpo_worker.roles.dispatch import Dispatch, RankInfo, register
from grpo_worker.roles.trainer import TrainerWorker
from support.objects import job, spec_of
from support.ray_gangs import ray_gang


class Sums(TrainerWorker):
    """A real rank that only sums."""

    def _build(self, rank: int, world: int, config: dict[str, Any]) -> RankInfo:
        return RankInfo(rank, 0, 0, 0, rank, 1, world)

    @register(Dispatch.ONE_TO_ALL)
    def total(self) -> float:
        value = torch.ones(4, 4).mm(torch.ones(4, 4)).sum()
        torch.distributed.all_reduce(value)
        return float(value)

    @register(Dispatch.ONE_TO_ALL)
    def wait_for_file(self, file: str) -> None:
        while not Path(file).exists():
            time.sleep(0.1)


class NoEngines:
    def record(self, *_: object) -> list[str]:
        raise RuntimeError("no engine serves")


class Controller:
    """The part of a controller that serves profiles, with the HTTP routes that the operator uses."""

    def __init__(self, gang: WorkerGroup, folder: Path) -> None:
        self.gang, self.board = gang, ProgressBoard()
        self.traces = StepTraces(spec_of(job(totalSteps=9)), folder, self.board.profiles, gang)
        BackgroundProfiles(folder, self.board.profiles, gang, NoEngines()).start()
        self._http = TestClient(application(self.board, list))

    def order(self, identity: str, **request: Any) -> None:
        body = {"orders": [{"id": identity, "request": request}]}
        assert self._http.post("/v1/profile", json=body).status_code == 200

    def train(self, step: int) -> dict[str, float]:
        return {"total": self.gang.call("total")[0]}

    def ended(self) -> ProfileReport:
        """Return the newest report, once its order has ended."""
        deadline = time.monotonic() + 60
        while True:
            status = ControllerStatus.model_validate(self._http.get("/v1/status").json())
            if status.profiles[-1].finished_at:
                return status.profiles[-1]
            assert time.monotonic() < deadline, status.profiles
            time.sleep(0.1)


@pytest.fixture(scope="module")
def gang() -> Iterator[WorkerGroup]:
    with ray_gang(Sums, 2, 60.0) as group:
        yield group


def test_an_ordered_trace_has_the_kernels_and_collectives_of_its_steps(
    gang: WorkerGroup, tmp_path: Path
) -> None:
    controller = Controller(gang, tmp_path)
    controller.order("a", ranks=[1], steps=2)
    metrics = [controller.traces.step(step, controller.train) for step in range(1, 4)]
    report = controller.ended()
    assert (report.state, report.files) == ("Written", ["trainer-rank-1-steps-1-2.json"])
    assert [file.name for file in Path(report.path).iterdir()] == report.files
    events = json.loads((Path(report.path) / report.files[0]).read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("aten::mm") == 2 and any(name.startswith("gloo:all_reduce") for name in names)
    assert "profile/communication_share" in metrics[1] and "profile/communication_share" not in metrics[2]


def test_the_stacks_of_a_rank_are_written_while_it_is_stuck(gang: WorkerGroup, tmp_path: Path) -> None:
    controller, signal = Controller(gang, tmp_path), tmp_path / "signal"
    results = gang.begin("wait_for_file", str(signal))
    try:
        controller.order("b", tool="py-spy", ranks=[1])
        report = controller.ended()
        assert (report.state, report.files) == ("Written", ["trainer-rank-1.txt"]), report.message
        assert "wait_for_file" in (Path(report.path) / "trainer-rank-1.txt").read_text()
    finally:
        signal.touch()
        results()


def test_samples_of_the_controller_are_written_for_speedscope(gang: WorkerGroup, tmp_path: Path) -> None:
    controller = Controller(gang, tmp_path)
    controller.order("c", tool="py-spy", target="controller", seconds=1)
    deadline = time.monotonic() + 60
    while not controller.board.get().profiles[-1].finished_at and time.monotonic() < deadline:
        sum(range(10**5))  # something to sample
    report = controller.ended()
    assert (report.state, report.files) == ("Written", ["controller.speedscope.json"]), report.message
    assert json.loads((Path(report.path) / report.files[0]).read_text())["profiles"]


def test_what_fails_beside_the_steps_is_reported(gang: WorkerGroup, tmp_path: Path) -> None:
    controller = Controller(gang, tmp_path)
    controller.order("d", target="engines")
    report = controller.ended()
    assert report.state == "Failed" and "no engine serves" in report.message
