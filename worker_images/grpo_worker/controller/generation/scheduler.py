"""Schedulers of generation: on policy, or one step ahead of training."""

import shutil
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing.store import directory, step_and_attempt
from grpo_worker.common.store_path import StorePath, children, has_file, remove_file
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.weightsync.protocol.version import Version

# (samples, folder) -> starts to copy to the folder what the samples refer to, and returns what waits for the
# copy and returns samples that refer to it
Durable = Callable[[list[Sample], Path], Callable[[], list[Sample]]]
_SUFFIX = ".npz"


class RolloutScheduler(Protocol):
    """Decides when the samples of a step are generated.

    It returns the batches in the order of the steps; none is lost or returned twice.
    """

    def next_batch(self, version: Version, timer: StepTimer) -> RolloutBatch:
        """Return the samples of the next step, generated at ``version`` if they do not exist yet."""

    def start_next(self, version: Version) -> None:
        """Start to generate the step after the last batch, while engines serve ``version``, if allowed."""

    def before_push(self, timer: StepTimer) -> None:
        """Wait until generation allows new weights in the engines."""

    @property
    def generates_ahead(self) -> bool:
        """Samples of the next step are being generated; a checkpoint would wait for them."""

    def wait(self) -> None:
        """Wait for the samples of the next step; call it again after TimeoutError and ConnectionError."""

    def save(self, step: int, attempt: int, batch: RolloutBatch | None = None) -> Callable[[], None]:
        """Return a function that writes the samples of the step after ``step`` to the store, in any thread.

        They belong to a checkpoint of ``attempt``. ``wait`` must have returned. ``batch``: these samples if
        ``next_batch`` has returned them.
        """

    def prune(self, kept: Collection[int], attempt: int) -> None:
        """Remove the samples of all checkpoints but those of the steps ``kept``; any thread.

        Those of newer attempts than ``attempt`` stay.
        """

    def restore(self, step: int, attempt: int) -> None:
        """Cancel generation, and continue after ``step`` with the samples that ``attempt`` saved for it.

        ``next_batch``, which may still run in a thread of an earlier attempt, raises CancelledError.
        """


class OnPolicy:
    """Generates the samples of a step just before it trains on them (maxVersionLag 0)."""

    generates_ahead = False

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler
        self._cancelled = threading.Event()

    def next_batch(self, version: Version, timer: StepTimer) -> RolloutBatch:
        return self._sampler.sample(version, timer, cancelled=self._cancelled)

    def start_next(self, version: Version) -> None: ...

    def before_push(self, timer: StepTimer) -> None: ...

    def wait(self) -> None: ...

    def save(self, step: int, attempt: int, batch: RolloutBatch | None = None) -> Callable[[], None]:
        return lambda: None

    def prune(self, kept: Collection[int], attempt: int) -> None: ...

    def restore(self, step: int, attempt: int) -> None:
        self._cancelled.set()
        self._sampler.forget()
        self._cancelled = threading.Event()


class OneStepAhead:
    """Generates the samples of the next step during training (maxVersionLag 1).

    The samples of a step then come from the weights of the step before. Samples that were generated ahead are
    saved beside each checkpoint, so that a replay trains on exactly the same samples.
    """

    def __init__(
        self,
        sampler: StepSampler,
        folder: StorePath,
        continues: bool = False,
        durable: Durable | None = None,
    ) -> None:
        """``folder``: keeps the samples of each checkpoint.

        ``continues``: requests that run when the weights change continue with the new weights. ``durable``:
        starts to copy what samples refer to.
        """
        self._durable = durable
        self._sampler = sampler
        self._folder = folder
        self._continues = continues
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._running: Future[RolloutBatch] | None = None
        self._ready: RolloutBatch | None = None
        # Step whose folder gets the copies of what ``_ready`` refers to, and what waits for them.
        self._copies: tuple[int, Callable[[], list[Sample]]] | None = None
        self._prompts_in_training = 0
        self._version = Version(0)  # of the samples that are generated ahead
        self._cancelled = threading.Event()

    @property
    def generates_ahead(self) -> bool:
        return self._running is not None

    def next_batch(self, version: Version, timer: StepTimer) -> RolloutBatch:
        self._wait(timer)
        batch, self._ready = self._ready, None
        if batch is None:
            batch = self._sampler.sample(version, timer, cancelled=self._cancelled)
        self._prompts_in_training = len(batch.taken)
        return batch

    def start_next(self, version: Version) -> None:
        self._start(version, self._prompts_in_training)

    def _start(self, version: Version, skip: int) -> None:
        self._version, cancelled = version, self._cancelled
        self._running = self._thread.submit(self._sampler.sample, version, StepTimer(), skip, cancelled)

    def before_push(self, timer: StepTimer) -> None:
        if not self._continues:
            self._wait(timer, self._prompts_in_training)

    def _wait(self, timer: StepTimer, drawn: int = 0) -> None:
        """Wait for the samples of the next step. ``drawn``: prompts of this step, until they are consumed."""
        if self._running is not None:
            try:
                with timer.phase("gen_wait"):
                    self._ready = self._running.result()
            except (TimeoutError, ConnectionError):  # engines are away: the caller waits again
                self._start(self._version, drawn)
                raise
            self._running = None

    def wait(self) -> None:
        self._wait(StepTimer())

    def save(self, step: int, attempt: int, batch: RolloutBatch | None = None) -> Callable[[], None]:
        saved = self._ready if batch is None else batch
        if saved is None:
            return lambda: None
        file = self._file(step, attempt)
        if self._durable is None or not isinstance(file, Path):  # no samples in a bucket refer to anything
            return partial(saved.write, file)
        if self._copies is None or self._copies[0] != step:  # else it would overwrite what it reads
            self._copies = step, self._durable(saved.samples, _experts(file))
        copied = self._copies[1]
        return lambda: replace(saved, samples=copied()).write(file)

    def prune(self, kept: Collection[int], attempt: int) -> None:
        for name in children(self._folder):
            file = self._folder / name
            if file.suffix != _SUFFIX:
                continue
            step, own = step_and_attempt(file.with_suffix(""))
            if step not in kept and own <= attempt:
                remove_file(file)
                if isinstance(file, Path):
                    shutil.rmtree(_experts(file), ignore_errors=True)

    def restore(self, step: int, attempt: int) -> None:
        self._cancelled.set()
        if self._running is not None:
            self._running.exception()  # wait for its end; the samples are discarded
            self._running = None
        self._sampler.forget()
        self._cancelled = threading.Event()
        file = self._file(step, attempt)
        self._ready = ready = RolloutBatch.read(file) if has_file(file) else None
        self._copies = (step, lambda: ready.samples) if ready is not None else None

    def _file(self, step: int, attempt: int) -> StorePath:
        place = directory(self._folder, step, attempt)
        return place.with_name(place.name + _SUFFIX)


def _experts(file: Path) -> Path:
    """Return the folder of the routed experts of the samples in ``file``."""
    return file.with_suffix(".experts")


def scheduler_of(
    spec: GRPOJobSpec, sampler: StepSampler, folder: StorePath, durable: Durable
) -> RolloutScheduler:
    """Return the scheduler of a job; see OneStepAhead."""
    if spec.staleness.max_version_lag == 0:
        return OnPolicy(sampler)
    return OneStepAhead(sampler, folder, spec.staleness.partial_rollouts, durable)
