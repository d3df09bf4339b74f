"""Calls about a link last as long as its members, and end for an engine that is silent afterwards."""

import threading
import time
from collections.abc import Callable
from typing import cast

import pytest

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.link_calls import LinkCalls


class SilentEngine:
    """Engine that answers when it is released. ``noted``: it was found to be silent.

    ``lives``: its server answers; ``asked``: how often it was asked.
    """

    timeout = 0.05

    def __init__(self, lives: bool = True) -> None:
        self.called, self.released, self.noted = threading.Event(), threading.Event(), False
        self.lives, self.asked = lives, 0

    def alive(self) -> bool:
        self.asked += 1
        return self.lives

    def on_silent(self) -> None:
        self.noted = True

    def load(self) -> str:
        self.called.set()
        assert self.released.wait(10)
        return "loaded"


def run(engine: SilentEngine, then: Callable[[LinkCalls], None]) -> tuple[str, str]:
    """Return the result and the error of a call about link ``l``, during which ``then(calls)`` is run."""
    calls = LinkCalls(cast(Engine, engine))

    def interrupt() -> None:
        assert engine.called.wait(10)
        then(calls)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        return calls.run("l", engine.load), ""
    except EngineError as error:
        return "", str(error)
    finally:
        thread.join()
        engine.released.set()


def test_an_engine_that_answers_is_waited_for() -> None:
    engine = SilentEngine()

    def other_link(calls: LinkCalls) -> None:
        calls.give_up("another")
        engine.released.set()

    assert run(engine, other_link) == ("loaded", "") and not engine.noted


def test_a_silent_engine_is_given_up_and_noted() -> None:
    engine = SilentEngine()
    found = run(engine, lambda calls: calls.give_up("l"))
    assert found == ("", "l: the transfer has ended, and the engine does not answer") and engine.noted


def test_a_call_of_a_server_that_answers_has_no_limit() -> None:
    engine = SilentEngine()

    def long(_: LinkCalls) -> None:
        while engine.asked < 5:
            time.sleep(0.01)
        engine.released.set()

    assert run(engine, long) == ("loaded", "") and not engine.noted


def test_a_server_that_does_not_answer_ends_the_call() -> None:
    engine = SilentEngine(lives=False)
    assert run(engine, lambda _: None) == ("", "l: Timeout: the engine's server does not answer")
    assert engine.noted


def test_errors_of_the_engine_pass_through() -> None:
    def fails() -> None:
        raise EngineError("no weights")

    with pytest.raises(EngineError, match="no weights"):
        LinkCalls(cast(Engine, SilentEngine())).run("l", fails)
