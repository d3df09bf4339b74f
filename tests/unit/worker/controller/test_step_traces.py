"""Ordered traces of training steps, from the operator's request to the status of the controller."""

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from grpo_operator.api.messages import ControllerStatus, ProfileReport
from grpo_operator.api.v1alpha1.observability import ObservabilitySpec, ProfileSpec
from grpo_worker.controller.profiles.step_traces import StepTraces
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application
from grpo_worker.profiling.trace import StepTrace, Traced
from support.loop_world import World
from support.objects import job, spec_of


class Ranks:
    """Two ranks that record nothing. ``log``: calls and steps. ``parts``: what stopping a trace returns."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.parts = [Traced("rank-0.json", {"profile/communication_share": 0.5}), Traced()]

    def call(self, method: str, *args: object) -> list[Traced]:
        self.log.append(args[0] if args else method)
        return self.parts

    def train(self, step: int) -> dict[str, float]:
        self.log.append(step)
        return {"step": float(step)}


class Controller:
    """The part of a controller that serves orders of profiles."""

    def __init__(self, folder: Path, profile: dict[str, Any] | None = None) -> None:
        self.board, self.ranks = ProgressBoard(), Ranks()
        spec = spec_of(job(totalSteps=9))
        changed = ObservabilitySpec(profile=ProfileSpec.model_validate(profile) if profile else None)
        spec = spec.model_copy(update={"observability": changed})  # nsight, though the job trains on CPUs
        self.traces = StepTraces(spec, folder, self.board.profiles, self.ranks)
        self._http = TestClient(application(self.board, list))

    def order(self, identity: str, **request: Any) -> None:
        body = {"orders": [{"id": identity, "request": request}]}
        assert self._http.post("/v1/profile", json=body).status_code == 200

    def run(self, first: int, last: int) -> list[dict[str, float]]:
        return [self.traces.step(step, self.ranks.train) for step in range(first, last + 1)]

    def reports(self) -> list[ProfileReport]:
        return ControllerStatus.model_validate(self._http.get("/v1/status").json()).profiles


def test_an_ordered_trace_covers_the_next_steps(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.run(1, 1)
    controller.order("a", ranks=[1], steps=2)
    assert controller.reports()[0].state == "Requested"
    (metrics,) = controller.run(2, 2)
    assert controller.reports()[0].state == "Recording" and "profile/communication_share" not in metrics
    metrics, _ = controller.run(3, 4)
    assert metrics == {"step": 3.0, "profile/communication_share": 0.5}
    trace = StepTrace("torch", (1,), 2, 3, str(tmp_path / "a"))
    assert controller.ranks.log == [1, trace, 2, 3, "stop_trace", 4]
    (report,) = controller.reports()
    assert (report.state, report.path, report.files) == ("Written", str(tmp_path / "a"), ["rank-0.json"])


def test_an_order_that_is_sent_again_is_recorded_once(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    for step in range(1, 4):
        controller.order("a")
        controller.run(step, step)
    assert controller.ranks.log.count("stop_trace") == 1 and len(controller.reports()) == 1


def test_orders_follow_each_other_and_end_with_the_job(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.order("a", steps=2)
    controller.order("b", steps=50)
    controller.run(6, 9)
    spans = [(entry.first, entry.last) for entry in controller.ranks.log if isinstance(entry, StepTrace)]
    assert spans == [(6, 7), (8, 9)]
    assert [report.state for report in controller.reports()] == ["Written", "Written"]


def test_an_order_waits_for_the_trace_of_the_spec(tmp_path: Path) -> None:
    controller = Controller(tmp_path, {"stepStart": 3, "stepEnd": 4})
    controller.order("a", steps=2)
    controller.run(2, 6)
    traces = [entry for entry in controller.ranks.log if isinstance(entry, StepTrace)]
    assert [(trace.first, trace.last) for trace in traces] == [(3, 4), (5, 6)]
    assert [Path(trace.folder).name for trace in traces] == [tmp_path.name, "a"]


def test_a_restart_of_the_ranks_fails_what_they_recorded_and_keeps_what_waits(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.order("a", steps=3)
    controller.order("b")
    controller.run(1, 1)
    controller.traces.begin_attempt()
    controller.run(1, 1)
    first, second = controller.reports()
    assert first.state == "Failed" and "restarted" in first.message and second.state == "Written"


def test_the_error_of_a_rank_is_reported_with_its_number(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.ranks.parts = [Traced(), Traced(error="OSError: no space left on device")]
    controller.order("a", ranks=[0, 1])
    assert controller.run(1, 1) == [{"step": 1.0}]
    (report,) = controller.reports()
    assert (report.state, report.message) == ("Failed", "rank 1: OSError: no space left on device")


def test_nsight_records_once_in_the_life_of_the_ranks(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    controller.order("a", tool="nsight")
    controller.run(1, 1)
    controller.order("b", tool="nsight")
    controller.run(2, 2)
    first, second = controller.reports()
    assert first.state == "Written" and first.path == str(tmp_path) and "nsys writes" in first.message
    assert second.state == "Failed" and "it has recorded steps 1 to 1: use torch" in second.message
    controller.traces.begin_attempt()
    controller.order("c", tool="nsight")
    controller.run(2, 2)
    assert controller.reports()[-1].state == "Written"


def test_nsight_leaves_out_the_trace_of_the_spec_after_an_order(tmp_path: Path) -> None:
    controller = Controller(tmp_path, {"tool": "nsight", "stepStart": 3, "stepEnd": 3})
    controller.order("a", tool="nsight")
    controller.run(1, 4)
    assert [entry.first for entry in controller.ranks.log if isinstance(entry, StepTrace)] == [1]


def test_without_steps_in_the_spec_nsight_records_what_is_ordered(tmp_path: Path) -> None:
    controller = Controller(tmp_path, {"tool": "nsight"})
    controller.run(1, 2)
    controller.order("a", tool="nsight", steps=2)
    controller.run(3, 4)
    assert [(e.first, e.last) for e in controller.ranks.log if isinstance(e, StepTrace)] == [(3, 4)]


def test_a_malformed_order_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    with pytest.raises(ValueError, match="steps"):
        controller.order("a", steps=0)
    controller.order("b")
    controller.run(1, 1)
    assert [report.state for report in controller.reports()] == ["Written"]


def test_the_loop_traces_what_is_ordered_and_asks_its_ranks_for_nothing_else(tmp_path: Path) -> None:
    world = World(tmp_path, steps=3)
    app = TestClient(application(world.board, list))

    def order(version: int) -> None:
        if version == 1:
            app.post("/v1/profile", json={"orders": [{"id": "a", "request": {"steps": 1}}]})

    world.before_generation = order
    world.run()
    assert world.calls.count("start_trace") == world.calls.count("stop_trace") == 1
    assert world.board.get().profiles[0].state == "Written"
