"""``make bench-sync-cluster``: a plan executed over rated interfaces, beside its prediction and its bound.

Processes of trainers and of engines run in network namespaces, one for each host, whose interface is limited
in both directions. They execute the plans of a DeepSeek-V3 of a few small layers over gloo. The rate that the
prediction uses is the payload that one pair of processes moves in the same run. Needs root; adds to
benchmarks/results/sync.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_devcluster.results import record
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.stages import stage_layers
from grpo_operator.api.weight_path import Backend
from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.planner.bound import lower_bound
from grpo_worker.weightsync.planner.engine_plan import EnginePlan, plan_engine
from grpo_worker.weightsync.planner.layouts import (
    EngineShape,
    engine_side,
    kept_by_rank,
    tensors_of,
    trainer_side,
)
from grpo_worker.weightsync.planner.makespan import Interfaces, makespan
from grpo_worker.weightsync.planner.regions import Box, Held, Tensor, atoms
from grpo_worker.weightsync.sglang_plugin.recipe import TensorSpec
from grpo_worker.weightsync.sglang_plugin.recipe import record as record_recipe
from grpo_worker.weightsync.sglang_plugin.wave_loader import WaveLoader
from grpo_worker.weightsync.sglang_plugin.wave_receiver import WaveReceiver
from grpo_worker.weightsync.trainer.wave_packer import Shards
from grpo_worker.weightsync.trainer.wave_sender import WaveSender
from grpo_worker.weightsync.transport.factory import join
from rated_hosts import ADDRESS, INTERFACE, inside, rated_hosts

RATE_MBIT, BUCKET, VERSIONS, PATIENCE = 160, 6 << 20, 4, 300.0
HOSTS, PORT = 8, 29555
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Cluster:
    """Trainer ranks on the first hosts and engines on the others."""

    name: str
    layout: Layout
    trainers_per_host: int
    engines: int
    engine: EngineShape
    engine_ranks_per_host: int

    @property
    def trainers(self) -> int:
        return self.layout.world

    @property
    def world(self) -> int:
        return self.trainers + self.engines * self.engine.tensor

    def host_of_trainer(self, rank: int) -> int:
        return rank // self.trainers_per_host

    def host_of_engine(self, engine: int, rank: int) -> int:
        number = engine * self.engine.tensor + rank
        return self.trainers // self.trainers_per_host + number // self.engine_ranks_per_host

    def host(self, member: int) -> int:
        """Return the host of a process."""
        if member < self.trainers:
            return self.host_of_trainer(member)
        return self.host_of_engine(*divmod(member - self.trainers, self.engine.tensor))


def model() -> dict[str, Any]:
    """Return DeepSeek-V3's config.json with fewer and smaller layers."""
    return architecture("deepseek-v3") | {
        "num_hidden_layers": 4, "first_k_dense_replace": 1, "hidden_size": 1024, "intermediate_size": 2048,
        "moe_intermediate_size": 384, "n_routed_experts": 16, "num_attention_heads": 8, "vocab_size": 4096,
        "q_lora_rank": 512, "kv_lora_rank": 256, "num_nextn_predict_layers": 0,
    }  # fmt: skip


CLUSTERS = {
    each.name: each
    for each in (
        Cluster("16", Layout(8, 2, 2, 1, 4), 2, 2, EngineShape(4, 4), 2),
        Cluster("24", Layout(8, 1, 2, 1, 4), 2, 2, EngineShape(8, 4, 2), 4),
        Cluster("20", Layout(12, 2, 2, 1, 2), 3, 1, EngineShape(8, 8), 2),
    )
}


