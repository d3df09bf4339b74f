"""Start of a job from a checkpoint of another job, whose folder is only read.

The checkpoint becomes the first one of the job itself: its files are linked into the job's folder. That costs
no bytes, and the other job may remove its checkpoint then. On a store without hard links the links are
symbolic, and the files are needed until the job has a checkpoint of its own.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing.restart_point import CHECKPOINTS
from grpo_worker.checkpointing.store import (
    CONTROLLER_STATE,
    MARKER,
    OF_WEIGHTS,
    DamagedCheckpointError,
    Origin,
    commit,
    complete,
    directory,
    parts_of,
    set_aside_sources,
    verify,
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
    folder: Path

    @classmethod
    def of(cls, spec: GRPOJobSpec, folder: Path | None) -> "Fork | None":
        """Return what a job takes over; None if it starts from the model's weights."""
        return cls(spec, folder) if folder is not None and spec.checkpoint.resume_from else None

    @property
    def _policy_only(self) -> bool:
        assert self.spec.checkpoint.resume_from is not None
        return self.spec.checkpoint.resume_from.load == "weights"

    @property
    def _field(self) -> str:
        assert self.spec.checkpoint.resume_from is not None
        return self.spec.checkpoint.resume_from.label

    def check(self, root: Path, model: str) -> None:
        """Raise ValueError, which names field, value and remedy, if the job cannot start.

        ``root``: folder of the job's own checkpoints. ``model``: digest of the job's model.
        """
        if not complete(root):
            self._choose(model, set_aside_sources(root))

    def adopt(self, root: Path, model: str, attempt: int) -> Path | None:
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
                _link_files(source, place)
                state = None if alone else self._controller_state(source)
            except FileNotFoundError:
                shutil.rmtree(place, ignore_errors=True)
                if not left:
                    raise
                continue
            (place / CONTROLLER_STATE).write_text(json.dumps(state))
            commit(root, own, replace(origin, attempt=attempt, source=str(source), policy_only=alone))
            log.info("the job starts from %s", source)
            return source
        return None

    def _controller_state(self, source: Path) -> dict[str, Any]:
        """Return the controller's state, without a position in other data than this job's."""
        state: dict[str, Any] = json.loads((source / CONTROLLER_STATE).read_text())
        own = data_of(self.spec)
        if state.get(DATA, own) != own:
            log.warning("the data are read from their beginning: they are %s, not %s", own, state[DATA])
            del state["source"]
        return state

    def _choose(self, model: str, damaged: Collection[str]) -> tuple[int, Path, Origin]:
        """Return step, folder and origin of the checkpoint. ``damaged``: those that ranks found to be so."""
        assert self.spec.checkpoint.resume_from is not None
        found, wanted = self._found(), self.spec.checkpoint.resume_from.step
        if wanted is not None and wanted not in found:
            raise ValueError(
                f"checkpoint.resumeFrom.step={wanted}: {self._field} has no complete checkpoint of this "
                f"step: use {_steps(found)}, or leave step out for the newest"
            )
        candidates = found if wanted is None else {wanted: found[wanted]}
        for step, path in sorted(candidates.items(), reverse=True):
            try:
                if str(path) in damaged:
                    raise DamagedCheckpointError(f"ranks read changed values in {path}")
                origin = verify(path, model, contents=True)
                self._check(step, path, origin)
            except DamagedCheckpointError as error:
                log.error("%s: the checkpoint of step %d is damaged: %s", self._field, step, error)
            except ValueError as error:
                if (path / MARKER).is_file():  # else it was removed at this moment
                    raise ValueError(f"{self._field}: {error}") from error
            else:
                return step, path, origin
        if candidates:
            raise ValueError(
                f"{self._field}: the checkpoints of {_steps(candidates)} are damaged: name another job, path "
                "or step"
            )
        raise ValueError(f"{self._field}: {self.folder} has no complete checkpoint: name another job or path")

    def _found(self) -> dict[int, Path]:
        """Return the complete checkpoints by step."""
        marker = self.folder / MARKER
        if marker.is_file():
            try:
                return {int(json.loads(marker.read_text())["step"]): self.folder}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self._field}: {marker} cannot be read ({error!r}): name another path"
                ) from error
        inside = self.folder / CHECKPOINTS
        return complete(inside if inside.is_dir() else self.folder)

    def _check(self, step: int, path: Path, origin: Origin) -> None:
        """Raise ValueError if this job cannot go on from a checkpoint that is whole."""
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
