"""Judging by a server: it may be away for a while."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from grpo_operator.api.data import RewardSpec
from grpo_worker.data.tasks import Record
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


def test_a_server_that_is_away_for_a_moment_is_asked_again(server: tuple[str, type[_Server]]) -> None:
    url, handler = server
    handler.answers += [(503, {})] * 3 + [(200, {"scores": [1]})]
    started = time.monotonic()
    assert HttpVerifier(RewardSpec(url=url, timeout_seconds=30)).score(items("a")) == [1.0]
    assert time.monotonic() - started > 3  # 0.5 + 1 + 2 s: longer from time to time


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((503, {}), "503"),
        ((200, {"scores": [float("nan")]}), r"scores\[0\]=nan: give finite numbers"),
        ((200, {"points": [1]}), "KeyError"),
    ],
)
def test_a_server_that_never_judges_stops_the_step(
    server: tuple[str, type[_Server]], answer: tuple[int, Any], problem: str
) -> None:
    url, handler = server
    handler.answers += [answer] * 9
    judge = HttpVerifier(RewardSpec(url=url, timeout_seconds=1))
    with pytest.raises(RewardError, match=rf"spec\.reward\.url=http://127.*{problem}.*timeoutSeconds=1 s"):
        judge.check(items("a")[0])
    assert judge.failures == len(handler.asked) > 1
