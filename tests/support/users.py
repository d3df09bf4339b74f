"""Interpreters and arguments to run a test's program as another user."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534


def run_as(user: int, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python with the sandbox's code and the tests' support as ``user``; return what it printed."""
    change: dict[str, Any] = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
    return subprocess.run(
        [interpreter_of(user), *arguments],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{REPOSITORY}/worker_images:{REPOSITORY}/tests"},
        capture_output=True,
        text=True,
        check=False,
        **change,
    )


def interpreter_of(user: int) -> str:
    """Return an interpreter that ``user`` may read: this one, or the system's where this is root's own."""
    places = {Path(sys.executable), Path(sys.executable).resolve()}
    folders = {parent for place in places for parent in place.parents}
    if user == os.geteuid() or all(folder.stat().st_mode & 0o005 == 0o005 for folder in folders):
        return sys.executable
    return "/usr/bin/python3"
