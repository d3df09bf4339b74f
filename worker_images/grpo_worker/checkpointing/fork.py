"""Start of a job from a checkpoint of another job, whose folder is only read.

The checkpoint becomes the first one of the job itself: its files are linked into the job's folder. That costs
no bytes, and the other job may remove its checkpoint then. On a store without hard links the links are
symbolic, and the files are needed until the job has a checkpoint of its own. The same holds for an object
store, where the job's marker names the other checkpoint, and ranks read its objects in place.
"""

import errno
import json
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing.restart_point import CHECKPOINTS
from grpo_worker.checkpointing.rollbacks import latest_after, rollbacks
from grpo_worker.checkpointing.store import (
    CONTROLLER_STATE,
    MARKER,
    OF_WEIGHTS,
    PIECES,
    DamagedCheckpointError,
    Origin,
    commit,
    complete,
    directory,
    parts_of,
    set_aside_sources,
    verify,
)
from grpo_worker.common.store_path import (
    StorePath,
    elsewhere,
    file_sizes,
    has_file,
    remove_tree,
    store_path,
)

log = logging.getLogger(__name__)
DATA = "data"  # key of the controller's state: what its position in the data counts
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
_TRIES = 3  # the other job may remove a checkpoint at the moment when it is linked
# Fields of ``spec.data`` that do not change which prompt has which number.
_SAME_PROMPTS = {"response_length", "train_batch_size", "max_refused_share"}


def data_of(spec: GRPOJobSpec) -> dict[str, Any]:
    """Return the fields that determine which prompt has which number, where they are no defaults."""
    fields = spec.data.model_dump(mode="json", exclude_defaults=True, exclude=_SAME_PROMPTS)
    return fields | {"seed": spec.seed}


