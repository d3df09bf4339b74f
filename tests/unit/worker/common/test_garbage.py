"""Pausing the collector of reference cycles."""

import gc
from contextlib import ExitStack

from grpo_worker.common.garbage import collector_paused


def test_nothing_is_collected_within_the_block() -> None:
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        begun.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with collector_paused():
            inside: list[list[int]] = [[] for _ in range(100_000)]
            assert begun == []
        outside: list[list[int]] = [[] for _ in range(100_000)]
        assert begun, f"{len(inside) + len(outside)} lists cause a collection"
    finally:
        gc.callbacks.remove(note)


def test_the_collector_runs_again_after_blocks_that_overlap() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(collector_paused())
    second.enter_context(collector_paused())
    first.close()
    second.close()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
