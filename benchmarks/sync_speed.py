"""``make bench-sync``: one weight version into a real engine, ours beside a broadcast per tensor.

A mixture of experts of more than 2 000 tensors lies in an agent's memory. An SGLang engine on this machine
receives it (a) directly from our agent, (b) in SGLang's flattened buckets, (c) tensor by tensor as in the
distributed updates of RL frameworks: a broadcast for each tensor and one request for each bucket of names.
The limit is a bare gloo broadcast of the same bytes between two processes.
Adds to benchmarks/results/sync.json, and draws the parts of the pause.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS, record
from grpo_operator.api.catalog.architectures import architecture
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.weightsync.agent.blobs import LocalBlobs
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.installer import Installer
from grpo_worker.weightsync.agent.local_group import LocalGroup
from grpo_worker.weightsync.agent.staged_version import StagedVersion, VersionStream
from grpo_worker.weightsync.protocol.tiling import TensorPlan, make_plan
from grpo_worker.weightsync.protocol.transfer_plan import make_transfer_plan, nbytes
from grpo_worker.weightsync.trainer.publisher import publish

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

from engine_process import EngineProcess

MODEL = architecture("tiny-moe") | {
    "num_hidden_layers": 13,
    "first_k_dense_replace": 1,
    "hidden_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 64,
    "n_group": 1,
    "topk_group": 1,
}
BUCKET, ROUNDS = 64 << 20, 3


def scheduler(engine: EngineProcess) -> psutil.Process:
    """Return the process that holds the weights."""
    children = psutil.Process(engine.process.pid).children(recursive=True)
    return max(children, key=lambda p: p.memory_info().rss)


def host_copy(folder: Path, version: int) -> StagedVersion:
    """Return a version with random weights in an agent's memory."""
    generator = torch.Generator().manual_seed(version)
    shapes = family_of(MODEL).shapes(MODEL)
    parts = [
        (name, shape, 0, 0, torch.randn(shape, generator=generator) * 0.02) for name, shape in shapes.items()
    ]
    manifest = publish(folder, version, 0, 1, parts)
    blob = np.fromfile(folder / f"v{version}" / "rank-0.bin", dtype=np.uint8)
    plan = make_transfer_plan(make_plan([manifest]), BUCKET)
    return StagedVersion(version, plan, [manifest.digest], LocalBlobs({0: blob}))


class Flattened(Engine):
    """The engine as one that cannot load directly."""

    def join_group(self, *place: Any, **more: Any) -> str:
        super().join_group(*place, **more)
        return ""


def ours(engine: Engine) -> Callable[[StagedVersion], dict[str, float]]:
    """Return a function that updates the engine through our agent and returns the seconds of its parts."""
    installer = Installer("engine-0", engine, 1, 600)

    def update(copy: StagedVersion) -> dict[str, float]:
        with installer.updating(copy.version), installer.streaming(copy) as version:
            installer.install(version, record=False)
        return dict(installer.seconds)

    return update


def per_tensor(engine: Engine) -> Callable[[StagedVersion], dict[str, float]]:
    """Return the baseline: a broadcast for each tensor, a request for each bucket of names."""
    group = LocalGroup(engine, "per-tensor", 1, 600)

    def send(tensors: Sequence[TensorPlan], flat: torch.Tensor) -> None:
        start = 0
        for tensor in tensors:
            size = nbytes(tensor)
            view = flat[start : start + size].view(torch.float32)
            dist.broadcast(view, src=0, group=group._group)
            start += size

    def update(copy: StagedVersion) -> dict[str, float]:
        flats = buckets_of(copy)
        started = time.monotonic()
        engine.pause()
        engine.begin_update()
        for index, (bucket, flat) in enumerate(zip(copy.plan.buckets, flats, strict=True)):
            thread = threading.Thread(target=send, args=(bucket, flat), daemon=True)
            thread.start()
            last = index == len(flats) - 1
            body = engine._tensors("per-tensor", bucket) | {"flush_cache": last}
            if last:
                body["weight_version"] = str(copy.version)
            engine._call("POST", "/update_weights_from_distributed", **body)
            thread.join()
        engine.end_update()  # without a checksum, like the updates of those frameworks
        engine.resume()
        return {"pause": time.monotonic() - started}

    return update


def buckets_of(copy: StagedVersion) -> list[torch.Tensor]:
    """Return the bytes of each bucket, uint8 [bytes]."""
    found: list[list[bytes]] = [[] for _ in copy.plan.buckets]
    with VersionStream(copy, 600) as stream:
        for ready in stream:
            found[ready.chunk.bucket].append(bytes(ready.data))
    return [torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8) for parts in found]


