"""``make bench-data-path``: the controller's part of a step's data path, at 8 192 samples of 16 k tokens.

Samples become a batch, the batch is dispatched to TP4 x PP16 x DP4 through Ray's object store,
log-probabilities of policy and reference are joined, advantages are computed, and each optimizer step is
dispatched, by the controller's own worker group. The ranks that answer (DP4) have a process each and compute
nothing; one process stands for the others, which only receive. Writes benchmarks/results/data_path.json.
"""

import argparse
import os
import pickle
import resource
import shutil
import tempfile
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from grpo_devcluster.results import record, record_cases
from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_worker.algorithms.batch_advantages import add_advantages
from grpo_worker.common.ragged_batch import INPUT_IDS, ROUTED_EXPERTS, RaggedBatch
from grpo_worker.common.step_log import StepLog
from grpo_worker.controller.training.worker_group import WorkerGroup
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import RoutedExperts
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.profiling.progress import Progress
from grpo_worker.rewards.answers import AnswerWorker
from grpo_worker.rewards.pool import WorkerPool
from grpo_worker.roles.dispatch import Columns, Dispatch, PieceColumns, RankInfo, register
from grpo_worker.roles.host import RankHost
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.train_batch import make_batch
from support.objects import job, spec_of

PROMPTS, SAMPLES = 512, 16
PROMPT_TOKENS, TOKENS = 1024, 16384
TP, PP, DP = 4, 16, 4
MINI = 128  # prompts of an optimizer step
LAYERS, TOPK = 61, 8  # DeepSeek-V3
LEDGER_STEPS = 2000
DECODED = 256  # samples
LOSS = (INPUT_IDS, ROUTED_EXPERTS, "weights", "advantages", "old_log_probs", "ref_log_prob")


class Holder:
    """A rank that can pass on what it got."""

    def pass_on(self, array: np.ndarray) -> np.ndarray:
        return array


class Idle(Holder):
    """A rank that answers at once."""

    def stand_at(self, place: RankInfo) -> None:
        self.rank_info = place

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS, ROUTED_EXPERTS))
    def log_probs(self, batch: RaggedBatch) -> Columns:
        answers = int(batch.response_starts[-1])
        return Columns({"log_probs": np.zeros(answers, np.float32)}, {"entropy": np.zeros(batch.rows)})

    @register(Dispatch.MEGATRON_COMPUTE, LOSS)
    def update_actor(self, batch: RaggedBatch) -> dict[str, float]:
        return {"rows": float(batch.rows)}


class Receiver(Holder):
    """Stand-in for many ranks whose answer is not collected."""

    def log_probs(self, columns: PieceColumns, args: Any, *arrays: np.ndarray) -> None: ...

    def update_actor(self, columns: PieceColumns, args: Any, *arrays: np.ndarray) -> None: ...


class Processes:
    """Ray actors behind the interface of a worker group; one stands for all ranks that only receive."""

    def __init__(self, ranks: list[RankInfo]) -> None:
        self.count = len(ranks)
        self.died: Future[None] = Future()
        self.leaving: Future[int] = Future()
        remote = ray.remote(num_cpus=0)
        others = remote(Receiver).remote()
        self._actors = [others for _ in ranks]
        self._answers = 0
        self._sizes: dict[Any, int] = {}
        self._fetched: set[tuple[int, Any]] = set()
        self.sent_bytes = 0  # each node fetches an object once
        for info in ranks:
            if info.collected:
                self._actors[info.rank] = remote(Idle).remote()
                ray.get(self._actors[info.rank].stand_at.remote(info))

    def put(self, value: Any) -> Any:
        reference = ray.put(value)
        self._sizes[reference] = value.nbytes
        return reference

    def pass_on(self, index: int, stored: Any) -> Any:
        return self.call(index, "pass_on", stored)

    def call(self, index: int, method: str, *args: Any) -> Any:
        node = index // 8
        if method == "node":
            return ray.put(RankHost(f"node-{node:04}", index))
        # What a rank passes on has no size here: it does not leave the controller's pod.
        for reference in self._sizes.keys() & {arg for arg in args if isinstance(arg, ray.ObjectRef)}:
            if (node, reference) not in self._fetched:
                self._fetched.add((node, reference))
                self.sent_bytes += self._sizes[reference]
        return getattr(self._actors[index], method).remote(*args)

    def ask(self, index: int, method: str, *args: Any) -> Any:
        self._answers += 1  # a machine with few cores may take long; no call here hangs
        return ray.put(Progress(self._answers))

    def beside(self, index: int, method: str, *args: Any) -> Any:
        raise NotImplementedError(method)  # nothing is copied to a store

    def wait(self, calls: Sequence[Any], count: int, seconds: float) -> tuple[list[Any], list[Any]]:
        done, pending = ray.wait(list(calls), num_returns=count, timeout=seconds)
        return list(done), list(pending)

    def error(self, call: Any) -> Exception | None:
        ray.get(call)  # no rank here is expected to fail
        return None

    def result(self, call: Any) -> Any:
        return ray.get(call)

    def dead(self) -> list[int]:
        return []

    def kill(self) -> None: ...


