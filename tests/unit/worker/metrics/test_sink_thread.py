"""The thread of a sink: what fails or is slow costs no step."""

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from grpo_operator.api.v1alpha1.observability import ObservabilitySpec, ThresholdSpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.metrics.sink_thread import SinkThread
from grpo_worker.metrics.sinks.base import Opening, RunArtifacts, SampleTable, Sink
from grpo_worker.metrics.sinks.configured import sinks_of
from grpo_worker.metrics.writer import MetricsWriter

TABLE = SampleTable("samples", 1, ("step",), [(1,)])


class Taken:
    """A service that notes what it takes, and may refuse to."""

    def __init__(self, refuses: tuple[str, ...] = ()) -> None:
        self.calls: list[Any] = []
        self._refuses = refuses

    def begin(self, after: int) -> None:
        self.calls.append(("begin", after))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._take("metrics", step)

    def table(self, table: SampleTable) -> None:
        self._take("tables", f"table of {table.step}")

    def artifacts(self, artifacts: RunArtifacts) -> None:
        self._take("artifacts", artifacts.page)

    def end(self, failed: bool) -> None:
        self.calls.append("failed" if failed else "end")

    def _take(self, what: str, call: Any) -> None:
        self.calls.append(call)
        if what in self._refuses:
            raise ConnectionError(f"no {what}\nfor you")


class Slow(Taken):
    """A service that takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.released.wait(30)
        super().write(step, metrics)


def opening(sink: Callable[[], Sink], remedy: str = "look at the service") -> Opening:
    return Opening("Service", sink, remedy)


def writer(folder: Path, *sinks: Sink, bounds: tuple[ThresholdSpec, ...] = ()) -> MetricsWriter:
    place = JobFolder(folder, folder)
    own = [opening(lambda sink=sink: sink) for sink in sinks]  # type: ignore[misc]
    return MetricsWriter(place, [*own, *sinks_of(ObservabilitySpec(), "job", place, {})], bounds)


def test_a_failing_sink_is_disabled_and_the_others_continue(tmp_path: Path) -> None:
    broken = Taken(refuses=("metrics",))
    writing = writer(tmp_path, broken, bounds=(ThresholdSpec(metric="actor/kl_loss", maximum=0.1),))
    writing.truncate(0)
    for step in (1, 2):
        writing.write(step, {"actor/kl_loss": 0.5})
    writing.flush()
    writing.end()
    lines = [json.loads(line) for line in writing.file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and broken.calls == [("begin", 0), 1]
    assert list((tmp_path / "tensorboard").iterdir())
    name = {"name": "actor/kl_loss"}
    assert REGISTRY.get_sample_value("grpo_metric", name) == 0.5
    assert REGISTRY.get_sample_value("grpo_metric_maximum", name) == 0.1


def test_a_warning_names_the_sink_the_error_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> Sink:
        raise PermissionError("no key")

    thread = SinkThread(opening(refuse, "set KEY"))
    thread.call(lambda sink: sink.begin(0))
    thread.finish()
    thread.join(time.monotonic() + 30)
    (record,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    assert record.getMessage() == (
        "sink Service cannot be opened and is not used any more until the controller restarts: "
        "PermissionError: no key: set KEY"
    )


def test_a_service_without_room_for_tables_still_gets_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = Taken(refuses=("tables", "artifacts"))
    writing = writer(tmp_path, service)
    writing.truncate(0)
    writing.write(1, {"loss": 0.5})
    for _ in range(2):
        writing.show_table(TABLE)
    writing.write(2, {"loss": 0.5})
    writing.end(RunArtifacts("page"), failed=True)
    assert service.calls[-1] == "failed" and service.calls.count("table of 1") in (1, 2)
    assert [call for call in service.calls if isinstance(call, int)] == [1, 2]
    assert "does not take tables and gets no tables any more" in caplog.text
    assert "does not take artifacts" in caplog.text


def test_a_slow_sink_stalls_no_step_and_gets_all_of_them(tmp_path: Path) -> None:
    slow = Slow()
    writing = writer(tmp_path, slow)
    writing.truncate(0)
    for step in (1, 2, 3):
        writing.write(step, {"loss": 0.5})  # would wait for 30 s each
    writing.flush()
    assert len(writing.file.read_text().splitlines()) == 3 and slow.calls in ([], [("begin", 0)])
    slow.released.set()
    writing.end(RunArtifacts("page"))
    assert slow.calls == [("begin", 0), 1, 2, 3, "page", "end"]


def test_a_service_that_is_opened_slowly_stalls_no_start(tmp_path: Path) -> None:
    service, answers = Taken(), threading.Event()

    def wait() -> Sink:
        answers.wait(30)
        return service

    began = time.monotonic()
    writing = MetricsWriter(JobFolder(tmp_path, tmp_path), [opening(wait)], [])
    writing.truncate(0)
    writing.write(1, {"loss": 0.5})
    assert time.monotonic() - began < 15 and not service.calls
    answers.set()
    writing.end()
    assert service.calls == [("begin", 0), 1, "end"]


def waiting_inside(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> tuple[Slow, SinkThread]:
    """Return a slow sink and its thread, which is inside a first call and lets ``most`` calls wait."""
    monkeypatch.setattr(f"grpo_worker.metrics.sink_thread.{name}", most)
    slow = Slow()
    thread = SinkThread(opening(lambda: slow))
    thread.call(lambda sink: sink.write(1, {}))
    while thread._calls:
        time.sleep(0.01)
    return slow, thread


def ended(slow: Slow, thread: SinkThread) -> None:
    slow.released.set()
    thread.finish()
    thread.join(time.monotonic() + 30)


def test_a_sink_that_is_far_behind_loses_the_oldest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, thread = waiting_inside(monkeypatch, "_WAITING", 2)
    for step in range(2, 7):
        thread.call(lambda sink, step=step: sink.write(step, {}))  # type: ignore[misc]
    ended(slow, thread)
    assert thread.dropped == 3 and slow.calls == [1, 5, 6]


def test_few_tables_wait_for_a_slow_sink_and_all_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, thread = waiting_inside(monkeypatch, "_TABLES", 2)
    for step in range(2, 7):
        thread.call(lambda sink, step=step: sink.write(step, {}))  # type: ignore[misc]
        thread.call(lambda sink: sink.table(TABLE), "tables")
    ended(slow, thread)
    assert thread.dropped_tables == 3 and thread.dropped == 0
    assert slow.calls == [1, 2, "table of 1", 3, "table of 1", 4, 5, 6]
