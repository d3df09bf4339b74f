"""Layout of the checkpoint directory, readable without Megatron-Core.

A checkpoint is a directory ``step-00000010``. It is complete when it contains ``COMMITTED``,
which is written last; incomplete checkpoints are ignored on load and removed by ``prune``.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_worker.common.known_fields import known

log = logging.getLogger(__name__)
MARKER = "COMMITTED"
STATE = ".distcp"  # suffix of the files with tensors
SET_ASIDE = "DAMAGED"  # name of the marker of a damaged checkpoint, which is removed like incomplete ones
CONTROLLER_STATE = "controller.json"
WEIGHTS = "weights"  # folder with a copy of the checkpoint's weight version, which engines can be filled from
# Fields of a config.json that do not affect the function that a model computes.
NO_SHAPE = ("transformers_version", "torch_dtype", "dtype", "quantization_config")
FORMAT = 1  # of the marker and the checkpoint; increment it when older code could not load them


class DamagedCheckpointError(ValueError):
    """A checkpoint that was complete is not any more; an older one may be."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a checkpoint. ``model``: digest of the architecture; ``layout``: that of the saving job."""

    model: str
    layout: str


def model_digest(hf: Mapping[str, Any]) -> str:
    """Return a digest of everything that determines the shapes and the meaning of a model's weights."""
    own = {key: value for key, value in hf.items() if key not in NO_SHAPE}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]


def directory(root: str | Path, step: int) -> Path:
    """Return the directory of the checkpoint of ``step``."""
    return Path(root) / f"step-{step:08d}"


def complete_steps(root: str | Path) -> list[int]:
    """Return the steps with a complete checkpoint, ascending."""
    markers = Path(root).glob(f"step-*/{MARKER}")
    return sorted(int(marker.parent.name.removeprefix("step-")) for marker in markers)


def commit(root: str | Path, step: int, origin: Origin) -> None:
    """Mark a checkpoint as complete with a file that lists its files and is renamed into place.

    It has the digests of the small files. Each tensor in a file of ``STATE`` has a checksum beside it, which
    ranks check when they load it. ``WEIGHTS`` is not listed: training can be restored without it.
    """
    path = directory(root, step)
    files = [file for file in sorted(path.iterdir()) if file.is_file()]
    marker = {
        "format": FORMAT,
        "step": step,
        "origin": asdict(origin),
        "files": {file.name: file.stat().st_size for file in files},
        "digests": {file.name: _digest(file) for file in files if file.suffix != STATE},
    }
    temporary = path / f".{MARKER}"
    with temporary.open("w") as handle:
        json.dump(marker, handle)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.rename(path / MARKER)


def newest_sound(root: str | Path, model: str) -> int:
    """Return the step of the newest complete checkpoint that can be loaded; 0: there is none.

    A damaged one loses its marker, so that the one before is used. Raises ValueError like ``verify`` for
    checkpoints that are whole, but of another model or of a newer version.
    """
    for step in reversed(complete_steps(root)):
        path = directory(root, step)
        try:
            verify(path, model, contents=True)
        except DamagedCheckpointError as error:
            set_aside(path, error)
        else:
            return step
    return 0


def set_aside(path: Path, error: DamagedCheckpointError) -> None:
    """Take the marker from a damaged checkpoint, so that the one before is used."""
    log.error("%s; it is set aside", error)
    (path / MARKER).rename(path / SET_ASIDE)


def verify(path: Path, model: str, contents: bool = False) -> Origin:
    """Check a complete checkpoint and return its origin. ``contents``: read the small files too.

    Raises DamagedCheckpointError when it is truncated or changed, and ValueError, with the remedy, when it is
    incomplete, of another model, or written by a newer version.
    """
    remedy = f"remove {path / MARKER} to fall back to an older checkpoint"
    try:
        marker = json.loads((path / MARKER).read_text())
        version, files, origin = marker["format"], marker["files"], Origin(**known(Origin, marker["origin"]))
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
    for name, size in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            raise DamagedCheckpointError(
                f"checkpoint {path}: {name} is missing or not {size} bytes long; {remedy}"
            )
    for name, digest in marker.get("digests", {}).items() if contents else ():
        if _digest(path / name) != digest:
            raise DamagedCheckpointError(f"checkpoint {path}: {name} was changed after the save; {remedy}")
    return origin


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def prune(root: str | Path, keep: int) -> None:
    """Remove all but the newest ``keep`` complete checkpoints, and incomplete ones older than these.

    Only the newest keeps its copy of the weight version: trainers restart from no other.
    """
    kept = set(complete_steps(root)[-keep:])
    newest = max(kept, default=-1)
    for path in sorted(Path(root).glob("step-*")):
        step = int(path.name.removeprefix("step-"))
        if step not in kept and step < newest:
            (path / MARKER).unlink(missing_ok=True)  # first, so that no partial directory has a marker
            shutil.rmtree(path, ignore_errors=True)
        elif step < newest:
            shutil.rmtree(path / WEIGHTS, ignore_errors=True)
