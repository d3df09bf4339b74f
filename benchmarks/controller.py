"""``make bench-controller``: seconds of one dispatch of the controller to 256 ranks.

Dispatches a batch of 512 x 16 samples to TP8 x PP8 x DP4 and collects log-probabilities, through real Ray
actors that compute nothing. The 32 ranks that answer have a process each; SHARED processes stand for the
others, which only receive. Adds to benchmarks/results/trainer.json.
"""

import statistics
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray

from grpo_devcluster.results import record
from grpo_worker.common.clock import SYSTEM_CLOCK
from grpo_worker.common.ragged_batch import INPUT_IDS, RaggedBatch
from grpo_worker.controller.training.processes import RayProcesses
from grpo_worker.controller.training.worker_group import WorkerGroup
from grpo_worker.roles.dispatch import Columns, Dispatch, PieceColumns, RankInfo, register
from grpo_worker.roles.host import RankHost

PROMPTS, SAMPLES, TOKENS = 512, 16, 1024
TP, PP, DP = 8, 8, 4
GPUS = 8  # of a pod
SHARED = 4  # processes that stand for the ranks without an answer
ROUNDS = 5


class Holder:
    """A rank that can pass on what it got."""

    def pass_on(self, array: np.ndarray) -> np.ndarray:
        return array


class Idle(Holder):
    """A rank that answers at once."""

    def stand_at(self, place: RankInfo) -> None:
        self.rank_info = place

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS,))
    def log_probs(self, batch: RaggedBatch) -> Columns:
        zeros = np.zeros(int(batch.response_starts[-1]), np.float32)
        return Columns({"log_probs": zeros}, {"entropy": np.zeros(batch.rows)})


class Receiver(Holder):
    """Stand-in for many ranks whose answer is not collected."""

    def log_probs(self, columns: PieceColumns, args: Any, *arrays: np.ndarray) -> None: ...


class Actors(RayProcesses):
    """Actors that answer for the ranks; nobody watches whether they live."""

    def __init__(self, ranks: list[RankInfo]) -> None:
        remote = ray.remote(num_cpus=0)
        shared = [remote(Receiver).remote() for _ in range(SHARED)]
        self._actors = [shared[info.rank % SHARED] for info in ranks]
        self.count, self.died, self._dead = len(ranks), Future(), set()
        for info in ranks:
            if info.collected:
                self._actors[info.rank] = remote(Idle).remote()
                ray.get(self._actors[info.rank].stand_at.remote(info))

    def pass_on(self, index: int, stored: Any) -> Any:
        return self.call(index, "pass_on", stored)


class Simulated(WorkerGroup):
    """A worker group over actors that exist already."""

    def __init__(self, ranks: list[RankInfo]) -> None:
        self._cls, self._hang, self._flight_records, self._clock = Idle, 240.0, "", SYSTEM_CLOCK
        self.ranks, self._order = ranks, [info.rank for info in ranks]
        self.hosts = [RankHost(f"10.0.0.{info.rank // GPUS}", info.rank) for info in ranks]
        self._processes = Actors(ranks)


def ranks_of() -> list[RankInfo]:
    places = [(t, p, d) for p in range(PP) for d in range(DP) for t in range(TP)]
    return [RankInfo(rank, t, p, 0, d, PP, DP) for rank, (t, p, d) in enumerate(places)]


def batch_of() -> RaggedBatch:
    rows, generator = PROMPTS * SAMPLES, np.random.default_rng(0)
    lengths = generator.integers(TOKENS // 4, TOKENS + 1, rows, dtype=np.int32)
    ids = generator.integers(0, 129280, int(lengths.sum()), dtype=np.int32)
    return RaggedBatch(np.full(rows, TOKENS // 8, np.int32), lengths, TOKENS, ids)


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    group, batch = Simulated(ranks_of()), batch_of()
    seconds: list[float] = []
    for _ in range(ROUNDS + 1):  # the first one starts the processes' imports
        started = time.monotonic()
        collected: Any = group.call("log_probs", group.share(batch, len(batch.lengths)).all())
        seconds.append(time.monotonic() - started)
        assert len(collected.response["log_probs"]) == batch.response_starts[-1]
    ray.shutdown()
    print([round(value, 3) for value in seconds])
    print(record("trainer", {"dispatch_seconds_256_ranks": statistics.median(seconds[1:])}).read_text())


if __name__ == "__main__":
    main()
