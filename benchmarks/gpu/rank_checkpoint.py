"""Checkpoint of one rank of DeepSeek-V3's size, on one GPU.

    python benchmarks/gpu/rank_checkpoint.py rank_checkpoint.json FOLDER

The state of kernel_models.SLICE (2.4 B parameters: weights in bf16, fp32 weights and Adam's two moments) is
about that of a rank of DeepSeek-V3 on 256 GPUs. Measured: how long training stands still, GPU and host memory
beyond the state, the rate of the write beside a copy to pinned memory and a plain file, optimizer steps
beside the write, and that a reload has the bits of the time of the save. FOLDER on a fast file system
(/dev/shm) shows the writer's own rate.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster.
"""

import argparse
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import process_group
import psutil
import torch
from kernel_models import BF16, ENGINE, ONE, SLICE, free, policy, seconds
from trainer_speed import rows_of

from grpo_devcluster.results import stamp, write_raw
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.checkpointing.store import Origin, directory
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.optim.optimizer import inner_optimizers
from grpo_worker.megatron.training.policy import PolicyModel

GB = 1e9
PROBE = 2 * 10**9  # bytes of the plain copies


class HostPeak:
    """Largest memory of this process, in bytes, while the context is open."""

    def __enter__(self) -> "HostPeak":
        self._process = psutil.Process()
        self.before = self.peak = self._process.memory_info().rss
        self._open = True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()

    def _watch(self) -> None:
        while self._open:
            self.peak = max(self.peak, self._process.memory_info().rss)
            time.sleep(0.01)


def state(model: PolicyModel) -> Iterator[torch.Tensor]:
    """Return what a checkpoint keeps: the weights, and the fp32 weights and moments of the optimizer."""
    yield from (shard.tensor.detach() for shard in model.held_shards())
    for optimizer in inner_optimizers(model.trainable.optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from optimizer.state[parameter].values()


def digest(model: PolicyModel) -> list[int]:
    """Return a sum of each tensor's bits, weighted by their places."""
    with model.trainable.on_device():
        return [_weighted_bits(tensor) for tensor in state(model)]


def _weighted_bits(tensor: torch.Tensor) -> int:
    total = 0
    for part in torch.split(tensor.contiguous().view(-1).view(torch.int16), 2**26):
        places = torch.arange(1, 2 * len(part), 2, device=part.device)
        total += int((part.long() * places).sum())
    return total


def limits(folder: Path) -> dict[str, float]:
    """Return the rates, in GB/s, of a copy from the GPU to pinned memory and of a plain synchronized file."""
    values = torch.ones(PROBE, dtype=torch.uint8, device="cuda")
    host = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True)
    host.copy_(values)
    copied = seconds(lambda: host.copy_(values))

    def write() -> None:
        with (folder / "plain").open("wb") as file:
            host.numpy().tofile(file)
            file.flush()
            os.fdatasync(file.fileno())

    written = seconds(write)
    (folder / "plain").unlink()
    return {"pinned_copy": PROBE / copied / GB, "plain_file": PROBE / written / GB}


def save(checkpoints: Checkpointer, step: int, size: int, meanwhile: Callable[[], object]) -> dict[str, Any]:
    """Return the figures of a save. ``meanwhile``: an optimizer step, repeated while the state is written."""
    free()
    torch.cuda.reset_peak_memory_stats()
    held, steps = torch.cuda.memory_allocated(), []
    with HostPeak() as host:
        stall = seconds(lambda: checkpoints.save(step, {}))
        extra = torch.cuda.max_memory_allocated() - held
        begin = time.perf_counter()
        while not checkpoints.poll():
            steps.append(seconds(meanwhile))
        whole = stall + time.perf_counter() - begin
    return {
        "stall_seconds": stall, "whole_seconds": whole, "gb_per_second": size / whole / GB,
        "host_peak_ratio": (host.peak - host.before) / size, "gpu_extra_ratio": extra / size,
        "update_seconds": statistics.median(steps),
    }  # fmt: skip


def measured(folder: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    found: dict[str, Any] = {"limits_gb_per_second": limits(folder)}
    model = policy(SLICE, (ENGINE, BF16))
    rows = rows_of([1024] * 2, 1, SLICE["vocab_size"])

    def update() -> object:
        return model.update(rows, PolicyLossConfig(), 0.001, 1.0)

    update()
    found["update_seconds_alone"] = statistics.median(seconds(update) for _ in range(5))
    size = sum(tensor.nbytes for tensor in state(model))
    found["state_gb"] = size / GB
    checkpoints = Checkpointer(str(folder), model.parts(False), 1, Origin("model", str(ONE)))
    for step in (1, 2, 3):  # the first one pins host memory, the second one settles the plan
        before = digest(model)
        found[f"save {step}"] = save(checkpoints, step, size, update)
        print(found[f"save {step}"], flush=True)
        keep(found)
        if step < 3:
            shutil.rmtree(directory(folder, step))  # two together may not fit
    found["load_seconds"] = seconds(lambda: checkpoints.load(directory(folder, 3)))
    found["same_bits"] = digest(model) == before
    print(found)
    keep(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    process_group.alone()
    args.folder.mkdir(parents=True, exist_ok=True)
    machine = stamp(f"1 x {torch.cuda.get_device_name()}")
    measured(args.folder, lambda found: write_raw(args.result, machine, cases=found))


if __name__ == "__main__":
    main()
