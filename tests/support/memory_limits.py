"""Processes with a memory limit of their own, as containers have; needs root. cgroup v1 and v2."""

import subprocess
import sys
import uuid
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


# A process that grows until the victim has ended.
_GROWS = """
import sys
kept = []
def lives():
    try:
        return open(f"/proc/{sys.argv[1]}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
while lives():
    kept.append(b"1" * (4 << 20))
"""


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

    def exhaust(self, victim: int) -> None:
        """Use all of the memory beside process ``victim``, which the kernel prefers to kill, until it has."""
        Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
        command = self.command(f"{sys.executable} -c '{_GROWS}' {victim}")
        subprocess.run(command, check=True, timeout=120)

    @property
    def kills(self) -> int:
        """Processes that the kernel killed because of the limit."""
        fields = dict(line.split() for line in self._events.read_text().splitlines())
        return int(fields["oom_kill"])

    def remove(self) -> None:
        """Remove the cgroup, whose processes have ended."""
        self._folder.rmdir()
