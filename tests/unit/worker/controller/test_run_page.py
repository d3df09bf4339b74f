"""The page of a run: what the loop writes at its end, and what the controller serves."""

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.best import Best, keep_best
from grpo_worker.common.auth import FILE
from grpo_worker.common.step_log import StepLog
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.status import page_routes
from grpo_worker.controller.status.page_file import FILE as PAGE
from grpo_worker.controller.status.page_routes import PageRoutes
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application
from support.loop_world import World
from support.run_pages import (
    metrics_of,
    record,
    validations_of,
    write_records,
    write_restarts,
    write_validations,
)

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>')


def _run(world: World) -> dict[str, Any]:
    """Run a job; return the page's data as it was when the end was reported."""
    pages: list[str] = []
    update = world.board.update

    def note(**values: Any) -> None:
        if values.get("phase") in (Phase.SUCCEEDED, Phase.FAILED):
            pages.append((world.store / PAGE).read_text())
        update(**values)

    world.board.update = note  # type: ignore[method-assign]
    world.run()
    (page,) = pages
    found = _DATA.search(page)
    assert found is not None
    return dict(json.loads(found[1]))


def test_a_job_has_its_page_before_it_reports_its_end(tmp_path: Path) -> None:
    world = World(tmp_path, steps=6)

    def fail(updates: int) -> None:
        if updates == 2 and world.starts == 1:
            raise RuntimeError("the loss </script> is strange")

    world.before_update = fail
    data = _run(world)
    assert {one["name"]: one["points"] for one in data["series"]} == metrics_of(tmp_path)
    assert data["status"] == {
        "phase": "Succeeded", "message": "", "step": 6, "total": 6, "attempt": 2, "restarts": 1
    }  # fmt: skip
    ((step, count, text),) = data["faults"][0]["marks"]
    assert (data["faults"][0]["kind"], step, count) == ("restart: job", 3, 1)
    assert "the loss </script> is strange" in text and not data["live"]


def test_idle_time_is_part_of_each_step(tmp_path: Path) -> None:
    data = _run(World(tmp_path, steps=3))
    for _, seconds, _, idle in data["phases"]["rows"]:
        trainers, engines = idle
        assert 0 <= trainers <= seconds and engines >= 0.9, "engines wait while the update takes a second"


def test_a_job_that_fails_has_a_page_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, steps=6, restartPolicy={"maxRestarts": 0})

    def fail(updates: int) -> None:
        if updates == 2:
            raise RuntimeError("the loss is strange")

    write = StepLog._write

    def slow(log: StepLog, step: int, lines: bytes) -> None:
        time.sleep(0.2)  # the store is slow, and the page is made when the last record is there
        write(log, step, lines)

    monkeypatch.setattr(StepLog, "_write", slow)
    world.before_update = fail
    data = _run(world)
    assert data["status"]["phase"] == "Failed" and "the loss is strange" in data["status"]["message"]
    assert data["last"]["step"] == 2


@pytest.fixture
def board() -> ProgressBoard:
    return ProgressBoard()


def _client(
    board: ProgressBoard, folder: Path, program: str = "import sys; print(sys.argv[1:])"
) -> TestClient:
    routes = PageRoutes(board, JobFolder(folder, folder), [sys.executable, "-c", program]).routes()
    return TestClient(application(board, list, pages=routes))


def test_every_path_of_the_page_needs_the_key(
    tmp_path: Path, board: ProgressBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("secret")
    monkeypatch.setenv(FILE, str(tmp_path / "key"))
    client = _client(board, tmp_path)
    paths = ("/page", "/v1/page/data", "/v1/page/steps?after=0&time=0", "/v1/page/samples?step=1")
    for path in paths:
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"authorization": "Bearer secret"}).status_code == 200
    assert client.get("/v1/status").status_code == 200


def test_the_program_gets_what_is_asked_for(tmp_path: Path, board: ProgressBoard) -> None:
    client = _client(board, tmp_path)
    for path, options, kind in (
        ("/page", "['--live']", "text/html; charset=utf-8"),
        ("/v1/page/data", "['--data']", "application/json"),
        ("/v1/page/samples?step=4", "['--step=4']", "application/json"),
        ("/v1/page/samples?step=4&prompt=7", "['--step=4', '--prompt=7']", "application/json"),
    ):
        answer = client.get(path)
        assert answer.text.strip() == options and answer.headers["content-type"] == kind
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("samples", "step=NUMBER is missing"),
        ("samples?step=--model", "are numbers"),
        ("samples?step=1&prompt=x", "are numbers"),
        ("steps?after=1", "time"),
        ("steps?after=x&time=1", "invalid literal"),
        ("steps?after=1&time=1&validated=no", "invalid literal"),
    ],
)
def test_a_wrong_question_is_named(tmp_path: Path, board: ProgressBoard, path: str, why: str) -> None:
    answer = _client(board, tmp_path).get(f"/v1/page/{path}")
    assert answer.status_code == 400 and why in answer.json()["error"]


