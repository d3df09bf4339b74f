"""Suspension of a job at the user's request, while its ranks train and while none do."""

from collections.abc import Callable

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.common.clock import Clock
from grpo_worker.controller.loop_state import LoopState
from grpo_worker.controller.recovery.parking import Parking
from grpo_worker.controller.recovery.step_saver import StepSaver
from grpo_worker.controller.status.gpu_time import GpuTime
from grpo_worker.controller.status.progress import ProgressBoard

_UNSAVED = 120.0  # seconds for ranks to start and save steps in the pods' memory before a suspension


class Suspension:
    """Suspends the job if the board has a request, and waits until that is cleared."""

    def __init__(
        self, state: LoopState, board: ProgressBoard, saver: StepSaver, parking: Parking, gpus: GpuTime,
        clock: Clock, report: Callable[..., None],
    ) -> None:  # fmt: skip
        """``report``: updates the status."""
        self._state = state
        self._board = board
        self._saver = saver
        self._parking = parking
        self._gpus = gpus
        self._clock = clock
        self._report = report
        self._down: float | None = clock.now()  # since when no ranks train; None: they do

    def ranks_train(self) -> None:
        """Note that ranks train from now on."""
        self._down = None

    def ranks_ended(self) -> None:
        """Note that no ranks train any more, unless none did before."""
        self._down = self._clock.now() if self._down is None else self._down

    def between_steps(self) -> None:
        """Save a checkpoint and suspend the job, if that is requested."""
        if not self._board.get().suspend_requested:
            return
        self._report(phase=Phase.SUSPENDING, message="saving a checkpoint")
        self._saver.save_now()
        step = self._state.step
        self._report(phase=Phase.SUSPENDED, message=f"checkpoint of step {step} is complete")
        self._parking.wait_until_resumed()
        self._report(phase=Phase.TRAINING, message="")

    def without_ranks(self) -> None:
        """Suspend the job if that is requested while no ranks train, for example because no node fits them.

        What is only in the pods' memory would be lost, so its ranks get time to start first.
        """
        unsaved = _UNSAVED if self._state.spec.checkpoint.memory else 0.0
        began, board = self._down, self._board.get()
        if not board.suspend_requested or began is None or self._clock.now() - began < unsaved:
            return
        self._report(phase=Phase.SUSPENDED, message="no ranks run; the job resumes from its last checkpoint")
        self._parking.wait_until_resumed()
        self._gpus.stops("infrastructure")
        self._report(phase=board.phase)