def plans(cluster: Cluster) -> tuple[dict[str, Tensor], list[Held], list[EnginePlan], float]:
    """Return tensors, regions of the trainers, the plan of each engine, and the bound in bytes."""
    hf = model()
    stages = {n: s for s, ls in enumerate(stage_layers(hf["num_hidden_layers"], cluster.layout)) for n in ls}
    tensors = tensors_of(hf)
    held = list(trainer_side(hf, cluster.layout, stages.__getitem__))
    kept = kept_by_rank(hf, cluster.engine)
    made: list[EnginePlan] = []
    for engine in range(cluster.engines):
        sent = made[-1].sent if made else None

        def host_of(rank: int, engine: int = engine) -> int:
            return cluster.host_of_engine(engine, rank)

        made.append(plan_engine(tensors, held, kept, host_of, BUCKET, cluster.engines, sent))
    needed = list(engine_side(hf, cluster.engine, cluster.engines))
    width = cluster.engine.tensor
    parts = atoms(tensors, held, needed, 1 << 20)

    def host(gpu: int) -> int:
        return cluster.host_of_engine(*divmod(gpu, width))

    return tensors, held, made, lower_bound(parts, host, cluster.host_of_trainer, host)


def member(cluster: Cluster, rank: int, address: str, output: Path) -> None:
    """Run one process: a trainer rank, or a rank of an engine."""
    torch.set_num_threads(1)
    store = TCPStore(address, PORT, None, False)
    tensors, held, made, _ = plans(cluster)
    width = cluster.engine.tensor
    groups = []
    for engine in range(cluster.engines):
        own = divmod(rank - cluster.trainers, width) if rank >= cluster.trainers else None
        if own is None or own[0] == engine:
            number = rank if own is None else cluster.trainers + own[1]
            members = cluster.trainers + width
            group = join(Backend.GLOO, store, f"engine-{engine}", number, members, cluster.trainers, _CPU)
            groups.append((engine, group))
    barrier = PrefixStore("barrier", store)
    times: list[tuple[float, float]] = []
    if rank < cluster.trainers:
        payload = _payload_rate(rank, cluster, groups[0][1], barrier)
        senders = [
            WaveSender(made[e].of_trainers(cluster.trainers)[rank], g, cluster.trainers, _CPU)
            for e, g in groups
        ]
        with ThreadPoolExecutor(len(senders)) as threads:
            for version in range(VERSIONS):
                shards = Shards(_parts(tensors, held, rank, version))
                _barrier(barrier, f"v{version}", cluster.world)
                began = time.monotonic()
                sent = [threads.submit(sender.send, shards, PATIENCE) for sender in senders]
                for each in sent:
                    each.result()
                times.append((began, time.monotonic()))
    else:
        payload = _payload_rate(rank, cluster, groups[0][1], barrier)
        engine, group = groups[0]
        receiver = _receiver(cluster, tensors, made[engine], (rank - cluster.trainers) % width, group)
        for version in range(VERSIONS):
            _barrier(barrier, f"v{version}", cluster.world)
            began = time.monotonic()
            receiver.receive(PATIENCE)
            times.append((began, time.monotonic()))
    output.write_text(json.dumps({"times": times, "payload": payload}))
    _barrier(barrier, "end", cluster.world)


def _payload_rate(rank: int, cluster: Cluster, group: Any, barrier: Any) -> float:
    """Return the bytes/s from the first trainer rank to the first engine's first rank; 0 elsewhere."""
    data = torch.zeros(RATE_MBIT << 16, dtype=torch.uint8)  # half a second
    rate = 0.0
    for attempt in range(3):
        _barrier(barrier, f"payload-{attempt}", cluster.world)
        began = time.monotonic()
        if rank == 0:
            group.send([(data, cluster.trainers)], began + PATIENCE).wait()
        elif rank == cluster.trainers:
            group.receive([(data, 0)], began + PATIENCE).wait()
            rate = len(data) / (time.monotonic() - began)
    return rate


def _barrier(store: Any, name: str, world: int) -> None:
    store.add(name, 1)
    while store.add(name, 0) < world:
        time.sleep(0.02)


