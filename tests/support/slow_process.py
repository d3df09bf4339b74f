"""A process that gets only a part of its time: another one stops and continues it in turn."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_PAUSES = """
import os, select, signal, sys, time
pid, stopped, going = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
seen = 0
print("begins", flush=True)
while not select.select([sys.stdin], [], [], going)[0]:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(stopped)
    seen += open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] == "T"
    os.kill(pid, signal.SIGCONT)
print(seen)
"""


@dataclass
class Pauses:
    """``seen``: how often the process was found stopped, known when the pauses have ended."""

    seen: int = 0


@contextlib.contextmanager
def slowed(pid: int, stopped: float = 0.04, going: float = 0.01) -> Iterator[Pauses]:
    """Stop process ``pid`` for ``stopped`` of each ``stopped`` + ``going`` seconds."""
    pauses = Pauses()
    command = [sys.executable, "-c", _PAUSES, str(pid), str(stopped), str(going)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin and other.stdout and other.stdout.readline() == "begins\n"
        try:
            yield pauses
        finally:
            pauses.seen = int(other.communicate("end\n", timeout=30)[0])
