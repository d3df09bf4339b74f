"""Processes with a memory limit of their own, as containers have; needs root. cgroup v1 and v2."""

import uuid
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class MemoryLimit:
    """A cgroup with a limit of ``mebibytes``. Use ``command`` to start a process in it."""

    def __init__(self, mebibytes: int) -> None:
        second = (_ROOT / "cgroup.controllers").exists()
        name = f"grpo-test-{uuid.uuid4().hex[:8]}"
        self._folder = _ROOT / name if second else _ROOT / "memory" / name
        self._events = self._folder / ("memory.events" if second else "memory.oom_control")
        self._folder.mkdir()
        limit = "memory.max" if second else "memory.limit_in_bytes"
        (self._folder / limit).write_text(str(mebibytes << 20))
        if second:
            (self._folder / "memory.swap.max").write_text("0")

    def command(self, command: str) -> list[str]:
        """Return the command line that runs ``command`` within the limit, under the same process id."""
        return ["bash", "-c", f"echo $$ > {self._folder}/cgroup.procs && exec {command}"]

    @property
    def kills(self) -> int:
        """Processes that the kernel killed because of the limit."""
        fields = dict(line.split() for line in self._events.read_text().splitlines())
        return int(fields["oom_kill"])

    def remove(self) -> None:
        """Remove the cgroup, whose processes have ended."""
        self._folder.rmdir()
