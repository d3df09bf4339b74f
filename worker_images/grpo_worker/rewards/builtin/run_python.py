"""Run a program that nobody has read: in a process with limits, in a folder of its own."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

_OUTPUT_BYTES = 64 * 2**20


def run_python(program: str, stdin: str, seconds: float) -> str | None:
    """Give what the program printed; None when it failed, took longer or printed too much.

    The limit of memory is that of this process.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-code-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        (place / "program.py").write_text(program, "utf-8", "replace")
        (place / "stdin").write_text(stdin, "utf-8", "replace")
        with (place / "stdin").open() as given, (place / "stdout").open("wb+") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "program.py"],
                stdin=given,
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd=place,
                env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "PYTHONUTF8": "1"},
                preexec_fn=_limit,
                process_group=0,  # so that what it starts ends with it
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


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_OUTPUT_BYTES, _OUTPUT_BYTES))