def _parts(tensors: dict[str, Tensor], held: list[Held], rank: int, version: int) -> list[Part]:
    parts: list[Part] = []
    for number, part in enumerate(held):
        if rank not in part.ranks:
            continue
        tensor, box = tensors[part.tensor], part.box
        rows, columns = box.bottom - box.top, box.right - box.left
        dtype = getattr(torch, tensor.dtype)
        values = torch.full((rows, columns), (number * 31 + version) % 251, dtype=dtype)
        dim, offset = (0, box.top) if columns == tensor.columns else (1, box.left)
        parts.append((part.tensor, (tensor.rows, tensor.columns), dim, offset, values))
    return parts


class Regions(torch.nn.Module):
    """Model that keeps the regions of an engine rank."""

    def __init__(self, boxes: dict[str, list[Box]], tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._boxes = boxes
        for name, of_tensor in boxes.items():
            dtype = getattr(torch, tensors[name].dtype)
            for number, box in enumerate(of_tensor):
                empty = torch.empty(box.bottom - box.top, box.right - box.left, dtype=dtype)
                self.register_buffer(f"{name}-{number}".replace(".", "_"), empty)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            for number, box in enumerate(self._boxes.get(name, ())):
                part = tensor[box.top : box.bottom, box.left : box.right]
                self.get_buffer(f"{name}-{number}".replace(".", "_")).copy_(part)


def _receiver(
    cluster: Cluster, tensors: dict[str, Tensor], plan: EnginePlan, rank: int, group: Any
) -> WaveReceiver:
    regions = Regions(kept_by_rank(model(), cluster.engine)[rank], tensors)
    specs = [TensorSpec(n, (t.rows, t.columns), getattr(torch, t.dtype)) for n, t in tensors.items()]
    part = plan.of_engine(cluster.engine.tensor)[rank]
    loader = WaveLoader(regions, record_recipe(regions, specs), part)
    return WaveReceiver(part, rank, group, cluster.trainers, [loader], _CPU)


def _start(cluster: Cluster, rank: int, folder: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "member", cluster.name, str(rank), folder]
    env = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*inside(cluster.host(rank)), *command], env=env)


def measure(cluster: Cluster) -> dict[str, float]:
    """Run a cluster; return measured, predicted and least possible seconds of a version."""
    _, _, made, bound = plans(cluster)
    with rated_hosts(HOSTS, RATE_MBIT), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = TCPStore(ADDRESS, PORT, None, True, wait_for_workers=False)
        processes = [stack.enter_context(_start(cluster, rank, folder)) for rank in range(cluster.world)]
        codes = [process.wait() for process in processes]
        assert codes == [0] * cluster.world, codes
        reports = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(cluster.world)]
        del store
    seconds = [
        max(r["times"][v][1] for r in reports) - min(r["times"][v][0] for r in reports)
        for v in range(VERSIONS)
    ]
    rate = max(report["payload"] for report in reports)
    interfaces = Interfaces(cluster.host_of_trainer, cluster.host_of_engine)
    predicted = makespan([plan.waves for plan in made], interfaces, rate)
    measured = sorted(seconds[1:])[len(seconds[1:]) // 2]
    print(
        cluster.name,
        f"measured {seconds}, predicted {predicted:.2f}, bound {bound / rate:.2f}, {rate:.0f} B/s",
    )
    return {"measured": measured, "predicted": predicted, "bound": bound / rate, "first": seconds[0]}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "member":
        _, _, name, rank, folder = sys.argv
        member(CLUSTERS[name], int(rank), ADDRESS, Path(folder) / rank)
        return
    found = {name: measure(CLUSTERS[name]) for name in sys.argv[1:] or CLUSTERS}
    if set(found) != set(CLUSTERS):
        return
    figures = {
        "sim_error_pct_max": max(100 * abs(f["predicted"] / f["measured"] - 1) for f in found.values()),
        "netns_over_lp_max": max(f["measured"] / f["bound"] for f in found.values()),
        "netns_first_over_later": max(f["first"] / f["measured"] for f in found.values()),
    }
    print(record("sync", figures).read_text())


if __name__ == "__main__":
    main()
