"""Keys of jobs between real agents: whose calls are refused, and that none is while an epoch begins."""

import threading
import time
from collections import Counter
from pathlib import Path

import httpx

from grpo_operator.api.keys import Epochs
from grpo_worker.common.auth import headers
from support.pod_keys import PodKeys, agent_process, first_epochs, owner

MASTER, ROUTE = "m" * 64, "/v1/versions"
OVERLAP = 1.5  # seconds; 300 in a cluster
A, B = owner("GRPOJob", "a", "aaaaaaaa-1"), owner("GRPOJob", "b", "bbbbbbbb-1")


class _Caller:
    """A controller that asks an agent without a pause. ``answers``: number by status."""

    def __init__(self, url: str) -> None:
        self.answers = Counter[int]()
        self._url, self._stop = url + ROUTE, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client() as client:
            while not self._stop.is_set():
                self.answers[client.get(self._url, headers=headers()).status_code] += 1

    def stop(self) -> Counter[int]:
        self._stop.set()
        self._thread.join()
        return self.answers


def _rotate(caller: PodKeys, server: PodKeys, url: str, late: float, following: Epochs) -> Counter[int]:
    """Begin an epoch, which the server sees ``late`` seconds after the caller; count the answers."""
    with caller.inside():
        calls = _Caller(url)
        old = headers()
        caller.see(following)
        time.sleep(late)
        server.see(following)
        time.sleep(max(2 * OVERLAP - late, 0) + 0.2)
        new = headers()
        answers = calls.stop()
    assert new != old
    assert httpx.get(url + ROUTE, headers=old).status_code == 401, "the old epoch has not ended"
    assert httpx.get(url + ROUTE, headers=new).status_code == 200
    return answers


def test_epochs_begin_under_requests_without_a_refusal_and_without_a_restart(tmp_path: Path) -> None:
    epochs = first_epochs(OVERLAP)
    server, caller = (PodKeys(tmp_path / name, MASTER, A, epochs) for name in ("server", "caller"))
    with agent_process(server.env, tmp_path) as url:
        following = epochs.next("second", time.time(), OVERLAP)
        answers = _rotate(caller, server, url, late=0.8 * OVERLAP, following=following)
        assert set(answers) == {200} and answers[200] > 100
        # A pod that sees an epoch later than the overlap allows refuses calls, so the test can fail.
        third = following.next("third", time.time(), OVERLAP)
        answers = _rotate(caller, server, url, late=1.5 * OVERLAP, following=third)
        assert answers[401] > 0


def test_an_agent_admits_its_own_job_and_nobody_without_a_key(tmp_path: Path) -> None:
    epochs = first_epochs(OVERLAP)
    of_a, of_b = PodKeys(tmp_path / "a", MASTER, A, epochs), PodKeys(tmp_path / "b", MASTER, B, epochs)
    server = PodKeys(tmp_path / "server", MASTER, B, epochs)
    with agent_process(server.env, tmp_path) as url:
        with of_a.inside():
            assert httpx.get(url + ROUTE, headers=headers()).status_code == 401, "the key of another job"
        assert httpx.get(url + ROUTE, headers={"authorization": f"Bearer {MASTER}"}).status_code == 401
        with of_b.inside():
            assert httpx.get(url + ROUTE, headers=headers()).status_code == 200
            (tmp_path / "server/epoch").unlink()
            assert httpx.get(url + ROUTE, headers=headers()).status_code == 401
            (tmp_path / "b/epoch").unlink()
            assert headers() == {}, "a key itself is never sent"
