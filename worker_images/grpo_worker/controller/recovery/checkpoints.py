"""Checkpoints of a run: when they are saved, in the store and in the pods' memory, and exports."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing.exports import EXPORTS, complete_exports
from grpo_worker.checkpointing.fork import Fork
from grpo_worker.checkpointing.rollbacks import latest_after, rollbacks
from grpo_worker.checkpointing.store import (
    complete_steps,
    directory,
    model_digest,
    remove_remains,
    step_and_attempt,
)
from grpo_worker.common.clock import utc_time
from grpo_worker.common.store_path import JobFolder, StorePath, remove_tree
from grpo_worker.controller.generation.scheduler import RolloutScheduler
from grpo_worker.controller.recovery.copy_outcomes import CopyOutcomes
from grpo_worker.controller.recovery.memory_tier import MemoryTier
from grpo_worker.controller.recovery.parking import Parking
from grpo_worker.controller.recovery.store_room import StoreRoom
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.training.gang import Restored, TrainerGang
from grpo_worker.rollout.batch_file import RolloutBatch

log = logging.getLogger(__name__)


class RunCheckpoints:
    """Saves and restores the trainers, the samples that were generated ahead, and the controller's state.

    A thread brings what belongs to a checkpoint to the store: the records of all steps up to it, and samples
    that were generated ahead. The checkpoint is completed after that, so a slow store delays it but no step.
    It also looks whether the store has room for the next checkpoint. One without room is put off until there
    is some, and training goes on.
    """

    def __init__(
        self,
        spec: GRPOJobSpec,
        folder: JobFolder,
        trainers: TrainerGang,
        scheduler: RolloutScheduler,
        board: ProgressBoard,
        state: Callable[[], dict[str, Any]],
        flush: Callable[[], None],
        parking: Parking,
        check: Callable[[], None],
        fork: Fork | None = None,
    ) -> None:
        """``folder``: of the job. ``state``: returns the controller's state. ``flush``: waits until
        the records of all finished steps are on the store; no checkpoint counts before. ``check``: raises
        SupersededError when another controller has taken over. ``fork``: what the job takes over from another
        job.
        """
        self._fork = fork
        self._spec = spec.checkpoint
        self._root = folder.store / "checkpoints"
        self._exports = folder.store / EXPORTS
        self._trainers = trainers
        self._scheduler = scheduler
        self._board = board
        self._state = state
        self._flush = flush
        self._parking = parking
        self._check = check
        self._stored = 0  # step of the newest complete checkpoint in the store
        self._saving: int | None = None  # step of the checkpoint that is being written
        self._due = False  # a checkpoint should have begun, but the one before was being written
        self._exporting: int | None = None  # step of the export that is being written
        self._export_due = False  # like ``_due``
        self._exported: set[int] = set()
        self._lacks_samples: int | None = None  # step of a checkpoint without the samples of the next step
        self._snapshots: list[int] = []  # steps of the last two in memory; the newest may be incomplete
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bookkeeping")
        self._records = self._thread.submit(lambda: None)  # done when those of ``_saving`` are on the store
        self._newest = self._records  # the same of the newest checkpoint, also of one in memory
        self._room = StoreRoom(self._root, self._spec.keep, self._spec.store.label, self._thread.submit)
        self.put_off = 0  # steps after which a checkpoint was due and had no room
        memory = spec.checkpoint.memory
        self._memory: MemoryTier | None = None
        if memory is not None:
            self._memory = MemoryTier(
                trainers, memory.every_steps, memory.replicas, folder.store / "memory.json",
                CopyOutcomes(lambda report: board.update(memory_copies=report)),
            )  # fmt: skip

    @property
    def stored(self) -> int:
        """Step of the newest complete checkpoint in the store; 0: there is none."""
        return self._stored

    @property
    def complete_steps(self) -> list[int]:
        """Steps with a complete checkpoint in the store, ascending."""
        return complete_steps(self._root)

    def begin_attempt(self, attempt: int) -> None:
        """Take over another job's checkpoint, if the job starts from one and has none of its own.

        This comes before the ranks start, because the other job may remove it. Raises ValueError and OSError.
        """
        if self._fork is not None:
            source = self._fork.adopt(self._root, model_digest(self._trainers.hf), attempt)
            if source is not None:
                self._board.update(resumed_from=str(source))

    def restore(self) -> Restored:
        """Restore the gang from the pods' memory if that is newer than the store, else from the store."""
        self._saving, self._due, self._lacks_samples = None, False, None
        self._exporting, self._export_due = None, False
        self._newest.exception()  # wait for the thread; an error belongs to a checkpoint that does not count
        self._room.forget()
        remove_remains(self._root, self._trainers.attempt)  # which may be what fills the store
        restored = self._restore_from_memory() or self._trainers.restore()
        if restored.source == "store":
            self._note_stored(directory(self._root, restored.step, restored.attempt))
        if not self._stored:
            self._room.estimate = self._trainers.call("checkpoint_bytes")
        self._room.attempt = self._trainers.attempt
        self._room.look()
        self._snapshots = [restored.step]
        restored = self._behind_abandoned(restored)
        self._exported = complete_exports(self._exports)
        self._export_if_due(restored.step)  # the attempt before may have ended while it was written
        return restored

    def _behind_abandoned(self, restored: Restored) -> Restored:
        """Return the state with the position of the last rollback, if it was saved before that.

        Samples and exports of the abandoned steps are removed. It may have been done before.
        """
        last = latest_after(rollbacks(self._root.parent), restored.attempt)
        if last is None:
            return restored
        self._check()
        self._scheduler.prune((), last.attempt)
        for step in complete_exports(self._exports):
            if step > restored.step:
                remove_tree(directory(self._exports, step))
        return replace(restored, position=last.position)

    def _restore_from_memory(self) -> Restored | None:
        if self._memory is None:
            return None
        self._memory.begin_attempt()
        newest = self._trainers.newest or directory(self._root, 0)
        self._note_stored(newest)
        return self._memory.restore(self._stored)

    def poll(self) -> None:
        """Note an export and a checkpoint that are complete.

        Raises OSError when a checkpoint's records cannot be written. A checkpoint counts after the exports of
        the steps before it: a restart would not repeat these.
        """
        self._poll_export(blocking=False)
        if self._saving is None or not self._records.done():
            return
        self._records.result()
        if self._exporting is None or self._exporting >= self._saving:  # the ranks complete the checkpoint
            self._note_complete(self._trainers.call("poll_checkpoint", False))

    def after_step(self, step: int, attempt: int) -> None:
        """Start the next checkpoint when it is due.

        If the store needs longer than ``everySteps`` for one, the next one starts after the step in which
        that one is complete. Raises OSError when records of a checkpoint cannot be written.
        """
        self.poll()
        if self._memory is not None:
            self._memory.poll()
        self._due = self._due or step % self._spec.every_steps == 0
        if self._stored == step:  # saved while the trainers were parked
            self._due = False
            self.add_samples(step)
        elif self._due and self._saving is None and self._fits(step):
            self._save(step)
        elif self._memory is not None and self._memory.due(step) and self._exporting is None:
            self._snapshots = [*self._snapshots[-1:], step]
            self._memory.snapshot(step, attempt, self._state(), self._keep_records(step))
        self._export_if_due(step)
        if self._saving is None and (self._due or (step + 1) % self._spec.every_steps == 0):
            self._room.look()  # the next step finds out

    def with_problem(self, message: str) -> str:
        """Return a step's message with the reason why a checkpoint is put off, if one is."""
        return "; ".join(filter(None, (self._board.get().checkpoint_problem, message)))

    def settle(self) -> None:
        """Wait until the checkpoint that is being written, if there is one, is complete."""
        if self._saving is not None:
            self._complete()

    def save_now(self, step: int) -> None:
        """Save a checkpoint of this step in the store, unless it exists, and wait until it is complete.

        Before that, wait until the store has room for it.
        """
        self._begin_and_end(step, lambda: self._parking.wait_while(self._room.measured))

    def save_parked(self, step: int, batch: RolloutBatch | None = None, from_host: bool = False) -> None:
        """Do the same while engines are away, without samples that are still generated ahead.

        A checkpoint that the store has no room for is put off.
        ``batch``: samples of the next step, if it has begun. ``from_host``: engines may hold the GPUs.
        """
        with_samples = batch is not None or not self._scheduler.generates_ahead
        self._begin_and_end(step, self._room.measured, with_samples, batch, from_host)
        if self._stored == step and not with_samples:
            self._lacks_samples = step

    def add_samples(self, step: int, batch: RolloutBatch | None = None) -> None:
        """Bring the samples of the next step to the checkpoint of ``step`` if it was saved without them.

        Only then does a replay train on the same samples. ``batch``: as in ``save_parked``.
        """
        if self._lacks_samples == step:
            self._records = self._keep_records(step, batch=batch)

    def export(self, step: int) -> None:
        """Write the weights of this step as a Hugging Face directory, unless it exists, and wait for it."""
        self._poll_export(blocking=True)
        if step not in self._exported:
            self._board.update(message=f"exporting step {step}")
            self._export(step, beside=False)
            self._exported.add(step)
            self._board.update(message="")

    def _export_if_due(self, step: int) -> None:
        """Start an export beside the steps. One at a time: each holds a copy of the weights."""
        every = self._spec.export_every_steps
        if every and step and step % every == 0:
            self._export_due = step not in self._exported
        if self._export_due and self._exporting is None:
            self._export(step, beside=True)
            self._exporting, self._export_due = step, False

    def _export(self, step: int, *, beside: bool) -> None:
        target = directory(self._exports, step)
        self._trainers.call("export_weights", str(target), beside, self._trainers.attempt)

    def _poll_export(self, blocking: bool) -> None:
        if self._exporting is not None and self._trainers.call("poll_export", blocking)[0]:
            self._exported.add(self._exporting)
            self._exporting = None

    def _begin_and_end(
        self, step: int, measure: Callable[[], object], with_samples: bool = True,
        batch: RolloutBatch | None = None, from_host: bool = False,
    ) -> None:  # fmt: skip
        """Save a checkpoint from its beginning to its end if it has room after ``measure``."""
        self._flush()
        self._poll_export(blocking=True)
        if self._stored != step:
            self._complete()
        if self._stored != step:
            measure()
            if self._fits(step):
                self._save(step, with_samples, batch, from_host)
                self._complete()

    def _save(
        self, step: int, with_samples: bool = True, batch: RolloutBatch | None = None, from_host: bool = False
    ) -> None:
        """Start a checkpoint. One at a time: two would compete for the store."""
        self._saving, self._due = step, False
        self._room.forget()
        self._records = self._keep_records(step, with_samples, batch)
        if self._stored != step:  # else it was saved while the trainers were parked
            self._trainers.call("save_checkpoint", step, self._state(), from_host)

    def _fits(self, step: int) -> bool:
        """Return whether the store has room for a checkpoint of ``step``, as far as is known; report it."""
        shortage = self._room.shortage()
        self.put_off = self.put_off + 1 if shortage else 0
        self._due = self._due or bool(shortage)
        if shortage:
            shortage = f"the checkpoint of step {step} is put off: {shortage}"
        if shortage != self._board.get().checkpoint_problem:
            log.warning("%s", shortage or "the store has room for checkpoints again")
            self._board.update(checkpoint_problem=shortage)
        return not shortage

    def _complete(self) -> None:
        """Wait until the checkpoint in progress, if there is one, is complete."""
        self._records.result()
        self._note_complete(self._trainers.call("poll_checkpoint", True))

    def _keep_records(
        self, step: int, with_samples: bool = True, batch: RolloutBatch | None = None
    ) -> "Future[None]":
        """Start to bring what belongs to the checkpoint of ``step`` to the store."""
        write: Callable[[], None] | None = None
        if with_samples:
            # While engines are away, no step may be lost either; the samples are added when they are there.
            self._parking.run(self._scheduler.wait, lambda: self.save_parked(step))
            write, self._lacks_samples = self._scheduler.save(step, self._trainers.attempt, batch), None
        kept = {step, *self._snapshots}
        if self._saving is not None:
            kept.add(self._saving)

        attempt = self._trainers.attempt

        def keep() -> None:
            if write is not None:
                write()
            self._flush()
            self._check()  # all of that may have taken long
            self._scheduler.prune(kept.union(complete_steps(self._root)), attempt)

        self._newest = self._thread.submit(keep)
        return self._newest

    def _note_complete(self, steps_by_rank: list[list[int]]) -> None:
        for step in steps_by_rank[0]:
            self._note_stored(directory(self._root, step, self._trainers.attempt), utc_time())
            self._saving = None
            if self._memory is not None:
                self._memory.note_stored(step)
            if self._due:
                self._room.look()

    def _note_stored(self, checkpoint: StorePath, time: str = "") -> None:
        """Note the newest complete checkpoint; the one of step 0 is the initial state.

        ``time``: when it was complete, or "" if it has been found.
        """
        self._stored = step_and_attempt(checkpoint)[0]
        location = str(checkpoint) if self._stored else ""
        self._board.update(
            last_checkpoint=self._stored or None, checkpoint_location=location, checkpoint_time=time
        )
