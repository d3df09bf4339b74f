"""Methods of a trainer rank that save and restore its state: checkpoints, snapshots in memory, exports."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_operator.api.catalog.presets import PRESET
from grpo_worker.checkpointing.snapshots import file_of, is_written, mark_written, remove_older
from grpo_worker.checkpointing.state_file import read_state, write_state
from grpo_worker.checkpointing.store import WEIGHTS as STORED_WEIGHTS
from grpo_worker.common.store_path import store_path
from grpo_worker.profiling.background import join
from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.roles.dispatch import Dispatch, RankInfo, register
from grpo_worker.roles.weight_sync import WEIGHTS
from grpo_worker.weightsync.trainer.version_copy import VersionCopy

if TYPE_CHECKING:
    from grpo_worker.roles.trainer_models import TrainerModels

SNAPSHOTS = WEIGHTS / "snapshots"


class CheckpointMethods:
    """Mixin of the trainer rank, which sets these attributes when it builds its models."""

    rank_info: RankInfo
    _models: "TrainerModels"
    _export: "Future[None]"
    _snapshot_error = ("", "")  # name of a snapshot, and why it could not be written
    _version_copy: VersionCopy | None = None  # the newest

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, step: int, controller_state: dict[str, Any], from_host: bool = False) -> None:
        """Start to write the checkpoint of ``step``; training continues meanwhile.

        With it goes a copy of the version of the step, if that is published. ``from_host``: without GPU
        memory, because engines may hold the GPUs.
        """
        checkpointer = self._models.checkpointer
        if not self._models.spec.fills_engines_from_store:
            checkpointer.save(step, controller_state, from_host)
            return
        to = Path(str(checkpointer.directory(step)), STORED_WEIGHTS)
        copy = self._version_copy = VersionCopy(WEIGHTS, step, self.rank_info.rank, to)
        checkpointer.save(step, controller_state, from_host, copy.run)

    @register(Dispatch.ONE_TO_ALL)
    def take_snapshot(self, name: str, kept: str | None) -> None:
        """Copy this rank's state to host memory; a thread writes it to the pod's memory volume.

        ``kept``: the newest complete snapshot. The pod's other ones are removed, so that there is memory for
        this one.
        """
        from grpo_worker.megatron.checkpoint import snapshot

        remove_older(SNAPSHOTS, name, kept)
        state, file = snapshot.capture(self._models.parts), file_of(SNAPSHOTS, name, self.rank_info.rank)
        file.parent.mkdir(parents=True, exist_ok=True)

        def write() -> None:
            try:
                mark_written(file, write_state(file, state))
            except Exception as error:  # noqa: BLE001 - the call that asks for the snapshot reports it
                self._snapshot_error = (name, f"rank {self.rank_info.rank} cannot write {file}: {error}")

        threading.Thread(target=write, name="snapshot").start()

    @register(Dispatch.ONE_TO_ALL)
    def snapshot_written(self, name: str) -> bool | str:
        """Return whether the snapshot is completely written to the pod's memory volume, or its error."""
        failed, error = self._snapshot_error
        if failed == name:
            return error
        return is_written(SNAPSHOTS, name, self.rank_info.rank)

    @register(Dispatch.ONE_TO_ALL)
    def load_snapshot(self, name: str) -> None:
        """Restore this rank from a snapshot whose seal the pod's agent has checked."""
        from grpo_worker.megatron.checkpoint import snapshot

        state = read_state(file_of(SNAPSHOTS, name, self.rank_info.rank))
        snapshot.restore(self._models.parts, state)

    @register(Dispatch.ONE_TO_ALL)
    def poll_checkpoint(self, blocking: bool) -> list[int]:
        """Commit checkpoints that all ranks have written; return their steps."""
        return self._models.checkpointer.poll(blocking)

    @register(Dispatch.ONE_TO_ALL)
    def export_weights(self, path: str, beside: bool, attempt: int) -> None:
        """Export the policy as a Hugging Face directory.

        ``beside``: the call returns as soon as the weights are copied; ``poll_export`` tells of the end.
        """
        from grpo_worker.megatron.export.exporter import begin_export

        source = (
            None if self._models.spec.model.path.startswith(PRESET) else Path(self._models.spec.model.path)
        )
        with self._models.policy.trainable.weights.on_device():
            self._export = begin_export(
                store_path(self._models.spec.checkpoint.store, path),
                self._models.hf,
                self._models.policy.chunks,
                self._models.policy.family,
                source,
                self._models.spec.checkpoint.export_quantization,
                beside,
                attempt,
            )
            if not beside:
                join(self._export)

    @register(Dispatch.ONE_TO_ALL)
    def poll_export(self, blocking: bool) -> bool:
        """Return whether the export is complete, or wait until it is. Raises its error."""
        if not blocking and not self._export.done():
            return False
        join(self._export)
        return True

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Restore this rank from a complete checkpoint of any layout."""
        with PROGRESS.reading():
            self._models.checkpointer.load(store_path(self._models.spec.checkpoint.store, path))
