"""Checkpoints on a slow store: they are late, no step is, and none counts before its records."""

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import pytest

from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.checkpointing.store import Origin, commit, directory
from grpo_worker.common.clock import utc_time
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.training.gang import Restored
from support.objects import job, spec_of


class Store:
    """Trainers, scheduler, ledger and parking of a job.

    ``opened``: the records reach the store. ``writing``: the ranks still write. ``begun``: steps of the
    checkpoints. ``kept``: steps whose samples are kept.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.attempt = 1
        self.opened = threading.Event()
        self.opened.set()
        self.problem: OSError | None = None
        self.writing = False
        self.begun: list[int] = []
        self.flushed = 0
        self.kept: set[int] = set()
        self._unfinished: list[int] = []

    def call(self, method: str, *args: Any) -> Any:
        if method == "save_checkpoint":
            assert not self._unfinished, "two checkpoints compete for the store"
            directory(self.root / "checkpoints", args[0], self.attempt).mkdir(parents=True)
            self.begun.append(args[0])
            self._unfinished.append(args[0])
            return None
        if method == "checkpoint_bytes":
            return 0
        assert method == "poll_checkpoint"
        if self.writing and not args[0]:
            return [[]]
        for step in self._unfinished:
            assert self.flushed >= step, "a checkpoint counts before its records"
            commit(self.root / "checkpoints", step, Origin("", "", self.attempt))
        done, self._unfinished = self._unfinished, []
        return [done]

    def restore(self) -> Restored:
        self._unfinished = []
        return Restored(0, None)

    def run(self, work: Callable[[], None], park: Callable[[], None]) -> None:
        work()

    def wait_while(self, missing: Callable[[], str]) -> None:
        assert not missing(), "the store of a test has room"

    def wait(self) -> None: ...

    def save(self, step: int, attempt: int, batch: Any = None) -> Callable[[], None]:
        def write() -> None:
            assert threading.current_thread() is not threading.main_thread()
            assert self.opened.wait(60)
            if self.problem is not None:
                raise self.problem
            self.flushed = step

        return write

    def prune(self, kept: Collection[int], attempt: int) -> None:
        self.kept = set(kept)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def _checkpoints(store: Store, board: ProgressBoard, every: int = 2) -> RunCheckpoints:
    manifest = job()
    manifest["spec"]["checkpoint"] |= {"everySteps": every}
    manifest["spec"]["checkpoint"].pop("memory", None)
    replaced = cast(Any, store)
    return RunCheckpoints(
        spec_of(manifest),
        JobFolder(store.root, store.root),
        replaced,
        replaced,
        board,
        dict,
        lambda: None,
        replaced,
        lambda: None,
    )


def _settle(checkpoints: RunCheckpoints) -> None:
    checkpoints._newest.exception(30)


def test_records_that_are_late_delay_the_checkpoint_and_no_step(store: Store) -> None:
    board = ProgressBoard()
    checkpoints = _checkpoints(store, board)
    store.opened.clear()
    for step in range(1, 8):
        checkpoints.after_step(step, 1)
    assert store.begun == [2] and board.get().last_checkpoint is None
    store.opened.set()
    _settle(checkpoints)
    checkpoints.after_step(8, 1)
    assert store.begun == [2, 8] and board.get().last_checkpoint == 2


def test_a_checkpoint_counts_in_the_middle_of_the_next_step(store: Store) -> None:
    board = ProgressBoard()
    checkpoints = _checkpoints(store, board)
    checkpoints.poll()
    store.writing = True
    checkpoints.after_step(2, 1)
    _settle(checkpoints)
    checkpoints.poll()
    assert board.get().last_checkpoint is None and board.get().checkpoint_time == ""
    store.writing = False
    before = utc_time()
    checkpoints.poll()
    assert board.get().last_checkpoint == 2 and checkpoints.stored == 2
    assert before <= board.get().checkpoint_time <= utc_time()


def test_a_checkpoint_that_is_due_begins_once_the_one_before_is_complete(store: Store) -> None:
    board = ProgressBoard()
    checkpoints = _checkpoints(store, board, every=4)
    store.writing = True
    for step in range(1, 10):
        checkpoints.after_step(step, 1)
        _settle(checkpoints)
    store.writing = False
    checkpoints.after_step(10, 1)
    _settle(checkpoints)
    assert store.begun == [4, 10], "8 was due"
    assert store.kept == {4, 10}
    checkpoints.after_step(11, 1)
    assert board.get().last_checkpoint == 10
    checkpoints.after_step(12, 1)
    _settle(checkpoints)
    assert store.begun == [4, 10, 12] and store.kept == {4, 10, 12}


def test_a_checkpoint_now_waits_for_its_records(store: Store) -> None:
    board = ProgressBoard()
    checkpoints = _checkpoints(store, board)
    store.opened.clear()
    checkpoints.after_step(2, 1)
    threading.Timer(0.1, store.opened.set).start()
    checkpoints.save_now(3)
    assert store.begun == [2, 3] and board.get().last_checkpoint == 3
    checkpoints.save_now(3)
    assert store.begun == [2, 3], "it exists"


def test_records_that_cannot_be_written_end_the_attempt_and_not_the_next_one(store: Store) -> None:
    board = ProgressBoard()
    checkpoints = _checkpoints(store, board)
    store.problem = OSError(28, "No space left on device")
    checkpoints.after_step(2, 1)
    _settle(checkpoints)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.after_step(3, 1)
    assert board.get().last_checkpoint is None
    store.problem = None
    assert checkpoints.restore().step == 0
    checkpoints.after_step(4, 2)
    _settle(checkpoints)
    checkpoints.after_step(5, 2)
    assert board.get().last_checkpoint == 4


def test_a_restart_waits_until_nothing_is_written_any_more(store: Store) -> None:
    checkpoints = _checkpoints(store, ProgressBoard())
    store.opened.clear()
    checkpoints.after_step(2, 1)
    threading.Timer(0.1, store.opened.set).start()
    checkpoints.restore()
    assert store.flushed == 2


def test_a_superseded_controller_removes_no_samples_of_the_newer_one(store: Store) -> None:
    checkpoints = _checkpoints(store, ProgressBoard())

    def superseded() -> None:
        raise SupersededError("attempt 2 has begun in another controller; this one is attempt 1")

    checkpoints._check = superseded
    checkpoints.after_step(2, 1)
    _settle(checkpoints)
    with pytest.raises(SupersededError):
        checkpoints.poll()
    assert not store.kept
