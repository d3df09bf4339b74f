"""Layout of the checkpoint directory, readable without Megatron-Core.

A checkpoint is a directory ``step-00000010.attempt-3``. It is complete when it contains ``COMMITTED``,
which is written last; incomplete checkpoints are ignored on load and removed by ``prune``.

Ranks that nobody can reach may go on writing after their attempt has ended. They write into directories of
their own attempt, and cannot commit once a newer one was claimed. If they do so at that very moment, what
they commit beyond the step from which the newer attempt has started does not count.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.best import best_step
from grpo_worker.checkpointing.rollbacks import abandoned
from grpo_worker.common.files import write_text
from grpo_worker.common.known_fields import known
from grpo_worker.common.store_path import (
    Place,
    StorePath,
    children,
    elsewhere,
    file_sizes,
    has_file,
    remove_file,
    remove_tree,
    rename,
    uploads_below,
)

log = logging.getLogger(__name__)
MARKER = "COMMITTED"
STATE = ".distcp"  # suffix of the files with tensors
# Suffixes of a file with the digests of what is in a file of ``STATE``: in an object store, in a file system.
PIECES = (".sha256", ".xxh3")
SET_ASIDE = "DAMAGED"  # name of the marker of a damaged checkpoint, which is removed like incomplete ones
CONTROLLER_STATE = "controller.json"
WEIGHTS = "weights"  # folder with a copy of the checkpoint's weight version, which engines can be filled from
OF_WEIGHTS = "model.multiTokenPrediction"  # the part of a checkpoint that belongs to the policy's weights
# Fields of a config.json that do not affect the function that a model computes.
NO_SHAPE = ("transformers_version", "torch_dtype", "dtype", "quantization_config")
_NAME = re.compile(r"step-(\d{8,})(?:\.attempt-(\d+))?")
FORMAT = 1  # of the marker and the checkpoint; increment it when older code could not load them


class DamagedCheckpointError(ValueError):
    """A checkpoint that was complete is not any more; an older one may be."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a checkpoint.

    ``model``: digest of the architecture. ``layout``: that of the saving job. ``attempt``: that saved it.
    ``parts``: what it contains beside the policy, see ``parts_of``; None: an older version saved it.
    ``source``: checkpoint of another job that it was adopted from, or "". ``policy_only``: only the policy's
    weights are loaded from it. ``in_place``: the files are those of ``source``, but for ``CONTROLLER_STATE``.
    """

    model: str
    layout: str
    attempt: int = 0
    parts: list[str] | None = None
    source: str = ""
    policy_only: bool = False
    in_place: bool = False

    def folder(self, path: Place) -> Place:
        """Return the folder with the state of the checkpoint ``path``."""
        return elsewhere(path, self.source) if self.in_place else path

    @classmethod
    def of(cls, marker: Mapping[str, Any]) -> "Origin":
        """Return the origin in a marker of any version."""
        return cls(**known(cls, marker["origin"]))


def parts_of(spec: GRPOJobSpec) -> list[str]:
    """Return what a job's checkpoints contain beside the policy, by the field that adds it."""
    found = {
        "algorithm.critic": spec.algorithm.critic is not None,
        "algorithm.refreshReferenceSteps": spec.algorithm.refresh_reference_steps is not None,
        OF_WEIGHTS: spec.model.multi_token_prediction,
    }
    return [field for field, is_set in found.items() if is_set]


def model_digest(hf: Mapping[str, Any]) -> str:
    """Return a digest of everything that determines the shapes and the meaning of a model's weights."""
    own = {key: value for key, value in hf.items() if key not in NO_SHAPE}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]


def directory(root: Place, step: int, attempt: int = 0) -> Place:
    """Return the directory of the checkpoint that an attempt saves after ``step``.

    ``attempt``: 0 for what no other attempt writes, and for checkpoints of earlier versions.
    """
    name = f"step-{step:08d}" + (f".attempt-{attempt}" if attempt else "")
    return cast(Place, root / name)


def step_and_attempt(path: StorePath) -> tuple[int, int]:
    """Return the step and the attempt in the name of a directory. Raises ValueError for other names."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path} is no checkpoint: its name must be like step-00000010.attempt-3")
    return int(found[1]), int(found[2] or 0)


def complete(root: Place) -> dict[int, Place]:
    """Return the complete checkpoints that count by step, ascending; of each step the newest attempt's."""
    found = {step_and_attempt(path): path for path in _all(root) if has_file(path / MARKER)}
    folder = root.parent
    return {step: found[step, own] for step, own in sorted(found) if attempts.counts(folder, step, own)}


def complete_steps(root: StorePath) -> list[int]:
    """Return the steps with a complete checkpoint, ascending."""
    return list(complete(root))


def _all(root: Place) -> list[Place]:
    """Return the directories of all checkpoints, complete or not."""
    return [cast(Place, root / name) for name in sorted(children(root)) if _NAME.fullmatch(name)]


def _begun(root: StorePath) -> list[StorePath]:
    """Return the same with those in an object store of which no file is complete."""
    names = {part for key in uploads_below(root) for part in key.split("/") if _NAME.fullmatch(part)}
    return [root / name for name in sorted(names.union(children(root))) if _NAME.fullmatch(name)]


