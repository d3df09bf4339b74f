"""Scoring by a server that may be down for a while."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.data.tasks import Record
from grpo_worker.rewards.verifiers import HttpVerifier, Item, RewardError
from support.reward_servers import Judge, reward_server


def items(*answers: str) -> list[Item]:
    return [Item(i, answer, Record("mine", "yes", {})) for i, answer in enumerate(answers)]


@pytest.fixture
def server() -> Iterator[tuple[str, type[Judge]]]:
    with reward_server() as running:
        yield running


def test_a_failed_request_to_the_server_is_repeated(server: tuple[str, type[Judge]]) -> None:
    url, handler = server
    handler.answers += [(500, {}), (200, {"scores": [1]}), (200, {"scores": [1, 0.5]})]
    judge = HttpVerifier(RewardSpec(url=url, timeout_seconds=5))
    assert judge.score(items("a", "b")) == [1.0, 0.5]
    assert judge.failures == 2 and len(handler.requests) == 3
    assert handler.requests[0]["items"][1] == {
        "data_source": "mine",
        "ground_truth": "yes",
        "extra_info": {},
        "solution_str": "b",
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the verifier's pauses and advance its clock by them, without sleeping."""
    pauses: list[float] = []
    monkeypatch.setattr("grpo_worker.rewards.server.time.sleep", pauses.append)
    monkeypatch.setattr("grpo_worker.rewards.server.time.monotonic", lambda: sum(pauses))
    return pauses


def test_a_server_that_is_briefly_down_is_retried(
    server: tuple[str, type[Judge]], clock: list[float]
) -> None:
    url, handler = server
    handler.answers += [(503, {})] * 5 + [(200, {"scores": [1]})]
    assert HttpVerifier(RewardSpec(url=url, timeout_seconds=30)).score(items("a")) == [1.0]
    assert clock == [0.5, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((400, {}), "400"),
        ((404, {}), "404"),
        ((422, {}), "422"),
        ((200, {"scores": [float("nan")]}), r"scores\[0\]=nan: give finite numbers"),
        ((200, {"points": [1]}), "KeyError"),
    ],
)
def test_a_server_that_never_answers_stops_the_step(
    server: tuple[str, type[Judge]], clock: list[float], answer: tuple[int, Any], problem: str
) -> None:
    url, handler = server
    handler.answers += [answer] * 9
    judge = HttpVerifier(RewardSpec(url=url, timeout_seconds=5))
    with pytest.raises(RewardError, match=rf"spec\.reward\.url=http://127.*{problem}.*timeoutSeconds=5 s"):
        judge.check(items("a")[0])
    assert judge.failures == len(handler.requests) == 4 and sum(clock) <= 5


@pytest.mark.parametrize("code", [429, 500, 501, 502, 503, 504, 599])
def test_a_server_that_fails_or_has_no_room_is_waited_for(
    server: tuple[str, type[Judge]], clock: list[float], code: int
) -> None:
    url, handler = server
    handler.answers += [(code, {})] * 9
    judge = HttpVerifier(RewardSpec(url=url, timeout_seconds=5))
    with pytest.raises(ConnectionError, match=rf"^spec\.reward\.url=http://127.*{code}.*: look for .* log"):
        judge.check(items("a")[0])
    assert len(handler.requests) == 1 and not clock  # immediately: the caller waits
    with pytest.raises(ConnectionError, match=f"{code}"):
        judge.score(items("a"))
    assert len(handler.requests) == 5 and clock == [0.5, 1, 2]


def test_a_refused_connection_is_not_scored_as_a_wrong_answer(clock: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    judge = HttpVerifier(RewardSpec(url=f"http://127.0.0.1:{port}/judge", timeout_seconds=5))
    with pytest.raises(ConnectionError, match=r"ConnectError.*start the server, or correct the address"):
        judge.check(items("a")[0])
    with pytest.raises(ConnectionError, match="ConnectError"):
        judge.score(items("a"))
    assert clock == [0.5, 1, 2]


def test_a_slow_server_error_names_the_timeout_to_raise() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/judge"
        with pytest.raises(ConnectionError, match=r"ReadTimeout.*raise spec\.reward\.timeoutSeconds=1$"):
            HttpVerifier(RewardSpec(url=url, timeout_seconds=1)).check(items("a")[0])


def test_an_invalid_url_is_named() -> None:
    with pytest.raises(ValueError, match=r"^spec\.reward\.url=http://a:b: .*: give http://host"):
        HttpVerifier(RewardSpec(url="http://a:b"))
