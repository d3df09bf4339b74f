"""Work that outlives the call that starts it, on a machine where each call ends after minutes.

Each transfer to that machine replaces the checkout, so the work runs in a copy of it, in a session of its
own. ``python -m grpo_devcluster.gpu_node.background FOLDER COMMAND...`` is what runs there: it writes the
exit code of COMMAND to FOLDER/ended.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_devcluster.processes import start_time
from grpo_devcluster.stages import StageError

_NOT_COPIED = shutil.ignore_patterns("build", "dist", ".git", ".venv", "__pycache__")
_PATHS = ("operator", "worker_images", "devcluster", "tests")


@dataclass(frozen=True, slots=True)
class Work:
    """Background work in a folder that nothing replaces: a copy of the checkout, and what the work writes."""

    folder: Path

    @property
    def source(self) -> Path:
        return self.folder / "src"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def log(self) -> Path:
        return self.results / "log.txt"

    def start(self, checkout: Path, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        """Copy the checkout, and start the command in the copy. Raises StageError while other work runs.

        The results of earlier work are removed. ``env``: variables beside this process's own.
        """
        if self.running():
            raise StageError(f"the work in {self.folder} still runs: follow it, or end it first.")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.results.mkdir(parents=True)
        shutil.copytree(checkout, self.source, symlinks=True, ignore=_NOT_COPIED)
        path = ":".join(str(self.source / name) for name in _PATHS)
        line = [sys.executable, "-m", __name__, self.folder, *command]
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in line],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.source,
                env={**os.environ, **env, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            )
        self._process.write_text(f"{process.pid} {start_time(process.pid)}")

    def running(self) -> bool:
        """Return whether the work was started and has not ended."""
        if not self._process.exists() or self.exit_code() is not None:
            return False
        pid, started = self._process.read_text().split(" ")
        return bool(started) and start_time(int(pid)) == started

    def started(self) -> bool:
        """Return whether there is work, running or ended."""
        return self._process.exists()

    def exit_code(self) -> int | None:
        """Return the exit code of the command, or None while it runs or if it was killed with its session."""
        ended = self.folder / "ended"
        return int(ended.read_text()) if ended.exists() else None

    @property
    def _process(self) -> Path:
        return self.folder / "process"


def main() -> None:
    """Run a command and keep its exit code."""
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    code = subprocess.run(command, check=False).returncode
    temporary = folder / "ended.writing"
    temporary.write_text(str(code))
    temporary.rename(folder / "ended")


if __name__ == "__main__":
    main()