RAW = """
import sys, time, torch, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, False)
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
flat = torch.zeros(int(sys.argv[2]), dtype=torch.uint8)
for _ in range(int(sys.argv[3])):
    dist.barrier()
    for start in range(0, len(flat), int(sys.argv[4])):
        dist.broadcast(flat[start : start + int(sys.argv[4])], src=0)
    dist.barrier()
"""


def raw(copy: StagedVersion) -> float:
    """Return the seconds of a bare broadcast of the same bytes, in buckets, into memory already mapped."""
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    arguments = [str(value) for value in (store.port, copy.plan.nbytes, ROUNDS + 1, BUCKET)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    peer = subprocess.Popen([sys.executable, "-c", RAW, *arguments], env=environment)
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    flat, taken = torch.zeros(copy.plan.nbytes, dtype=torch.uint8), []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        started = time.monotonic()
        for start in range(0, len(flat), BUCKET):
            dist.broadcast(flat[start : start + BUCKET], src=0)
        dist.barrier()
        taken.append(time.monotonic() - started)
    peer.wait()
    dist.destroy_process_group()
    return statistics.median(taken[1:])


def extra_memory(process: psutil.Process, update: Callable[[], Any]) -> float:
    """Return the largest rise of the engine's memory during an update, in buckets."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # resets the peak
    before = process.memory_info().rss
    update()
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) << 10
    return (peak - before) / BUCKET


def measure(folder: Path) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the figures, and each way's seconds by part (medians over ROUNDS updates after the first)."""
    server = EngineProcess(folder, MODEL, 30000)
    try:
        server.await_alive(time.monotonic() + 300)
        engine = server.control(600)
        copies = [host_copy(folder, version) for version in (1, 2)]
        found: dict[str, dict[str, float]] = {}
        sums = set()
        ways = {
            "ours": ours(engine), "flattened": ours(Flattened(engine.url, 600, server.key)),
            "per tensor": per_tensor(engine),
        }  # fmt: skip
        for name, update in ways.items():
            first = update(copies[0])
            rounds = [update(copies[(number + 1) % 2]) for number in range(ROUNDS)]
            found[name] = {part: statistics.median(r[part] for r in rounds) for part in rounds[0]}
            found[name]["first"] = first["pause"]
            sums.add(engine.checksum())
        assert len(sums) == 1, "the three ways end with different weights"
        extra = extra_memory(scheduler(server), lambda: ways["ours"](copies[0]))
        limit = raw(copies[0])
    finally:
        server.stop()
    size = copies[0].plan.nbytes
    figures = {
        "cpu_tensors": float(len(copies[0].plan.tensors)),
        "cpu_gigabytes": size / 1e9,
        "cpu_pause_seconds": found["ours"]["pause"],
        "cpu_raw_copy_seconds": limit,
        "cpu_bytes_ratio_vs_raw": limit / found["ours"]["send"],
        "cpu_speedup_vs_per_tensor": found["per tensor"]["pause"] / found["ours"]["pause"],
        "cpu_speedup_vs_flattened": found["flattened"]["send"] / found["ours"]["send"],
        "cpu_first_load_seconds": found["ours"]["first"],
        "cpu_extra_memory_buckets": extra,
    }
    return figures, found


def draw(found: dict[str, dict[str, float]], raw_seconds: float) -> None:
    """Draw the parts of the pause."""
    figure, axes = plt.subplots(figsize=(8, 2.6))
    for row, parts in enumerate(found.values()):
        left = 0.0
        for part in ("send", "verify"):
            if part in parts:
                axes.barh(row, parts[part], left=left, label=part if row == 0 else None,
                          color={"send": "tab:blue", "verify": "tab:orange"}[part])  # fmt: skip
                left += parts[part]
        axes.barh(row, parts["pause"] - left, left=left, color="tab:gray",
                  label="other calls" if row == 0 else None)  # fmt: skip
    axes.axvline(raw_seconds, color="black", linestyle="--", label="bare broadcast")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("seconds in which the engine is paused")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(RESULTS / "sync.png", dpi=120)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        figures, found = measure(Path(name))
    draw(found, figures["cpu_raw_copy_seconds"])
    print(json.dumps(figures | {"parts": found}, indent=1))
    record("sync", {key: round(value, 3) for key, value in figures.items()})


if __name__ == "__main__":
    main()