def test_a_program_that_fails_or_hangs_is_named(
    tmp_path: Path, board: ProgressBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = _client(board, tmp_path, "import sys; sys.exit('there are no samples of step 9')")
    answer = failed.get("/v1/page/samples?step=9")
    assert (answer.status_code, answer.json()["error"]) == (404, "there are no samples of step 9")
    monkeypatch.setattr(page_routes, "_SECONDS", 0.2)
    assert _client(board, tmp_path, "import time; time.sleep(60)").get("/page").status_code == 504


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


def test_one_page_is_made_at_a_time_and_the_status_does_not_wait(
    tmp_path: Path, board: ProgressBoard, gate: Path
) -> None:
    program = (
        "import pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'began')!r}).touch()\n"
        f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.02)"
    )
    client, answers = _client(board, tmp_path, program), []
    first = threading.Thread(target=lambda: answers.append(client.get("/page").status_code))
    first.start()
    while not (tmp_path / "began").exists():
        pass
    second = client.get("/v1/page/data")
    assert second.status_code == 503 and "try again" in second.json()["error"]
    assert client.get("/v1/status").status_code == 200
    assert client.get("/v1/page/steps?after=0&time=0").status_code == 200
    gate.touch()
    first.join(30)
    assert answers == [200] and client.get("/v1/page/data").status_code == 200


def test_a_store_that_does_not_answer_holds_few_requests(
    tmp_path: Path, board: ProgressBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, answered = threading.Semaphore(0), threading.Event()

    def hang(*_: Any) -> list[Any]:
        entered.release()
        answered.wait(30)
        return []

    monkeypatch.setattr(page_routes, "new_records", hang)
    client, path, answers = _client(board, tmp_path), "/v1/page/steps?after=0&time=0", list[int]()
    readers = [
        threading.Thread(target=lambda: answers.append(client.get(path).status_code)) for _ in range(4)
    ]
    for reader in readers:
        reader.start()
        assert entered.acquire(timeout=30)
    assert client.get(path).status_code == 503 and client.get("/v1/status").status_code == 200
    answered.set()
    for reader in readers:
        reader.join(30)
    assert answers == [200] * 4 and client.get(path).status_code == 200


def test_new_steps_come_with_the_status_and_replaced_ones_are_told_apart(
    tmp_path: Path, board: ProgressBoard
) -> None:
    write_records(tmp_path, range(1, 6))
    write_restarts(tmp_path, (2, "job", "early"), (4, "job", "late"))
    board.update(
        phase=Phase.TRAINING, step=5, total_steps=9, message="m", restarts={"job": 1, "infrastructure": 2}
    )
    client = _client(board, tmp_path)
    time = record(3)["wall_time"]
    answer = client.get(f"/v1/page/steps?after=3&time={time!r}").json()
    assert answer["status"] == {
        "phase": "Training", "message": "m", "step": 5, "total": 9, "attempt": 0, "restarts": 3
    }  # fmt: skip
    new = answer["new"]
    assert (new["steps"], new["last"]) == (2, {"step": 5, "time": record(5)["wall_time"]})
    (scores,) = [one["points"] for one in new["series"] if one["name"] == "critic/score/mean"]
    assert scores == [[step, record(step)["critic/score/mean"]] for step in (4, 5)]
    assert [row[0] for row in new["phases"]["rows"]] == [4, 5]
    assert [mark[0] for mark in new["faults"][0]["marks"]] == [4]
    assert client.get("/v1/page/steps?after=3&time=1.5").json()["new"] is None
    nothing = client.get(f"/v1/page/steps?after=5&time={record(5)['wall_time']!r}").json()["new"]
    assert (nothing["steps"], nothing["last"]["step"], nothing["series"]) == (0, 5, [])


def test_the_page_of_a_job_has_its_last_validation_and_what_is_kept(tmp_path: Path) -> None:
    sets = [{"name": "gcd", "data": "reasoning-gym:gcd", "prompts": 5}]
    world = World(tmp_path, steps=8, validation={"sets": sets, "everySteps": 4, "keepBest": "gcd"})
    world.score_of = lambda version: {0: 0.25, 4: 1.0}.get(version, 0.5)
    found = _run(world)["validation"]
    ((name, curves),) = [(one["name"], one["curves"]) for one in found["sets"]]
    assert {one["name"]: one["points"] for one in curves} == validations_of(tmp_path)[name]
    assert curves[0]["points"] == [[0, 0.25, 0.0], [4, 1.0, 0.0], [8, 0.5, 0.0]]
    assert found["kept"] == {"step": 4, "set": "gcd"}


def test_new_validations_come_with_the_checkpoint_that_is_kept_and_repeated_ones_are_told_apart(
    tmp_path: Path, board: ProgressBoard
) -> None:
    write_records(tmp_path, range(1, 13))
    client = _client(board, tmp_path)
    steps = f"/v1/page/steps?after=12&time={record(12)['wall_time']!r}"

    def new(validated: int) -> Any:
        found = client.get(f"{steps}&validated={validated}").json()["new"]
        return None if found is None else found["validation"]

    assert new(-1) == {"sets": [], "last": -1, "width": 1, "hidden": 0, "kept": None}
    write_validations(tmp_path, [0, 5, 10], Best(5, "aime"))
    found = new(5)
    points = {one["name"]: one["curves"][0]["points"] for one in found["sets"]}
    assert points == {name: of["score"][-1:] for name, of in validations_of(tmp_path).items()}
    assert (found["last"], found["kept"]) == (10, {"step": 5, "set": "aime"})
    keep_best(tmp_path / "checkpoints", Best(10, "aime"))
    assert new(10) == {"sets": [], "last": -1, "width": 1, "hidden": 0, "kept": {"step": 10, "set": "aime"}}
    write_validations(tmp_path, [5])
    assert new(10) is None, "the run has gone back to step 5"
    assert [one["curves"][0]["points"][0][0] for one in new(0)["sets"]] == [5, 5]