@dataclass(frozen=True, slots=True)
class Fork:
    """Checkpoint that a job starts from. ``folder``: of the job, its checkpoints, or one of these."""

    spec: GRPOJobSpec
    folder: StorePath

    @classmethod
    def of(cls, spec: GRPOJobSpec, folder: str | None) -> "Fork | None":
        """Return what a job takes over; None if it starts from the model's weights."""
        if folder is None or spec.checkpoint.resume_from is None:
            return None
        return cls(spec, store_path(spec.checkpoint.store, folder))

    @property
    def _policy_only(self) -> bool:
        assert self.spec.checkpoint.resume_from is not None
        return self.spec.checkpoint.resume_from.load == "weights"

    @property
    def _field(self) -> str:
        assert self.spec.checkpoint.resume_from is not None
        return self.spec.checkpoint.resume_from.label

    def check(self, root: StorePath, model: str) -> None:
        """Raise ValueError, which names field, value and remedy, if the job cannot start.

        ``root``: folder of the job's own checkpoints. ``model``: digest of the job's model.
        """
        if not complete(root):
            self._choose(model, set_aside_sources(root))

    def adopt(self, root: StorePath, model: str, attempt: int) -> "StorePath | None":
        """Make the chosen checkpoint the job's own; return where it is from.

        None if the job has one already. Raises ValueError like ``check``, and OSError.
        """
        for left in reversed(range(_TRIES)):
            if complete(root):
                return None
            step, source, origin = self._choose(model, set_aside_sources(root))
            alone = self._policy_only or origin.policy_only
            own = 0 if alone else step
            place = directory(root, own, attempt)
            try:
                self._take(
                    root, own, source, origin.attempt, replace(origin, attempt=attempt, policy_only=alone)
                )
            except FileNotFoundError:
                remove_tree(place)
                if not left:
                    raise
                continue
            log.info("the job starts from %s", source)
            return source
        return None

    def _take(self, root: StorePath, step: int, source: StorePath, saved_by: int, origin: Origin) -> None:
        """Complete the job's own checkpoint with the files of ``source``, which has this origin.

        ``saved_by``: attempt of the other job. Raises FileNotFoundError if any of the files is gone.
        """
        place = directory(root, step, origin.attempt)
        if isinstance(place, Path):
            _link_files(Path(str(source)), place)
            origin = replace(origin, source=str(source))
        else:
            origin = replace(origin, source=str(origin.folder(source)), in_place=True)
        state = None if origin.policy_only else self._controller_state(source, saved_by)
        (place / CONTROLLER_STATE).write_text(json.dumps(state))
        commit(root, step, origin)

    def _controller_state(self, source: StorePath, attempt: int) -> dict[str, Any]:
        """Return the controller's state, without a position in other data than this job's.

        ``attempt``: of the other job, that saved it. Prompts that a rollback has abandoned since are skipped.
        """
        state: dict[str, Any] = json.loads((source / CONTROLLER_STATE).read_text())
        rolled_back = latest_after(rollbacks(source.parent.parent), attempt)
        if rolled_back is not None:
            state["source"] = rolled_back.position
        own = data_of(self.spec)
        if state.get(DATA, own) != own:
            log.warning("the data are read from their beginning: they are %s, not %s", own, state[DATA])
            del state["source"]
        return state

    def _choose(self, model: str, damaged: Collection[str]) -> tuple[int, StorePath, Origin]:
        """Return step, folder and origin of the checkpoint. ``damaged``: those that ranks found to be so."""
        assert self.spec.checkpoint.resume_from is not None
        self._check_kept(damaged)
        found, wanted = self._found(), self.spec.checkpoint.resume_from.step
        if wanted is not None and wanted not in found:
            raise ValueError(
                f"checkpoint.resumeFrom.step={wanted}: {self._field} has no complete checkpoint of this "
                f"step: use {_steps(found)}, or leave step out for the newest"
            )
        candidates = found if wanted is None else {wanted: found[wanted]}
        for step, path in sorted(candidates.items(), reverse=True):
            try:
                origin = verify(path, model, contents=True)
                if damaged and {str(path), str(origin.folder(path))}.intersection(damaged):
                    raise DamagedCheckpointError(f"ranks read changed values in {path}")
                self._check(step, path, origin)
            except DamagedCheckpointError as error:
                log.error("%s: the checkpoint of step %d is damaged: %s", self._field, step, error)
            except ValueError as error:
                if has_file(path / MARKER):  # else it was removed at this moment
                    raise ValueError(f"{self._field}: {error}") from error
            else:
                return step, path, origin
        if candidates:
            raise ValueError(
                f"{self._field}: the checkpoints of {_steps(candidates)} are damaged: name another job, path "
                "or step"
            )
        raise ValueError(f"{self._field}: {self.folder} has no complete checkpoint: name another job or path")

    def _check_kept(self, damaged: Collection[str]) -> None:
        """Raise ValueError if objects are gone that this job was reading in place.

        It has gone on from them, perhaps for steps, so another checkpoint would not continue its course.
        """
        for source in () if isinstance(self.folder, Path) else sorted(damaged):
            if not has_file(elsewhere(self.folder, source) / MARKER):
                raise ValueError(
                    f"{self._field}: {source}, from which this job has started, was removed before it had a "
                    "checkpoint of its own: create a new job that starts from another one"
                )

    def _found(self) -> "dict[int, StorePath]":
        """Return the complete checkpoints by step."""
        try:
            if has_file(self.folder / MARKER):
                return {self._step(self.folder / MARKER): self.folder}
            return complete(self.folder / CHECKPOINTS) or complete(self.folder)
        except PermissionError as error:
            raise ValueError(
                f"{self._field}: this job has no access to {self.folder} ({error.strerror or error}): allow "
                "it to read that, or name another source"
            ) from error

    def _step(self, marker: StorePath) -> int:
        try:
            return int(json.loads(marker.read_text())["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self._field}: {marker} cannot be read ({error!r}): name another source"
            ) from error

    def _check(self, step: int, path: StorePath, origin: Origin) -> None:
        """Raise ValueError if this job cannot go on from a checkpoint that is whole."""
        there = origin.folder(path)
        if not isinstance(there, Path) and not any(name.endswith(PIECES) for name in file_sizes(there)):
            raise ValueError(
                f"{path} is the copy of a checkpoint in a file system, without the digests by which ranks "
                "check objects: start from it in a store of kind pvc or path"
            )
        alone = self._policy_only or origin.policy_only
        needed = [part for part in parts_of(self.spec) if part == OF_WEIGHTS or not alone]
        lacking = [part for part in needed if origin.parts is not None and part not in origin.parts]
        if lacking:
            remedy = "remove it" if alone else "remove it, or set checkpoint.resumeFrom.load to weights"
            raise ValueError(f"{path} was saved without spec.{lacking[0]}, which this job sets: {remedy}")
        if not alone and self.spec.total_steps <= step:
            raise ValueError(
                f"spec.totalSteps={self.spec.total_steps}: {path} is of step {step}, whose steps count as "
                f"finished: set more than {step}, or set checkpoint.resumeFrom.load to weights"
            )


def _link_files(source: Path, place: Path) -> None:
    """Link all files of a checkpoint but those that are written for the copy."""
    names: dict[str, int] = json.loads((source / MARKER).read_text())["files"]
    place.mkdir(parents=True, exist_ok=True)
    for name in names.keys() - {CONTROLLER_STATE}:
        _link(source / name, place / name)


def _link(file: Path, link: Path) -> None:
    link.unlink(missing_ok=True)
    try:
        os.link(file, link)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        link.symlink_to(file)


def _steps(found: Collection[int]) -> str:
    return f"step {', '.join(map(str, sorted(found)))}" if found else "another job: it has none"
