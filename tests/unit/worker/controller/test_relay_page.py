"""The program in a controller's pod that relays the page to a user: with the pod's key, over TLS too."""

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_worker.common.auth import FILE
from grpo_worker.common.listeners import Server
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller import relay_page
from grpo_worker.controller.status.page_routes import PageRoutes
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application
from support.engine_server import free_port
from support.pod_tls import PodTls, owner

JOB = owner("GRPOJob", "a", "aaaa1111-1")


@pytest.fixture(params=["http", "tls"])
def pod(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Run the rest of the test in a controller's pod; its port."""
    (tmp_path / "key").write_text("secret")
    monkeypatch.setenv(FILE, str(tmp_path / "key"))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    port = free_port()
    monkeypatch.setattr(relay_page, "CONTROLLER_PORT", port)
    pages = PageRoutes(
        ProgressBoard(), JobFolder(tmp_path, tmp_path), [sys.executable, "-c", "print('a page')"]
    )
    inside = (
        PodTls(tmp_path / "tls", "m" * 64, JOB).inside()
        if request.param == "tls"
        else contextlib.nullcontext()
    )
    with inside:
        server = Server(application(ProgressBoard(), list, pages=pages.routes()), port)
        thread = threading.Thread(target=server.run)
        thread.start()
        yield port
        server.stop()
        thread.join(30)


def _relayed(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    answers = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{path}\n" for path in paths)))
    monkeypatch.setattr(sys, "stdout", answers)
    relay_page.main()
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_paths_are_answered_in_their_order(pod: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, steps, wrong = _relayed(["/page", "/v1/page/steps?after=0&time=0", "/v1/page/samples"], monkeypatch)
    assert page == {"status": 200, "type": "text/html; charset=utf-8", "body": "a page\n"}
    assert json.loads(steps["body"])["new"]["steps"] == 0
    assert wrong["status"] == 400
    (tmp_path / "key").write_text("another")
    assert _relayed(["/page"], monkeypatch)[0]["status"] == 200, "the key is read for each request"


def test_a_controller_that_does_not_answer_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(relay_page, "CONTROLLER_PORT", free_port())
    (answer,) = _relayed(["/page"], monkeypatch)
    assert answer["status"] == 502 and "the controller does not answer" in json.loads(answer["body"])["error"]
