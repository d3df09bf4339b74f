"""Judging by a server: it may be away for a while."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.data.tasks import Record
from grpo_worker.rewards import server as server_module
from grpo_worker.rewards.verifiers import HttpVerifier, Item, RewardError


def items(*answers: str) -> list[Item]:
    return [Item(i, answer, Record("mine", "yes", {})) for i, answer in enumerate(answers)]


class _Server(BaseHTTPRequestHandler):
    answers: list[tuple[int, Any]]
    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        code, answer = self.answers.pop(0)
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Server]]]:
    handler = type("Handler", (_Server,), {"answers": [], "asked": []})
    with HTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/judge", handler
        running.shutdown()


def test_a_server_judges_and_is_asked_again_when_it_stumbles(server: tuple[str, type[_Server]]) -> None:
    url, handler = server
    handler.answers += [(500, {}), (200, {"scores": [1]}), (200, {"scores": [1, 0.5]})]
    judge = HttpVerifier(RewardSpec(url=url, timeout_seconds=5))
    assert judge.score(items("a", "b")) == [1.0, 0.5]
    assert judge.failures == 2 and len(handler.asked) == 3
    assert handler.asked[0]["items"][1] == {
        "data_source": "mine",
        "ground_truth": "yes",
        "extra_info": {},
        "solution_str": "b",
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that the verifier made, without their time; what it thinks the time is goes on by them."""
    pauses: list[float] = []
    monkeypatch.setattr(server_module.time, "sleep", pauses.append)
    monkeypatch.setattr(server_module.time, "monotonic", lambda: sum(pauses))
    return pauses


def test_a_server_that_is_away_for_a_moment_is_asked_again(
    server: tuple[str, type[_Server]], clock: list[float]
) -> None:
    url, handler = server
    handler.answers += [(503, {})] * 5 + [(200, {"scores": [1]})]
    assert HttpVerifier(RewardSpec(url=url, timeout_seconds=30)).score(items("a")) == [1.0]
    assert clock == [0.5, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((500, {}), "500"),
        ((404, {}), "404"),
        ((200, {"scores": [float("nan")]}), r"scores\[0\]=nan: give finite numbers"),
        ((200, {"points": [1]}), "KeyError"),
    ],
)
def test_a_server_that_never_judges_stops_the_step(
    server: tuple[str, type[_Server]], clock: list[float], answer: tuple[int, Any], problem: str
) -> None:
    url, handler = server
    handler.answers += [answer] * 9
    judge = HttpVerifier(RewardSpec(url=url, timeout_seconds=5))
    with pytest.raises(RewardError, match=rf"spec\.reward\.url=http://127.*{problem}.*timeoutSeconds=5 s"):
        judge.check(items("a")[0])
    assert judge.failures == len(handler.asked) == 4 and sum(clock) <= 5


@pytest.mark.parametrize("code", [502, 503, 504])
def test_a_server_that_is_not_there_is_no_wrong_answer(
    server: tuple[str, type[_Server]], clock: list[float], code: int
) -> None:
    url, handler = server
    handler.answers += [(code, {})] * 9
    judge = HttpVerifier(RewardSpec(url=url, timeout_seconds=5))
    with pytest.raises(ConnectionError, match=rf"^spec\.reward\.url=http://127.*{code}.*start the server"):
        judge.check(items("a")[0])
    assert len(handler.asked) == 1 and not clock  # at once: who called it waits
    with pytest.raises(ConnectionError, match=f"{code}"):
        judge.score(items("a"))
    assert len(handler.asked) == 5 and clock == [0.5, 1, 2]


def test_a_refused_connection_is_no_wrong_answer(clock: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    judge = HttpVerifier(RewardSpec(url=f"http://127.0.0.1:{port}/judge", timeout_seconds=5))
    with pytest.raises(ConnectionError, match=r"ConnectError.*start the server, or correct the address"):
        judge.check(items("a")[0])
    with pytest.raises(ConnectionError, match="ConnectError"):
        judge.score(items("a"))
    assert clock == [0.5, 1, 2]


def test_a_server_that_is_too_slow_is_told_what_to_raise() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/judge"
        with pytest.raises(ConnectionError, match=r"ReadTimeout.*raise spec\.reward\.timeoutSeconds=1$"):
            HttpVerifier(RewardSpec(url=url, timeout_seconds=1)).check(items("a")[0])


def test_a_url_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"^spec\.reward\.url=http://a:b: .*: give http://host"):
        HttpVerifier(RewardSpec(url="http://a:b"))
