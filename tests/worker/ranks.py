"""Run a function of this folder on several ranks, each in its own process, over gloo.

``python ranks.py MODULE FUNCTION RESULT_FILE [JSON]`` is one rank; ``run`` starts them all.
"""

import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run(function: str, world: int, timeout: float = 240, **arguments: Any) -> list[Any]:
    """Run ``module.function(**arguments)`` on ``world`` ranks; return their results by rank."""
    module, name = function.split(":")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for rank in range(world):
            result = Path(directory) / str(rank)
            env = os.environ | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, module, name, str(result), json.dumps(arguments)]
            processes.append(subprocess.Popen(command, env=env))
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert codes == [0] * world, f"exit codes of the ranks: {codes}"
        return [pickle.loads((Path(directory) / str(r)).read_bytes()) for r in range(world)]


def main() -> None:
    module, name, result, arguments = sys.argv[1:]
    sys.path.insert(0, str(HERE))
    from grpo_worker.megatron import cpu_platform

    cpu_platform.install()
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(result).write_bytes(pickle.dumps(value))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
