"""Run functions of this folder on several ranks, each in its own process, over gloo.

The processes of a world size are started once and serve all calls: importing torch and
Megatron-Core costs many times what a test computes. A call that fails ends them; the next one
starts new ones.
"""

import atexit
import importlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LARGEST_KEPT = 4  # ranks, of half a gigabyte each
HERE = Path(__file__).parent


class Gang:
    """The processes of one world size."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, self._folder.name],
                env=env | {"RANK": str(rank), "WORLD_SIZE": str(world)},
                stdin=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def call(self, module: str, name: str, timeout: float, arguments: dict[str, Any]) -> list[Any]:
        """Results by rank. Raises AssertionError when a rank ends or is silent for too long."""
        self._calls += 1
        line = json.dumps([self._calls, module, name, arguments]) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        files = [Path(self._folder.name) / f"{self._calls}-{rank}" for rank in range(self.world)]
        deadline = time.monotonic() + timeout
        while not all(file.exists() for file in files):
            codes = [process.poll() for process in self._processes]
            assert codes == [None] * self.world, f"exit codes of the ranks: {codes}"
            assert time.monotonic() < deadline, f"{name}: no answer in {timeout:.0f} s; {_machine()}"
            time.sleep(0.02)
        return [pickle.loads(file.read_bytes()) for file in files]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def _machine() -> str:
    """What a slow machine looks like; without it a silent rank is a riddle."""
    free = shutil.disk_usage(tempfile.gettempdir()).free >> 30
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "Available" in line)
    return f"load {os.getloadavg()}, {memory}, {free} GiB of disk free"


_gangs: dict[int, Gang] = {}


def run(function: str, world: int, timeout: float = 480, **arguments: Any) -> list[Any]:
    """Run ``module.function(**arguments)`` on ``world`` ranks; return their results by rank."""
    module, name = function.split(":")
    gang = _gangs.get(world) or _gangs.setdefault(world, Gang(world))
    served = False
    try:
        found = gang.call(module, name, timeout, arguments)
        served = world <= LARGEST_KEPT
    finally:
        if not served:
            _gangs.pop(world).end()
    return found


@atexit.register
def _end_all() -> None:
    while _gangs:
        _gangs.popitem()[1].end()


def _serve(folder: Path) -> None:
    sys.path.insert(0, str(HERE))
    from grpo_worker.megatron import cpu_platform

    cpu_platform.install()
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    rank = int(os.environ["RANK"])
    if gpu:
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.distributed.init_process_group("nccl" if gpu else "gloo")
    for line in sys.stdin:
        number, module, name, arguments = json.loads(line)
        value = getattr(importlib.import_module(module), name)(**arguments)
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
        partial = folder / f"{number}-{rank}.partial"
        partial.write_bytes(pickle.dumps(value))
        partial.rename(folder / f"{number}-{rank}")


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
