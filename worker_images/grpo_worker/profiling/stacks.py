"""Python stacks of this process, by py-spy."""

import contextlib
import ctypes
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from grpo_operator.api.errors import last_error_line

_PY_SPY = Path(sysconfig.get_path("scripts")) / "py-spy"
_SET_PTRACER = 0x59616D61  # PR_SET_PTRACER of Linux's Yama
_ANY, _NOBODY = ctypes.c_ulong(-1), ctypes.c_ulong(0)
_REMEDY = (
    "a child may trace this process unless the container runtime's seccomp profile or "
    "kernel.yama.ptrace_scope above 1 forbids it: add the capability SYS_PTRACE through the podTemplate"
)


class StacksError(RuntimeError):
    """py-spy could not read this process; the message contains its last words."""


def write_stacks(folder: Path, name: str, seconds: int | None) -> str:
    """Write the stack of every thread of this process once, or samples over ``seconds``.

    Returns the file's name. Samples are in the format of speedscope. py-spy reads the memory of the process,
    also while that waits for a collective.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = ["--pid", str(os.getpid())]
    if seconds is None:
        file = folder / f"{name}.txt"
        file.write_bytes(_run("dump", *own))
    else:
        file = folder / f"{name}.speedscope.json"
        _run("record", *own, "--duration", str(seconds), "--format", "speedscope", "--output", str(file))
    return file.name


def _run(*arguments: str) -> bytes:
    with _traced_by_children():
        done = subprocess.run([_PY_SPY, *arguments], capture_output=True, check=False)
    if done.returncode:
        raise StacksError(f"py-spy: {last_error_line(done.stderr.decode(errors='replace'))} ({_REMEDY})")
    return done.stdout


@contextlib.contextmanager
def _traced_by_children() -> Iterator[None]:
    """Let other processes of this user trace this one; by default Yama lets only its ancestors do so."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_PTRACER, _ANY)  # fails, with no harm, where the kernel has no Yama
    try:
        yield
    finally:
        prctl(_SET_PTRACER, _NOBODY)
