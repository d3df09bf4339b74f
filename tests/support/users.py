"""Interpreters and arguments to run a test's program as another user."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534


def run_as(user: int, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python with the sandbox's code and the tests' support as ``user``; return what it printed."""
    change: dict[str, Any] = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
    with _code_for(user) as code:
        return subprocess.run(
            [_interpreter_of(user), *arguments],
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, code))},
            capture_output=True,
            text=True,
            check=False,
            **change,
        )


@contextmanager
def _code_for(user: int) -> Iterator[list[Path]]:
    """Yield the folders of the code: the repository's, or copies where only root may read it."""
    own = [REPOSITORY / "worker_images", REPOSITORY / "tests"]
    if _may_read(user, REPOSITORY / "tests"):
        yield own
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copies = [Path(folder) / place.name for place in own]
        for place, copy, package in zip(own, copies, ("grpo_worker", "support"), strict=True):
            shutil.copytree(place / package, copy / package)
        yield copies


def _interpreter_of(user: int) -> str:
    """Return an interpreter that ``user`` may read: this one, or the system's where this is root's own."""
    places = {Path(sys.executable), Path(sys.executable).resolve()}
    return sys.executable if all(_may_read(user, place) for place in places) else "/usr/bin/python3"


def _may_read(user: int, place: Path) -> bool:
    """Return whether ``user`` may enter all folders of a path."""
    return user == os.geteuid() or all(folder.stat().st_mode & 0o005 == 0o005 for folder in place.parents)
