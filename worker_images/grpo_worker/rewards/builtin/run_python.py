"""Execution of an untrusted program in a process with limits and in a folder of its own."""

import contextlib
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from grpo_worker.rewards.builtin import tested_program

_OUTPUT_BYTES = 64 * 2**20
# The kernel counts all threads of the user, including the job's own, so the limit stops only fork bombs.
_PROCESSES = 16384


def run_python(program: str, tests: str, stdin: str, seconds: float) -> str | None:
    """Run the program, then the tests; return their output.

    Returns None when they failed, took more than ``seconds`` or printed too much. The memory limit of this
    process applies.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-code-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        (place / "program.py").write_text(program, "utf-8", "replace")
        (place / "stdin").write_text(stdin, "utf-8", "replace")
        with (
            (place / "stdin").open() as given,
            (place / "stdout").open("wb+") as output,
            _nameless(tests) as descriptor,
        ):
            command = [tested_program.__file__, str(descriptor)] if tests else ["program.py"]
            process = subprocess.Popen(
                [sys.executable, "-I", *command],
                stdin=given,
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd=place,
                env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "PYTHONUTF8": "1"},
                pass_fds=[descriptor] if tests else [],
                preexec_fn=partial(_limit, seconds),  # noqa: PLW1509 - runs in a process with one thread
                process_group=0,  # so that all processes that it starts are killed with it
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
            output.seek(0)
            return output.read().decode("utf-8", "replace") if code == 0 else None


@contextlib.contextmanager
def _nameless(text: str) -> Iterator[int]:
    """Write a file without a name, which only its descriptor can open."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "replace"))
        file.seek(0)
        yield file.fileno()


def _limit(seconds: float) -> None:
    _lower(resource.RLIMIT_FSIZE, _OUTPUT_BYTES)
    _lower(resource.RLIMIT_NPROC, _PROCESSES)
    # Bounds processes that leave the process group and so survive the program; threads may use all cores.
    _lower(resource.RLIMIT_CPU, math.ceil(seconds) * (os.cpu_count() or 1))


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))