def commit(root: StorePath, step: int, origin: Origin) -> None:
    """Mark a checkpoint as complete with a file that lists its files and is put into place as a whole.

    It has the digests of the small files. Those of ``PIECES`` among them have the digests of what is in the
    files of ``STATE``, which ranks check when they load it. ``WEIGHTS`` is not listed: training can be
    restored without it.
    Raises SupersededError if a newer attempt was claimed, and FileNotFoundError without files ``in_place``.
    """
    path = directory(root, step, origin.attempt)
    files = file_sizes(path)
    digests = {name: _digest(path / name) for name in files if not name.endswith(STATE)}
    if origin.in_place:
        shared = json.loads((origin.folder(path) / MARKER).read_text())
        files, digests = shared["files"] | files, shared["digests"] | digests
    marker = {
        "format": FORMAT,
        "step": step,
        "origin": asdict(origin),
        "files": files,
        "digests": digests,
    }
    check = partial(attempts.check, root.parent, origin.attempt)
    write_text(path / MARKER, json.dumps(marker), f".{MARKER}", check)


def newest_sound(root: StorePath, model: str) -> "StorePath | None":
    """Return the newest complete checkpoint that can be loaded; None: there is none.

    A damaged one loses its marker, so that the one before is used. Raises ValueError like ``verify`` for
    checkpoints that are whole, but of another model or of a newer version.
    """
    for path in reversed(complete(root).values()):
        try:
            verify(path, model, contents=True)
        except DamagedCheckpointError as error:
            set_aside(path, error)
        else:
            return path
    return None


def set_aside(path: StorePath, error: DamagedCheckpointError) -> None:
    """Take the marker from a damaged checkpoint, so that the one before is used."""
    log.error("%s; it is set aside", error)
    rename(path / MARKER, path / SET_ASIDE)


def verify(path: StorePath, model: str, contents: bool = False) -> Origin:
    """Check a complete checkpoint and return its origin. ``contents``: read the small files too.

    Raises DamagedCheckpointError when it is truncated or changed, and ValueError, with the remedy, when it is
    incomplete, of another model, or written by a newer version.
    """
    remedy = f"remove {path / MARKER} to fall back to an older checkpoint"
    try:
        marker = json.loads((path / MARKER).read_text())
        version, files, origin = marker["format"], marker["files"], Origin.of(marker)
    except FileNotFoundError as error:
        raise ValueError(
            f"checkpoint {path} has no {MARKER}: it was never completed: use another one"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {path}: {MARKER} cannot be read ({error!r}); {remedy}"
        ) from error
    if version > FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {version}, this image reads formats up to {FORMAT}: use the image "
            "that wrote it, or a newer one"
        )
    if origin.model != model:
        raise ValueError(
            f"checkpoint {path} is of another model (digest {origin.model}, this job's is {model}): set "
            "spec.model.path to the model that it was trained from, or use another checkpoint"
        )
    own = file_sizes(path)
    there = file_sizes(origin.folder(path)) | own if origin.in_place else own
    for name, size in files.items():
        if there.get(name) != size:
            found = f"it has {there[name]}" if name in there else "there is none"
            raise DamagedCheckpointError(
                f"checkpoint {origin.folder(path)}: {name} is missing or not {size} bytes long ({found}); "
                f"{remedy}"
            )
    for name, digest in marker.get("digests", {}).items() if contents else ():
        folder = path if name in own else origin.folder(path)
        if name.endswith(PIECES):
            continue  # each rank checks those that it needs
        if (found := _digest(folder / name)) != digest:
            raise DamagedCheckpointError(
                f"checkpoint {folder}: {name} was changed after the save (its sha256 is {found}, and "
                f"{digest} was saved); {remedy}"
            )
    return origin


def state_folder(path: Place) -> Place:
    """Return the folder with the state of a complete checkpoint, which may be one of another job."""
    return Origin.of(json.loads((path / MARKER).read_text())).folder(path)


def set_aside_sources(root: StorePath) -> set[str]:
    """Return the checkpoints of other jobs whose copies here were damaged."""
    found = set[str]()
    for marker in (path / SET_ASIDE for path in _all(root)):
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # it may be what is damaged
            found.add(str(json.loads(marker.read_text())["origin"]["source"]))
    return found - {""}


def _digest(file: StorePath) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()  # type: ignore[arg-type]


def remove_remains(root: StorePath, attempt: int) -> None:
    """Remove what older attempts have begun and not completed, so that a new checkpoint has room.

    What rollbacks have abandoned goes too.
    """
    for path in _begun(root):
        step, own = step_and_attempt(path)
        finished = has_file(path / MARKER) or has_file(path / SET_ASIDE)
        if own < attempt and (not finished or abandoned(root.parent, step, own)):
            remove_file(path / MARKER)  # first, so that no partial directory has a marker
            remove_tree(path)


def prune(root: StorePath, keep: int, attempt: int = 0) -> None:
    """Remove all but the newest ``keep`` complete checkpoints, incomplete ones, and those that do not count.

    The best one stays too, if a step is noted as such. Incomplete ones of the same attempt stay while they
    are newer than these: they are being written.
    Only the newest keeps its copy of the weight version: trainers restart from no other.
    Raises SupersededError if a newer attempt was claimed than ``attempt``, whose ranks call this.
    """
    attempts.check(root.parent, attempt)
    found = complete(root)
    best = best_step(root)
    kept = [path for step, path in found.items() if step == best or step in list(found)[-keep:]]
    newest = max(found, default=-1)
    for path in _all(root):
        step, own = step_and_attempt(path)
        if path in kept:
            if step < newest:
                remove_tree(path / WEIGHTS)
        elif own < attempt or (own == attempt and step < newest):
            remove_file(path / MARKER)  # first, so that no partial directory has a marker
            remove_tree(path)