def group_of(processes: Processes, ranks: list[RankInfo]) -> WorkerGroup:
    group = WorkerGroup(Idle, processes, hang_seconds=240)
    group.ranks = ranks
    return group


def ranks_of() -> list[RankInfo]:
    places = [(t, p, d) for p in range(PP) for d in range(DP) for t in range(TP)]
    return [RankInfo(rank, t, p, 0, d, PP, DP) for rank, (t, p, d) in enumerate(places)]


def samples_of(prompts: int) -> tuple[list[Prompt], list[Sample]]:
    """Return prompts and answers of the full length, as the client holds them."""
    generator = np.random.default_rng(0)
    rows, tokens = [], TOKENS - PROMPT_TOKENS
    chosen = [Prompt(p, tuple(generator.integers(0, 129280, PROMPT_TOKENS).tolist())) for p in range(prompts)]
    for prompt in chosen:
        for number in range(SAMPLES):
            ids = array("i", generator.integers(0, 129280, tokens, dtype=np.int32).tobytes())
            log_probs = array("f", (-generator.random(tokens, dtype=np.float32)).tobytes())
            key = f"{prompt.index * SAMPLES + number:032x}"
            routed = RoutedExperts("http://10.0.0.1:9000", key, TOKENS - 1, LAYERS, TOPK, 7)
            rows.append(Sample(prompt.index, number, ids, log_probs, 0, "engine-0", routed=routed))
    return chosen, rows


class Peak:
    """Highest resident memory of this process while it is open, without what Ray's store shares with it."""

    def __enter__(self) -> "Peak":
        self.private = self.whole = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        process = psutil.Process(os.getpid())
        while not self._end.wait(0.1):
            memory = process.memory_info()
            self.whole = max(self.whole, memory.rss)
            self.private = max(self.private, memory.rss - memory.shared)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def step(group: WorkerGroup, prompts: list[Prompt], samples: list[Sample]) -> dict[str, float]:
    """Do the controller's part of a step; return seconds by phase and bytes."""
    seconds: dict[str, float] = {}
    last, cpu = time.monotonic(), time.process_time()

    def done(phase: str) -> None:
        nonlocal last
        now = time.monotonic()
        seconds[phase], last = now - last, now

    batch = make_batch(prompts, samples)
    done("build")
    shared = group.share(batch, MINI * SAMPLES)
    policy = group.call("log_probs", shared.all())
    shared.batch = shared.batch.with_columns(old_log_probs=policy.response["log_probs"])
    done("log_probs")
    reference = group.call("log_probs", shared.all())
    shared.batch = shared.batch.with_columns(ref_log_prob=reference.response["log_probs"])
    done("ref")
    algorithm = AlgorithmSpec(samples_per_prompt=SAMPLES)
    spec = spec_of(job()).model_copy(update={"algorithm": algorithm})
    scores = np.random.default_rng(1).random(batch.rows).tolist()
    shared.batch, _ = add_advantages(shared.batch, scores, spec, 0.0)
    shared.batch = shared.batch.with_rows(weights=np.ones(batch.rows, np.float32))
    done("advantages")
    for rows in shared.each_step():
        group.call("update_actor", rows)
    done("update")
    received = reference.response["log_probs"].nbytes + policy.response["log_probs"].nbytes
    read = shared.batch.nbytes - shared.batch.response["rollout_log_probs"].nbytes  # no rank reads these
    references = [sample.routed for sample in samples if sample.routed]
    sent = len(pickle.dumps(references)) + shared.batch.row[ROUTED_EXPERTS].nbytes
    return seconds | {
        "serial": sum(seconds.values()),
        "cpu": time.process_time() - cpu,
        "batch_bytes": float(shared.batch.nbytes),
        "read_bytes": float(read),
        "put_bytes": float(shared.put_bytes),
        "received_bytes": float(received),
        "routed_experts_bytes": float(sum(reference.nbytes for reference in references)),
        "routed_experts_reference_bytes": float(sent),
        "routed_experts_held_bytes": float(sum(_arrays(sample.routed) for sample in samples)),
    }


