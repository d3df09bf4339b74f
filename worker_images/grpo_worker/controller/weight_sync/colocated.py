"""Weight synchronizer for trainers and engines that use the same GPUs alternately (``mode: colocated``)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from grpo_worker.controller.weight_sync.base import BaseSynchronizer
from grpo_worker.controller.weight_sync.synchronizer import METRIC_PREFIX, PushResult
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.engine_pool import Target
from grpo_worker.weightsync.agent.gpu_lease import EVERYTHING, WEIGHTS
from grpo_worker.weightsync.protocol.version import Version


class ColocatedSynchronizer(BaseSynchronizer):
    """Moves the GPU memory between trainers and engines, and each version with it.

    A pushed version stays in host memory until the engines hold the GPUs again.
    """

    _pushed: Target | None = None
    # Parts of their GPU memory that the engines hold. None: unknown, as after an earlier attempt.
    _held: Sequence[str] | None = None

    def before_trainers_start(self, report: Callable[[str], None]) -> None:
        """Let the engines start alone, since they then take all their memory, and release it again."""
        report("waiting for the engines, which start before the ranks")
        self._held = None
        self._set_memory(EVERYTHING)
        self._set_memory(())

    def after_trainers_start(self) -> None:
        """Forget the pushed version as well; the new gang pushes its own."""
        self._pushed = None
        super().after_trainers_start()

    def push(self, version: Version) -> "Future[PushResult]":
        """Stage the trainers' weights as ``version``; the engines have no GPU memory to load it now."""
        started = self._clock.now()
        digests = self._trainers.call("publish_weights", version, self._engines.fp8, self._deltas)
        self._pushed = Target(version, self._trainers.sources())
        result: Future[PushResult] = Future()
        result.set_result(PushResult(digests, {f"{METRIC_PREFIX}publish": self._clock.now() - started}))
        return result

    def after_push(self, pushed: "Future[PushResult]") -> None:
        """Do nothing: the engines get the version when they hold the GPUs."""

    def before_generation(self, timer: StepTimer) -> None:
        """Give the GPUs to the engines and load the pushed version.

        Trainers keep only the GPU memory that their offloading leaves.
        """
        if self._held == EVERYTHING:
            return
        assert self._pushed is not None, "no version was pushed"
        version = Version(self._pushed.version)
        with timer.phase("to_engines"):
            self._trainers.call("empty_cache")
            # The KV cache comes last: during a direct transfer the trainers still hold buffers on the GPUs.
            self._set_memory((WEIGHTS,))
            timer.seconds.update(self._load(self._pushed, version))
            kept = self._trainers.call("empty_cache")
            self._set_memory(EVERYTHING)
        self.served = version
        for index, name in enumerate(("allocated", "reserved")):
            largest = max(rank[index] for rank in kept)
            timer.seconds[f"perf/waiting_memory_{name}_gb"] = largest / 2**30

    def forget_engines(self) -> None:
        """Hand the GPUs over again, and with them the pushed version."""
        self._held = None

    def before_training(self, timer: StepTimer) -> None:
        """Make the engines release their GPU memory, and their weights with it."""
        with timer.phase("to_trainers"):
            self._set_memory(())

    def _load(self, pushed: Target, version: Version) -> dict[str, float]:
        """Bring the engines to the pushed version; return the seconds of the phases."""
        delivery = self._deliver(version)
        target = replace(pushed, gang=delivery.gang if delivery.complete else "")
        return delivery.metrics | self._engines.serve(target, self._pool_timeout)

    def _set_memory(self, parts: Sequence[str]) -> None:
        """Make the engines hold exactly these parts of their GPU memory."""
        if self._held != parts:
            self._held = None
            self._engines.turn(parts, self._pool_timeout)
            self._held = parts
