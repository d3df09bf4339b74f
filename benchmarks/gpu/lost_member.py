"""A trainer rank whose engine dies in the transfer of a version, on two GPUs: the rank must live on.

    python3 benchmarks/gpu/lost_member.py [--watched]

The first process sends to the second, which is killed meanwhile. PyTorch would end the first process: its
watchdog a minute after the failure, its monitor eight minutes after it. Both limits are some seconds here.
``--watched``: with PyTorch's defaults instead of ours, which ends the process: so the test can fail.
PYTHONPATH: operator, worker_images.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

_LIMITS = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10"}
_AFTERWARDS = 40  # seconds to live on: four times the first limit, and then the second
_BYTES = 1 << 30
_TRANSFERS = 1000


def member(rank: int, port: int, watched: bool) -> None:
    """Join a link as a trainer rank (0), or as an engine rank that receives until it is killed."""
    import torch
    from torch import distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from grpo_operator.api.weight_path import Backend
    from grpo_worker.weightsync.transport import torch_group
    from grpo_worker.weightsync.transport.process_group import CollectiveGroup
    from grpo_worker.weightsync.transport.rendezvous import TransferError

    if watched:
        torch_group._SURVIVES_MEMBERS.clear()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    own = TCPStore("127.0.0.1", 0, 1, True)  # the training gang has groups of its own
    dist.init_process_group("nccl", store=own, rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device=device))
    store = TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    group = CollectiveGroup(Backend.NCCL, store, "link", rank, 2, 1, device)
    data = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    try:
        for number in range(_TRANSFERS):
            exchange = group.receive if rank else group.send
            exchange([(data, 1 - rank)], time.monotonic() + 30).wait()
            if rank and number == 20:
                print("the engine dies", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    except TransferError as error:
        print(f"the rank notices it: {error}", flush=True)
    group.close()
    time.sleep(_AFTERWARDS)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    print("the rank trains on", flush=True)
    os._exit(0)  # the groups need no regular end


def main() -> None:
    """Start both processes; exit with the first one's status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--watched", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int, default=31811)
    args = parser.parse_args()
    if args.rank is not None:
        member(args.rank, args.port, args.watched)
    command = [sys.executable, __file__, *(["--watched"] if args.watched else [])]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=os.environ | _LIMITS) for rank in range(2)]
    sys.exit(ranks[0].wait(300))


if __name__ == "__main__":
    main()
