"""Checkpoints of a run: when they are saved, in the store and in the pods' memory, and exports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing.store import directory
from grpo_worker.controller.generation.scheduler import RolloutScheduler
from grpo_worker.controller.recovery.memory_tier import MemoryTier
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.training.gang import Restored, TrainerGang


class RunCheckpoints:
    """Saves and restores the trainers, the samples that were generated ahead, and the controller's state."""

    def __init__(
        self,
        spec: GRPOJobSpec,
        store: Path,
        trainers: TrainerGang,
        scheduler: RolloutScheduler,
        board: ProgressBoard,
        state: Callable[[], dict[str, Any]],
        flush: Callable[[], None],
    ) -> None:
        """``store``: folder of the job. ``state``: returns the controller's state. ``flush``: waits until
        the records of all finished steps are on the store; no checkpoint counts before.
        """
        self._spec = spec.checkpoint
        self._exports = store / "export"
        self._trainers = trainers
        self._scheduler = scheduler
        self._board = board
        self._state = state
        self._flush = flush
        self._saving = False  # whether a checkpoint is being written
        memory = spec.checkpoint.memory
        self._memory: MemoryTier | None = None
        if memory is not None:
            self._memory = MemoryTier(trainers, memory.every_steps, memory.replicas, store / "memory.json")

    def restore(self) -> Restored:
        """Restore the gang from the pods' memory if that is newer than the store, else from the store."""
        self._saving = False
        restored = None
        if self._memory is not None:
            self._memory.begin_attempt()
            restored = self._memory.restore(self._trainers.newest)
        return restored or self._trainers.restore()

    def after_step(self, step: int, attempt: int) -> None:
        """Note a checkpoint that is complete, and start the next one when it is due."""
        if self._saving:  # an unneeded poll would wait for the ranks' background work
            self._flush()  # the poll may complete the checkpoint
            self._note_complete(self._trainers.call("poll_checkpoint", False))
        if self._memory is not None:
            self._memory.poll()
        if step % self._spec.every_steps == 0:
            self._save(step)
        elif self._memory is not None and self._memory.due(step):
            self._scheduler.save(step)
            self._flush()
            self._memory.snapshot(step, attempt, self._state())
        every = self._spec.export_every_steps
        if every and step % every == 0:
            self.export(step)

    def save_now(self, step: int) -> None:
        """Save a checkpoint of this step, unless it exists, and wait until it is complete."""
        self._flush()
        if self._board.get().last_checkpoint != step:
            self._note_complete(self._trainers.call("poll_checkpoint", True))
        if self._board.get().last_checkpoint != step:
            self._save(step)
            self._note_complete(self._trainers.call("poll_checkpoint", True))

    def export(self, step: int) -> None:
        """Write the weights of this step as a Hugging Face directory, unless it exists."""
        path = directory(self._exports, step)
        if not path.is_dir():
            self._board.update(message=f"exporting step {step}")
            self._trainers.call("export_weights", str(path))
            self._board.update(message="")

    def _save(self, step: int) -> None:
        self._flush()
        # One checkpoint at a time: two would compete for the store, and ``keep`` counts complete ones.
        self._note_complete(self._trainers.call("poll_checkpoint", True))
        self._scheduler.save(step)
        self._trainers.call("save_checkpoint", step, self._state())
        self._saving = True

    def _note_complete(self, steps_by_rank: list[list[int]]) -> None:
        for step in steps_by_rank[0]:
            self._board.update(last_checkpoint=step)
            self._saving = False
