"""Contract of the training loop with the transfer of weights, and the parts that it is built from."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.engine_pool import Target
from grpo_worker.rollout.routing import EngineEntry
from grpo_worker.weightsync.protocol.version import Version

METRIC_PREFIX = "timing_s/update_weights_"


@dataclass(frozen=True, slots=True)
class PushResult:
    """``digests``: of each trainer rank's bytes. ``metrics``: seconds of the phases, failed transfers."""

    digests: list[str]
    metrics: dict[str, float]


class WeightSynchronizer(Protocol):
    """Brings the trainers' weights into the engines, and decides which of the two holds the GPUs.

    Each attempt calls ``before_trainers_start``, ``after_trainers_start``, ``push`` and ``after_push``. Each
    step calls ``before_generation``, ``before_training``, ``push`` and ``after_push``, in this order. With
    GPUs of their own, engines serve a version when ``after_push`` returns or, if too few do then and on
    shared GPUs, when ``before_generation`` returns.
    """

    over_nccl: bool  # whether weights travel over NCCL

    @property
    def served(self) -> Version | None:
        """The version that at least ``minAvailable`` engines were last brought to; None before the first."""

    def before_trainers_start(self, report: Callable[[str], None]) -> None:
        """Prepare the GPUs for the trainers. ``report``: shows what the job waits for. Raises SyncError."""

    def after_trainers_start(self) -> None:
        """Forget the state of the previous gang of trainer ranks."""

    def push(self, version: Version) -> "Future[PushResult]":
        """Make the trainers' current weights ``version``. The previous push must have ended.

        Work that need not delay the next generation may continue after the return; the future ends with it.
        Raises GangError, as the future does. A lack of engines is not an error of ``push``: they get the
        version when they are back, and ``before_generation`` asks for them.
        """

    def after_push(self, pushed: "Future[PushResult]") -> None:
        """Wait until ``minAvailable`` engines serve the pushed version, or are late. Raises GangError.

        It calls no rank, so the caller need not wait for it when a rank dies.
        """

    def before_generation(self, timer: StepTimer) -> None:
        """Make the engines ready to generate with the pushed version.

        Raises SyncError, after which it can be called again, and GangError.
        """

    def forget_engines(self) -> None:
        """Assume nothing about the engines any more: they may have been replaced."""

    def before_training(self, timer: StepTimer) -> None:
        """Make the GPUs ready for the trainers. Raises SyncError."""


class Trainers(Protocol):
    """The calls to the training gang that a synchronizer makes; see TrainerGang."""

    world: int

    @property
    def address(self) -> str: ...

    def call(self, method: str, *args: Any) -> Any: ...

    def begin(self, method: str, *args: Any) -> Callable[[], list[Any]]: ...

    def notify(self, method: str, *args: Any) -> None: ...

    def sources(self) -> dict[int, str]: ...


class Engines(Protocol):
    """The calls to the rollout pool that a synchronizer makes; see RolloutPool."""

    fp8: bool
    size: int  # engines of the whole pool

    def hold(self) -> None: ...

    def turn(self, parts: Sequence[str], timeout: float) -> None: ...

    def serves(self, version: int) -> bool: ...

    def shortage(self, version: int) -> str: ...

    def serve(self, target: Target, timeout: float) -> dict[str, float]: ...

    def reserved(self) -> AbstractContextManager[list[EngineEntry]]: ...

    def ask(
        self, engine: EngineEntry, route: str, timeout: float, **body: Any
    ) -> "Future[dict[str, Any]]": ...
