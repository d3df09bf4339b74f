"""Work beside the gang: what ends the wait for it."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from grpo_worker.controller.recovery.departure import Departure
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.recovery.parking import Parking
from grpo_worker.controller.status.gpu_time import GpuTime
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.worker_group import GangError
from support.clocks import FakeClock


class Gang:
    def __init__(self) -> None:
        self.died: Future[None] = Future()

    def check(self) -> None: ...


def parking(background: list[Future[Any]]) -> Parking:
    failures, gpus = cast(FailureHandler, SimpleNamespace(departure=Departure())), cast(GpuTime, None)
    gang = cast(TrainerGang, Gang())
    return Parking(gang, ProgressBoard(), failures, FakeClock(), gpus, lambda: background)


def test_a_call_that_hangs_in_the_background_ends_the_wait_for_answers() -> None:
    staging: Future[Any] = Future()
    background = [staging]
    beside, answers = parking(background), threading.Event()
    hang = GangError("publish_weights: rank 3 stands still", [])
    threading.Timer(0.05, staging.set_exception, [hang]).start()
    with pytest.raises(GangError, match="rank 3 stands still"):
        beside.run(answers.wait, key=4)
    assert beside.continues(4), "the next gang may use the answers"
    background.clear()
    answers.set()
    assert beside.run(lambda: pytest.fail("generated again"), key=4) is True


@pytest.mark.parametrize("error", [None, OSError("the store is full"), TimeoutError("no engine")])
def test_other_ends_in_the_background_are_no_end_of_the_gang(error: Exception | None) -> None:
    record: Future[None] = Future()
    if error is None:
        record.set_result(None)
    else:
        record.set_exception(error)
    assert parking([record]).run(lambda: 7) == 7
