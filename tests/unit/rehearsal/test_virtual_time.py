"""Virtual time under unchanged threads, executors and event loops."""

import asyncio
import concurrent.futures
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_rehearsal.virtual.scheduler import DeadlockError, Scheduler
from grpo_rehearsal.virtual.threads import virtual_time


def test_hours_of_sleep_pass_at_once() -> None:
    real = time.perf_counter()
    with virtual_time(Scheduler()) as scheduler:
        time.sleep(7200)
        assert time.monotonic() == scheduler.now == 7200
    assert time.perf_counter() - real < 5


def test_executors_and_the_main_thread_share_the_time() -> None:
    with virtual_time(Scheduler()), ThreadPoolExecutor(4) as pool:
        began = time.monotonic()
        list(pool.map(time.sleep, [10, 20, 30, 40, 50]))  # the fifth begins when the first has ended
        assert time.monotonic() - began == 60


def test_two_executors_take_work_at_the_same_time() -> None:
    """A submit holds a lock of all executors, and looks for an idle thread without waiting."""

    def submit(pool: ThreadPoolExecutor) -> list[None]:
        return list(pool.map(time.sleep, [1, 1]))

    with virtual_time(Scheduler()), ThreadPoolExecutor(2) as one, ThreadPoolExecutor(2) as other:
        threads = [threading.Thread(target=submit, args=(pool,)) for pool in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() == 1


def test_waits_with_a_timeout_end_at_it() -> None:
    with virtual_time(Scheduler()):
        event, lines = threading.Event(), queue.Queue[int]()
        assert not event.wait(30)
        with pytest.raises(queue.Empty):
            lines.get(timeout=12)
        condition = threading.Condition()
        with condition:
            assert not condition.wait_for(lambda: False, 8)
        assert time.monotonic() == 50


def test_a_notified_wait_ends_when_it_is_notified() -> None:
    with virtual_time(Scheduler()), ThreadPoolExecutor(1) as pool:
        event = threading.Event()

        def later() -> None:
            time.sleep(3)
            event.set()

        pool.submit(later)
        assert event.wait(100)
        assert time.monotonic() == 3


def test_concurrent_futures_wait_returns_what_is_done() -> None:
    with virtual_time(Scheduler()), ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(time.sleep, seconds) for seconds in (5, 500)]
        done, late = concurrent.futures.wait(futures, timeout=10)
        assert (done, late) == ({futures[0]}, {futures[1]})
        assert time.monotonic() == 10


def test_an_event_loop_in_a_thread_runs_beside_synchronous_code() -> None:
    async def work() -> list[float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(asyncio.sleep(seconds) for seconds in (1, 20, 300)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        await loop.run_in_executor(None, time.sleep, 40)
        return [began, loop.time()]

    with virtual_time(Scheduler()):
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        time.sleep(7)
        assert asyncio.run_coroutine_threadsafe(work(), loop).result() == [7, 407]
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        assert not thread.is_alive()
        loop.close()


def test_asyncio_run_works() -> None:
    with virtual_time(Scheduler()) as scheduler:
        asyncio.run(asyncio.sleep(100))
        assert scheduler.now == 100


def test_threads_run_in_the_same_order_every_time() -> None:
    def run() -> list[str]:
        seen: list[str] = []

        def work(name: str, seconds: float) -> None:
            for turn in range(5):
                time.sleep(seconds)
                seen.append(f"{name}{turn} {time.monotonic():g}")

        with virtual_time(Scheduler()), ThreadPoolExecutor(8) as pool:
            for number in range(8):
                pool.submit(work, "abcdefgh"[number], 1 + number % 3)
        return seen

    first = run()
    assert len(first) == 40
    assert all(run() == first for _ in range(3))


def test_a_deadlock_is_reported() -> None:
    with virtual_time(Scheduler()), pytest.raises(DeadlockError, match=r"main \(condition\)"):
        threading.Event().wait()


def test_threads_that_still_wait_are_ended() -> None:
    ended = threading.Event()

    def forever() -> None:
        try:
            while True:
                time.sleep(0.5)
        finally:
            ended.set()

    with virtual_time(Scheduler()):
        thread = threading.Thread(target=forever)
        thread.start()
        time.sleep(10)
    thread.join(10)
    assert ended.is_set() and not thread.is_alive()
    assert time.monotonic() != 10


def test_work_of_stand_ins_is_counted_apart() -> None:
    with virtual_time(Scheduler()) as scheduler:
        with scheduler.standing_in():
            sum(range(2_000_000))
        sum(range(2_000_000))
        time.sleep(1)
        main = scheduler.participants[0]
        assert 0 < main.stood_in < main.cpu
