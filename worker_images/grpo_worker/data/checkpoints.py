"""Layout of the checkpoint directory, readable without Megatron-Core.

A checkpoint is a directory ``step-00000010``. It is complete when ``COMMITTED`` is there,
written last; anything else is ignored on load and removed by the next ``prune``.
"""

import json
import os
import shutil
from pathlib import Path

MARKER = "COMMITTED"
CONTROLLER_STATE = "controller.json"


def directory(root: str | Path, step: int) -> Path:
    """Directory of the checkpoint taken after ``step``."""
    return Path(root) / f"step-{step:08d}"


def complete_steps(root: str | Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    markers = Path(root).glob(f"step-*/{MARKER}")
    return sorted(int(marker.parent.name.removeprefix("step-")) for marker in markers)


def commit(root: str | Path, step: int) -> None:
    """Declare a checkpoint complete: the marker lists its files and is renamed into place."""
    path = directory(root, step)
    files = {f.name: f.stat().st_size for f in sorted(path.iterdir())}
    temporary = path / f".{MARKER}"
    with temporary.open("w") as handle:
        json.dump({"step": step, "files": files}, handle)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.rename(path / MARKER)


def verify(root: str | Path, step: int) -> None:
    """Raises ValueError when a file is missing or has another size than the marker says."""
    path = directory(root, step)
    expected: dict[str, int] = json.loads((path / MARKER).read_text())["files"]
    for name, size in expected.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            raise ValueError(
                f"checkpoint {path}: {name} is missing or not {size} bytes long; "
                f"remove {path / MARKER} to fall back to an older checkpoint"
            )


def prune(root: str | Path, keep: int) -> None:
    """Remove all but the newest ``keep`` complete checkpoints, and older incomplete ones."""
    kept = set(complete_steps(root)[-keep:])
    newest = max(kept, default=-1)
    for path in sorted(Path(root).glob("step-*")):
        step = int(path.name.removeprefix("step-"))
        if step not in kept and step < newest:
            (path / MARKER).unlink(missing_ok=True)  # never leave a marker on half a directory
            shutil.rmtree(path, ignore_errors=True)
