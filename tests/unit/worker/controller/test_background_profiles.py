"""Profiles beside the steps: who records which order, and that none waits for another target."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.messages import ProfileOrder, ProfileReport
from grpo_operator.api.v1alpha1.profile_request import parse_request
from grpo_worker.controller.profiles.background import BackgroundProfiles
from grpo_worker.controller.status.progress import ProgressBoard


class Job:
    """Ranks and engines that record nothing. ``traffic``: set when engines have requests."""

    def __init__(self, folder: Path) -> None:
        self.board, self.traffic = ProgressBoard(), threading.Event()
        self.asked: list[Any] = []
        self.profiles = BackgroundProfiles(folder, self.board.profiles, self, self)

    def beside_on(self, ranks: Sequence[int], method: str, *args: object) -> Callable[[], list[str]]:
        self.asked.append((tuple(ranks), method, *args))
        return lambda: [f"trainer-rank-{rank}.txt" for rank in ranks]

    def record(self, identity: str, engines: Sequence[str], steps: int, folder: Path) -> list[str]:
        assert self.traffic.wait(30)
        self.asked.append((identity, tuple(engines), steps, folder))
        if "pool-9" in engines:
            raise RuntimeError("engines=pool-9: the pool has no such engine")
        return ["engine.trace.json.gz"]

    def order(self, **requests: str) -> None:
        orders = [ProfileOrder(id=name, request=parse_request(text)) for name, text in requests.items()]
        self.board.profiles.add(orders)

    def ended(self, identity: str) -> ProfileReport:
        deadline = time.monotonic() + 30
        while True:
            report = next(entry for entry in self.board.get().profiles if entry.id == identity)
            if report.finished_at:
                return report
            assert time.monotonic() < deadline, report
            time.sleep(0.01)


@pytest.fixture
def running(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    job.profiles.start()
    return job


def test_an_engine_without_requests_delays_no_stacks(running: Job, tmp_path: Path) -> None:
    running.order(a="engines steps=7", b="py-spy ranks=1,0 seconds=3")
    report = running.ended("b")
    assert (report.state, report.files) == ("Written", ["trainer-rank-0.txt", "trainer-rank-1.txt"])
    assert running.asked == [((0, 1), "write_stacks", str(tmp_path / "b"), 3)]
    running.traffic.set()
    report = running.ended("a")
    assert (report.state, report.path) == ("Written", str(tmp_path / "a"))
    assert running.asked[1] == ("a", (), 7, tmp_path / "a")


def test_the_stacks_of_the_controller_are_its_own(running: Job, tmp_path: Path) -> None:
    running.order(a="py-spy controller")
    report = running.ended("a")
    assert (report.state, report.files) == ("Written", ["controller.txt"]), report.message
    assert "test_the_stacks_of_the_controller" in (tmp_path / "a" / "controller.txt").read_text()


def test_a_failure_is_reported_and_the_next_order_goes_on(running: Job) -> None:
    running.traffic.set()
    running.order(a="engines engines=pool-9", b="engines")
    report = running.ended("a")
    assert report.state == "Failed" and "engines=pool-9: the pool has no such engine" in report.message
    assert running.ended("b").state == "Written"


def test_traces_of_steps_are_left_to_the_loop(running: Job) -> None:
    running.order(a="torch", b="py-spy")
    running.ended("b")
    assert running.board.get().profiles[0].state == "Requested"


def test_what_was_ordered_before_the_controller_joined_ray_is_recorded(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.order(a="py-spy")
    assert job.board.get().profiles[0].state == "Requested"
    job.profiles.start()
    assert job.ended("a").state == "Written"
