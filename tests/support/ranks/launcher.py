"""Run functions of this folder on several ranks, each in its own process, over gloo (or NCCL).

Importing torch and Megatron-Core costs many times what a test computes, so a template process does it
once and forks the ranks of each call. Every call has fresh processes: Megatron-Core's models, and
with them process groups and their polling threads, outlive their last use in a process.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
_BROKEN_HEAP = {-signal.SIGABRT, -signal.SIGSEGV}  # exit codes


class RanksEndedError(AssertionError):
    """A rank has ended by itself. ``codes``: exit codes by rank."""

    def __init__(self, text: str, codes: list[int]) -> None:
        super().__init__(text)
        self.codes = codes


class Template:
    """The process that forks ranks."""

    def __init__(self, python: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._process = subprocess.Popen(
            [python, __file__, self._folder.name],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_paths(python))},
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def call(
        self, module: str, name: str, world: int, timeout: float, arguments: dict[str, Any]
    ) -> list[Any]:
        """Return results by rank.

        Raises RanksEndedError when a rank ends, and AssertionError when it does not answer in time.
        """
        self._calls += 1
        folder = Path(self._folder.name) / str(self._calls)
        folder.mkdir()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), module, name, world, arguments]) + "\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + timeout
        while not (folder / "codes").exists():
            assert self._process.poll() is None, f"{name}: the template ended"
            assert time.monotonic() < deadline, f"{name}: no answer in {timeout:.0f} s; {_machine()}"
            time.sleep(0.02)
        codes = json.loads((folder / "codes").read_text())
        if codes != [0] * world:
            text = f"{name}: exit codes of the ranks: {codes}{_errors(folder, codes)}"
            raise RanksEndedError(text, codes)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world)]

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()


def _paths(python: str) -> list[str]:
    """Return where Python finds modules: another than this one has packages of its own."""
    if python == sys.executable:
        return sys.path
    return [path for path in sys.path if path.startswith(str(TESTS.parent)) and "-packages" not in path]


def _errors(folder: Path, codes: list[int]) -> str:
    """Return the end of what the ranks that failed first wrote; SIGKILL ended those that waited for them."""
    failed = [rank for rank, code in enumerate(codes) if code not in (0, -signal.SIGKILL)]
    return "".join(f"\n--- rank {rank}:\n{_last_lines(folder / f'{rank}.stderr')}" for rank in failed)


def _last_lines(file: Path) -> str:
    """Return the end of a file without faulthandler's list of all extension modules, which is very long."""
    lines = file.read_text(errors="replace").splitlines()
    return "\n".join(line[:500] for line in lines if not line.startswith("Extension modules"))[-6000:]


def _machine() -> str:
    """Describe the machine's load, which often explains an unresponsive rank."""
    free = shutil.disk_usage(tempfile.gettempdir()).free >> 30
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "Available" in line)
    return f"load {os.getloadavg()}, {memory}, {free} GiB of disk free"


_templates: dict[str, Template] = {}  # by their Python


def run(function: str, world: int, timeout: float = 480, **arguments: Any) -> list[Any]:
    """Run ``module.function(**arguments)`` on ``world`` ranks; return their results by rank."""
    return run_with(sys.executable, function, world, arguments, timeout)


def run_overlapped(function: str, world: int, **arguments: Any) -> list[Any]:
    """Run like ``run`` what has several collectives of gloo under way at the same time.

    With torch 2.14 that corrupts the heap in one of about a thousand optimizer steps, whatever they compute,
    so ranks that end for this reason run again, twice at most.
    """
    for _ in range(2):
        try:
            return run(function, world, **arguments)
        except RanksEndedError as error:
            if not _BROKEN_HEAP & set(error.codes):
                raise
            print(error)
    return run(function, world, **arguments)


def run_with(
    python: str, function: str, world: int, arguments: dict[str, Any], timeout: float = 480
) -> list[Any]:
    """Run like ``run``, with the packages of another Python."""
    module, name = function.split(":")
    if python not in _templates:
        _templates[python] = Template(python)
    answered = False
    try:
        results = _templates[python].call(module, name, world, timeout, arguments)
        answered = True
    finally:
        if not answered:
            _end()
    return results


@atexit.register
def _end() -> None:
    while _templates:
        _templates.popitem()[1].end()


def _serve() -> None:
    """Run the template's loop. Nothing here may start a thread: forks would lack it."""
    sys.path.insert(0, str(TESTS))
    from grpo_worker.megatron.cpu import platform as cpu_platform

    cpu_platform.install()
    for line in sys.stdin:
        folder, module, name, world, arguments = json.loads(line)
        function = getattr(importlib.import_module(f"support.ranks.{module}"), name)
        gc.freeze()  # collecting would copy the pages that the forks share
        pids = [_fork(Path(folder), rank, world, function, arguments) for rank in range(world)]
        codes = _codes(pids)
        partial = Path(folder) / "codes.partial"
        partial.write_text(json.dumps(codes))
        partial.rename(Path(folder) / "codes")


def _fork(folder: Path, rank: int, world: int, function: Any, arguments: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    stderr = os.open(folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, sys.stderr.fileno())
    faulthandler.enable()
    try:
        (folder / str(rank)).write_bytes(pickle.dumps(_on_rank(folder, rank, world, function, arguments)))
        code = 0
    except BaseException:  # noqa: BLE001 - a forked rank must not return into the template
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _on_rank(folder: Path, rank: int, world: int, function: Any, arguments: dict[str, Any]) -> Any:
    import torch

    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.distributed.init_process_group(
        "nccl" if gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    value = function(**arguments)
    torch.distributed.barrier()
    return value


def _codes(pids: list[int]) -> list[int]:
    """Return exit codes by rank; when one rank fails, kill the others, which may wait for it."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            for other in set(pids) - set(codes):
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    _serve()