def _arrays(reference: RoutedExperts | None) -> int:
    """Return the bytes of the arrays in a reference to experts."""
    fields: list[Any] = [getattr(reference, name) for name in RoutedExperts.__slots__]
    return sum(value.nbytes for value in fields if isinstance(value, np.ndarray))


def decode_cpu(samples: list[Sample]) -> float:
    """Return this process's CPU seconds while workers decode the samples, from a part of them."""
    part = samples[:: max(len(samples) // DECODED, 1)]
    pool = WorkerPool(AnswerWorker(load_tokenizer("preset:tiny-moe").decoder), 2)
    small = [Sample(s.prompt_index, s.number, array("i", [i % 64 for i in s.ids]), (), 0, "") for s in part]
    pool.submit("decode", [1]).result()
    began = time.process_time()
    for call in [pool.submit("decode", sample.ids) for sample in small]:
        call.result()
    seconds = time.process_time() - began
    pool.close()
    return seconds * len(samples) / len(part)


def restart_seconds() -> float:
    """Return how long a restart takes to truncate the ledger of 2 000 steps of 8 192 samples."""
    folder = Path(tempfile.mkdtemp())
    try:
        log = StepLog(folder / "ledger.jsonl")
        line = {"attempt": 1, "uid": "123456.15", "version": 1999, "engine": "engine-0", "tokens": 16384}
        for number in range(1, LEDGER_STEPS + 1):
            log.append(number, [line] * (PROMPTS * SAMPLES // 16))  # 1/16 of the lines, to save the disk
        log.flush()
        started = time.monotonic()
        StepLog(folder / "ledger.jsonl").truncate(LEDGER_STEPS - 10)
        return time.monotonic() - started
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=int, default=1, help="use 1/SHARE of the prompts")
    parser.add_argument("--dry-run", action="store_true", help="print without recording")
    args = parser.parse_args()
    prompts, samples = samples_of(PROMPTS // args.share)
    before = psutil.Process(os.getpid()).memory_info().rss
    store = max(6 * 4 * len(samples) * TOKENS, 512 << 20)
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=store
    )
    processes = Processes(ranks_of())
    group = group_of(processes, ranks_of())
    step(group, *samples_of(MINI // 32))  # starts the processes' imports
    processes.sent_bytes = 0
    with Peak() as peak:
        case = step(group, prompts, samples)
    case["sent_bytes"] = float(processes.sent_bytes)
    ray.shutdown()
    case["decode_cpu"] = decode_cpu(samples)
    case["rss_bytes"] = float(peak.whole)
    case["private_bytes"] = float(peak.private)
    case["samples_bytes"] = float(before)
    case["max_rss_bytes"] = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    case["ledger_restart"] = restart_seconds()
    suffix = "" if args.share == 1 else f"_1_{args.share}"
    figures = {
        f"controller_seconds_per_step{suffix}": round(case["serial"], 2),
        f"controller_rss_gib{suffix}": round(case["rss_bytes"] / 2**30, 2),
        f"controller_egress_ratio{suffix}": round(case["sent_bytes"] / case["batch_bytes"], 3),
        f"r3_bytes_through_controller{suffix}": case["routed_experts_held_bytes"],
        f"decode_cpu_seconds{suffix}": round(case["decode_cpu"], 2),
        "ledger_restart_seconds": round(case["ledger_restart"], 4),
    }
    print(case)
    print(figures)
    if not args.dry_run:
        record("data_path", figures)
        record_cases("data_path", {f"{len(samples)}x{TOKENS}": case})


if __name__ == "__main__":
    main()
