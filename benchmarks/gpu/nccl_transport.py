"""Transport between the GPUs of a host by NCCL's log, and the cost of reading that log.

    python3 benchmarks/gpu/nccl_transport.py FILE  # on a host with at least two GPUs

Each case starts a rank for each GPU. They form a group with the log and one without it; sockets are forced
by the variables with which NCCL is told to leave out everything else. Needs torch on PYTHONPATH beside
operator, worker_images and devcluster.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_devcluster.results import stamp, write_raw
from grpo_worker.profiling.nccl_log import NcclLog
from grpo_worker.profiling.nccl_transport import SOCKET, Transport

CASES: dict[str, dict[str, str]] = {
    "default": {},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
    "a log of the user": {"NCCL_DEBUG": "WARN"},
}


def group_seconds() -> float:
    """Form one more group of all ranks, and return how long it took."""
    dist.barrier()
    start = time.perf_counter()
    group: Any = dist.new_group()
    dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def rank() -> dict[str, Any]:
    """Return what one rank finds out, after checks of what holds in every case."""
    with NcclLog() as log:
        file = Path(os.environ.get("NCCL_DEBUG_FILE", "/nonexistent"))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        with_log = group_seconds()
        found, size = log.transport(), file.stat().st_size if file.exists() else 0
    without = group_seconds()
    assert not file.exists(), "the log ends with the start"
    return {"transport": found, "log_bytes": size, "seconds": {"with": with_log, "without": without}}


def check(case: str, found: Transport) -> None:
    """Check what must hold on any host."""
    if case == "sockets":
        assert found.network == SOCKET and found.gpu_direct is False and not found.local, found
    elif case == "default":
        assert found.network and found.local, found
    else:
        assert found == Transport(), found


def of_rank(case: str, folder: str) -> None:
    found = rank()
    check(case, found["transport"])
    if dist.get_rank() == 0:
        found |= {"local": sorted(found["transport"].local), "transport": str(found["transport"])}
        found |= {"gpus": dist.get_world_size(), "device": torch.cuda.get_device_name()}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(case: str, variables: dict[str, str]) -> dict[str, Any]:
    """Run a case in processes of its own, because NCCL reads most variables once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "gpu", __file__]
        subprocess.run([*command, "--rank", case, folder], env=os.environ | variables, check=True)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--rank", nargs=2, metavar=("CASE", "FOLDER"))
    args = parser.parse_args()
    if args.rank:
        of_rank(*args.rank)
        return
    found = {case: run(case, variables) for case, variables in CASES.items()}
    print(json.dumps(found, indent=1))
    first = found["default"]
    if args.result:
        write_raw(args.result, stamp(f"{first['gpus']} x {first['device']}"), cases=found)


if __name__ == "__main__":
    main()
