"""When the groups of a step are generated: just before it, or while the step before is trained on."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from grpo_worker.checkpointing.store import directory
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import Generated


class RolloutScheduler(Protocol):
    """Hands out the groups of one step after the other; none is lost or handed out twice."""

    def take(self, version: int, timer: StepTimer) -> Generated:
        """Groups of the next step; what is still to be generated is sampled at ``version``."""

    def go_ahead(self, version: int) -> None:
        """The step just taken is being trained on; engines serve ``version`` meanwhile."""

    def settle(self, timer: StepTimer) -> None:
        """The engines are about to get other weights: nothing may be under way, unless it may go on
        with those."""

    def save(self, step: int) -> None:
        """Before the checkpoint of ``step``: keep what was generated ahead of it."""

    def restore(self, step: int) -> None:
        """Begin anew after ``step``, with what was kept for it."""


class OnPolicy:
    """Generates a step's groups when they are wanted (maxVersionLag 0)."""

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler

    def take(self, version: int, timer: StepTimer) -> Generated:
        return self._sampler.sample(version, timer)

    def go_ahead(self, version: int) -> None: ...

    def settle(self, timer: StepTimer) -> None: ...

    def save(self, step: int) -> None: ...

    def restore(self, step: int) -> None: ...


class OneStepAhead:
    """Generates the next step's groups while a step is trained on (maxVersionLag 1).

    A step's samples then come from the weights of one step before. What was generated ahead is kept
    beside each checkpoint, so that a replay trains on the very same samples.
    """

    def __init__(
        self, sampler: StepSampler, folder: Path, keep: int, every: int, partial: bool = False
    ) -> None:
        """``keep``, ``every``: checkpoints of the store that are kept, and steps between them.
        ``partial``: what is under way when the weights change goes on with the new ones."""
        self._sampler = sampler
        self._folder = folder
        self._keep, self._every = keep, every
        self._partial = partial
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._running: Future[Generated] | None = None
        self._ready: Generated | None = None
        self._in_training = 0  # prompts of the step that is trained on
        self._cancelled = threading.Event()

    def take(self, version: int, timer: StepTimer) -> Generated:
        self._wait(timer)
        found, self._ready = self._ready, None
        if found is None:
            found = self._sampler.sample(version, timer)
        self._in_training = len(found.taken)
        return found

    def go_ahead(self, version: int) -> None:
        skip, cancelled = self._in_training, self._cancelled
        self._running = self._thread.submit(self._sampler.sample, version, StepTimer(), skip, cancelled)

    def settle(self, timer: StepTimer) -> None:
        if not self._partial:
            self._wait(timer)

    def _wait(self, timer: StepTimer) -> None:
        if self._running is not None:
            with timer.phase("gen_wait"):
                self._ready = self._running.result()
            self._running = None

    def save(self, step: int) -> None:
        self._wait(StepTimer())
        if self._ready is not None:
            self._ready.write(self._file(step))
        files = sorted(self._folder.glob("step-*.npz"))
        stored = [file for file in files if _step(file) % self._every == 0]
        for old in set(files) - set(stored[-self._keep - 1 :]) - set(files[-2:]):
            old.unlink()

    def restore(self, step: int) -> None:
        self._cancelled.set()
        if self._running is not None:
            self._running.exception()  # wait for its end; what it found is of no use
            self._running = None
        self._cancelled = threading.Event()
        file = self._file(step)
        self._ready = Generated.read(file) if file.is_file() else None

    def _file(self, step: int) -> Path:
        return directory(self._folder, step).with_suffix(".npz")


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))
