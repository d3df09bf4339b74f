"""The training loop with everything around it replaced: ranks, engines and time are stand-ins.

The state of the ranks is the number of their updates. Engines serve or are away; while a fault of the script
lasts, time passes only by waiting.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np

from grpo_operator.api.weight_path import WeightPath
from grpo_worker.checkpointing.fork import Fork
from grpo_worker.checkpointing.store import (
    CONTROLLER_STATE,
    DamagedCheckpointError,
    Origin,
    commit,
    directory,
    model_digest,
)
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.inputs import Inputs
from grpo_worker.controller.live_fields import LiveFields
from grpo_worker.controller.loop_wiring import loop_of
from grpo_worker.controller.model_files import open_model
from grpo_worker.controller.recovery.departure import Departure
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.controller.validation.sets import ValidationSet
from grpo_worker.controller.weight_sync.colocated import ColocatedSynchronizer
from grpo_worker.controller.weight_sync.dedicated import DedicatedSynchronizer
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.data.routed_experts import RoutedExperts
from grpo_worker.data.tasks import open_gym
from grpo_worker.metrics.flops import ModelFlops
from grpo_worker.metrics.generation import Counts
from grpo_worker.profiling.nccl_transport import Transport
from grpo_worker.profiling.own_time import OwnTime
from grpo_worker.profiling.trace import Traced
from grpo_worker.roles.dispatch import Columns, RankInfo
from grpo_worker.roles.host import RankHost
from grpo_worker.roles.shared_batch import SharedBatch, SharedRows
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.engine_pool import RolloutPool, SyncError, Target
from grpo_worker.rollout.routing import EngineTable
from grpo_worker.rollout.sampling import Sample
from support.batch_stores import plain_store
from support.clocks import FakeClock
from support.objects import job, spec_of
from support.rollout_fakes import Scorer


class Ranks:
    """Gang of two ranks. ``starts``: gangs started so far, over all attempts."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.died: Future[None] = Future()
        self.leaving: Future[RankHost] = Future()
        self.addresses = ["10.0.0.1", "10.0.0.2"]
        self.pids = [100 + world.starts, 200 + world.starts]
        self.hosts = [RankHost(*pair) for pair in zip(self.addresses, self.pids, strict=True)]
        self.ranks = [RankInfo(rank, 0, 0, 0, rank, 1, 2) for rank in range(2)]
        self.killed = False

    def start(self, config: dict[str, Any]) -> None:
        self._world.starts += 1
        self._world.updates = 0
        self._attempt = config["attempt"]

    def call(self, method: str, *args: Any) -> Any:
        self._world.calls.append(method)
        if self.died.done():
            raise self.death()
        return getattr(self, f"_{method}", lambda *_: [None, None])(*args)

    def begin(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        return lambda: [f"{self._world.updates}-0", f"{self._world.updates}-1"]

    def beside(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        self._world.calls.append(method)
        return lambda: getattr(self, f"_{method}")(*args)

    def beside_on(self, ranks: Sequence[int], method: str, *args: Any) -> Callable[[], list[Any]]:
        return self.beside(method, *args)

    def notify(self, method: str, *args: Any) -> None: ...

    def kill(self) -> None:
        self.killed = True

    def death(self) -> GangError:
        return GangError("the processes of rank 1 on trainer-0 (10.0.0.2) have ended", [1])

    def _decay_over(self, updates: int) -> list[None]:
        self._world.decays.append((self._world.updates, updates))
        return [None, None]

    def _stop_trace(self) -> list[Traced]:
        return [Traced(f"trainer-rank-{rank}.json") for rank in range(2)]

    def _transport(self) -> list[Transport]:
        return [self._world.transport] * 2

    def _checkpoint_bytes(self) -> int:
        return self._world.checkpoint_bytes

    def _own_time(self) -> list[OwnTime]:
        return self._world.own_times

    def _flops(self) -> ModelFlops:
        return ModelFlops(1000, 10)

    def share(self, batch: RaggedBatch, per_step: int) -> SharedBatch:
        self._batch = batch
        return SharedBatch(batch, per_step, self.ranks, plain_store(self.addresses))

    def _log_probs(self, _rows: SharedRows) -> Columns:
        lengths = self._batch.response_lengths
        zeros = np.full(int(lengths.sum()), -0.1, np.float32)
        return Columns({"log_probs": zeros}, {"entropy": lengths.astype(np.float32)})

    def _reference_log_probs(self, rows: SharedRows) -> Columns:
        return self._log_probs(rows)

    def _update_actor(self, _rows: SharedRows, kl: float, check: bool) -> dict[str, float]:
        self._world.checks.append(check)
        self._world.before_update(self._world.updates)
        self._world.clock.time += 1.0
        self._world.updates += 1
        return {"actor/loss": float(cast(np.ndarray, self._batch.input_ids).sum())}

    def _poll_checkpoint(self, blocking: bool) -> list[list[int]]:
        done, self._world.writing = self._world.writing, []
        return [done, done]

    def _save_checkpoint(self, step: int, state: dict[str, Any], from_host: bool) -> None:
        assert from_host or not self._world.engines_hold, "engines hold the GPUs"
        if self._world.checkpoint_error is not None:
            raise self._world.checkpoint_error
        self._world.saved_from_host.append(from_host)
        path = directory(self._world.store / "checkpoints", step, self._attempt)
        path.mkdir(parents=True, exist_ok=True)
        (path / CONTROLLER_STATE).write_text(json.dumps(state))
        (path / "updates").write_text(str(self._world.updates))
        commit(self._world.store / "checkpoints", step, Origin(self._world.model, "", self._attempt))
        self._world.writing.append(step)

    def _load_routed_experts(
        self, parts: list[list[RoutedExperts]], width: int, fetching: frozenset[int]
    ) -> list[list[str]]:
        return [[reference.key for reference in part if self._world.lost(reference)] for part in parts]

    def _store_routed_experts(
        self, references: list[RoutedExperts], folder: str
    ) -> list[dict[str, tuple[str, int]]]:
        places: list[dict[str, tuple[str, int]]] = []
        for rank in range(2):
            file = Path(folder) / f"rank-{rank}.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("w") as target:
                target.write(str(len(references)))
            places.append({reference.key: (str(file), 0) for reference in references[rank::2]})
        return places

    def _export_weights(self, path: str, beside: bool, attempt: int) -> list[None]:
        self._world.exports.append((Path(path).name, self._world.updates))
        return [None, None]

    def _poll_export(self, blocking: bool) -> list[bool]:
        return [blocking or self._world.exported()] * 2

    def _empty_cache(self) -> list[tuple[int, int]]:
        return [(0, 0), (0, 0)]

    def _load_checkpoint(self, path: str) -> None:
        if Path(path).name in self._world.damaged:
            raise GangError("load_checkpoint: a bit is wrong", []) from DamagedCheckpointError(
                "a bit is wrong"
            )
        self._world.updates = int((Path(path) / "updates").read_text())

    def _take_snapshot(self, name: str, _kept: str | None) -> None:
        self._world.snapshots[name] = self._world.updates

    def _snapshot_written(self, name: str) -> list[bool]:
        return [name in self._world.snapshots] * 2

    def _load_snapshot(self, name: str) -> None:
        self._world.updates = self._world.snapshots[name]


class Engines(Scorer):
    """Rollout pool, client and reward. ``away``: why no engine serves, or "", asked at each use."""

    fp8 = False

    def __init__(self, world: "World") -> None:
        self._world = world
        self.attempt = 0
        self.table = EngineTable()
        self.failures = 0
        self.counts, self.in_flight, self.queued = Counts(), 0, 0
        self.generated: list[tuple[int, int]] = []  # (prompt, version), also of answers that were not used

    def hold(self) -> None: ...

    def turn(self, parts: Sequence[str], timeout: float) -> None:
        """Hold parts of the GPUs' memory; engines that are away keep what they held."""
        if reason := self._world.away() or (not parts and self._world.keeps_gpus()):
            raise SyncError(f"engines did not change their GPU memory in {timeout:.0f} s: {reason}")
        self._world.engines_hold = tuple(parts)

    def serves(self, version: int) -> bool:
        return not self._world.away()

    def shortage(self, version: int) -> str:
        return self._world.away()

    def serve(self, target: Target, timeout: float) -> dict[str, float]:
        if self._world.away():
            raise SyncError(self._world.away())
        return {}

    def model_configs(self, version: int) -> dict[str, dict[str, Any]]:
        return {}

    def generate(
        self, prompts: list[Prompt], version: int, cancelled: threading.Event | None = None
    ) -> list[Sample]:
        return [sample for prompt in prompts for sample in self._group(prompt, version)]

    def submit(self, prompt: Prompt, version: int, arrived: Any = None) -> "Future[list[Sample]]":
        group: Future[list[Sample]] = Future()
        try:
            group.set_result(self._group(prompt, version))
        except TimeoutError as error:
            group.set_exception(error)
        return group

    def sampler(
        self, params: dict[str, Any], *, n: int, seed: int, share: float = 1.0
    ) -> "ValidationEngines":
        return ValidationEngines(self._world, self, n)

    def _group(self, prompt: Prompt, version: int) -> list[Sample]:
        self._world.before_generation(version)
        if self._world.away():
            raise TimeoutError(f"no engine serves version {version} after 480 s")
        self._world.clock.time += 1.0
        self.generated.append((prompt.index, version))
        return [
            self._sample(prompt, n, version) for n in range(self._world.spec.algorithm.samples_per_prompt)
        ]

    def _sample(self, prompt: Prompt, number: int, version: int) -> Sample:
        ids = tuple(5 + (prompt.index * 7 + number * 3 + version + k) % 50 for k in range(1 + number % 4))
        routed = None
        if self._world.routing_replay:
            drawn, tokens = len(self.generated), len(prompt.ids) + len(ids) - 1
            routed = RoutedExperts("/experts", f"{prompt.index}.{number}.{drawn}", tokens, 2, 2, 1)
        return Sample(prompt.index, number, ids, (-0.1,) * len(ids), version, "engine", routed=routed)

    def score(self, samples: list[Sample]) -> list[float]:
        if self._world.score_of is not None and samples[0].prompt_index >= 2**40:
            return [self._world.score_of(sample.version) for sample in samples]
        return [float(sample.ids[0] % 2) for sample in samples]


class ValidationEngines:
    """The same engines, asked for responses of a validation; time does not pass for these."""

    def __init__(self, world: "World", engines: Engines, n: int) -> None:
        self._world, self._engines, self._n = world, engines, n

    def forget(self) -> None: ...

    def submit(self, prompt: Prompt, version: int, arrived: Any = None) -> "Future[list[Sample]]":
        group: Future[list[Sample]] = Future()
        try:
            self._world.before_validation(version)
            self._world.validated.append((prompt.index, version))
            group.set_result([self._engines._sample(prompt, n, version) for n in range(self._n)])
        except TimeoutError as error:
            group.set_exception(error)
        return group


class World:
    """A job of ``steps`` steps. ``memory``: it keeps snapshots in the pods' memory."""

    def __init__(self, store: Path, steps: int = 6, memory: bool = False, **changes: Any) -> None:
        manifest = job(totalSteps=steps, **changes)
        manifest["spec"]["checkpoint"] |= {"everySteps": 4, "exportAtEnd": False}
        manifest["spec"]["checkpoint"]["memory"] = {"everySteps": 1} if memory else None
        self.spec = spec_of(manifest)
        self.store = store
        self.folder = JobFolder(store, store)
        self.fork_from: Path | None = None  # folder of the job of checkpoint.resumeFrom
        self.job_file: Path | None = None  # that a test changes while the job runs
        self.resumes = 0  # times that the job was resumed after its end
        self.starts = 0
        self.model = ""  # digest
        self.updates = 0  # of the ranks' weights
        self.checks: list[bool] = []  # of each update: whether its gradients are computed twice
        self.own_times = [OwnTime(1.0, 1.0)] * 2  # of each step, by rank
        self.checkpoint_bytes = 0  # that the ranks estimate for the first one
        self.writing: list[int] = []
        self.snapshots: dict[str, int] = {}  # updates by name, in the memory of the pods
        self.calls: list[str] = []
        self.saved_from_host: list[bool] = []
        self.engines_hold: tuple[str, ...] = ()  # parts of the GPUs' memory, in mode colocated
        self.keeps_gpus: Callable[[], str] = lambda: ""  # why engines do not release them, or ""
        self.away: Callable[[], str] = lambda: ""
        self.before_generation: Callable[[int], None] = lambda _version: None
        self.before_validation: Callable[[int], None] = lambda _version: None
        self.score_of: Callable[[int], float] | None = None  # of a version's responses, in a validation
        self.validated: list[tuple[int, int]] = []  # (prompt, version), also of validations that did not end
        self.routing_replay = False
        self.transport = Transport()  # that NCCL chose, if the ranks have GPUs
        self.damaged: set[str] = set()  # checkpoints in which ranks read changed values
        self.decays: list[tuple[int, int]] = []  # updates that were done, and those of the whole job
        self.exports: list[tuple[str, int]] = []  # name and updates of the weights
        self.exported: Callable[[], bool] = lambda: True  # the export that was begun is complete
        self.lost: Callable[[RoutedExperts], bool] = lambda _reference: False  # asked when ranks fetch
        self.clock = FakeClock()
        self.board = ProgressBoard()
        self.departure = Departure()
        self.checkpoint_error: GangError | None = None
        self.before_update: Callable[[int], None] = lambda _updates: None
        self.seen: list[Any] = []  # statuses, one for each change
        self.groups: list[Ranks] = []
        self.engines = Engines(self)

    def acquire(self, resource: str, ranks: int, gpus: int = 0, report: Any = None) -> object:
        return object()

    def release(self, resource: str) -> None: ...

    def avoid(self, address: str) -> None: ...

    def avoid_failing(self, addresses: frozenset[str]) -> None: ...

    def keep_warm(self, resource: str) -> None: ...

    def _group(self, _pool: Any) -> Ranks:
        self.groups.append(Ranks(self))
        return self.groups[-1]

    def gang(self, hf: dict[str, Any]) -> TrainerGang:
        """Return the gang of ranks. ``hf``: contents of config.json."""
        return TrainerGang(self.spec, hf, self.folder.store / "checkpoints", self, self._group, self.clock)

    def run(self) -> list[dict[str, Any]]:
        """Run the job to its end; return its ledger."""
        store = self.store
        store.mkdir(parents=True, exist_ok=True)
        model = open_model("preset:tiny-moe")
        self.model = model_digest(model.config)
        source = PromptSource(open_gym("reasoning-gym:gcd", seed=3), model.tokenizer, 4096)
        gang = self.gang(model.config)
        pool = cast(RolloutPool, self.engines)
        kind = ColocatedSynchronizer if self.spec.shares_gpus else DedicatedSynchronizer
        weights = kind(gang, self.engines_protocol(), WeightPath(), self.spec.weight_sync, 240.0, self.clock)
        record, live = RunRecord.load(self.folder.store / "run.json"), LiveFields.of(self.spec, self.job_file)
        failures = FailureHandler(record, live, self.departure)
        failures.resume(self.resumes)
        fork = Fork.of(self.spec, str(self.fork_from) if self.fork_from else None)
        inputs = Inputs(model, source, cast(Any, self.engines), fork, self.validation_sets())
        client = cast(RolloutClient, self.engines)
        update = self.board.update

        def recorded(**values: Any) -> None:
            update(**values)
            self.seen.append(self.board.get())

        self.board.update = recorded  # type: ignore[method-assign]
        loop = loop_of(
            self.spec, self.folder, self.board, gang, pool, client, inputs, weights, failures, self.clock,
        )  # fmt: skip
        if (tier := loop.checkpoints._memory) is not None:
            # The agents of the pods: each finds the snapshots that it is asked for.
            tier._http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200)))
        self.loop = loop
        loop.run()
        return [json.loads(line) for line in (store / "ledger.jsonl").read_text().splitlines()]

    def validation_sets(self) -> tuple[ValidationSet, ...]:
        """Return the sets of the spec; the reward is that of the engines."""
        tokenizer, found = open_model("preset:tiny-moe").tokenizer, self.spec.validation
        return tuple(
            ValidationSet(
                one.name, open_gym(one.data, seed=9), tokenizer, cast(Any, self.engines),
                2**40 * (number + 1), one.prompts or 8, 4096,
            )
            for number, one in enumerate(found.sets if found else [])
        )  # fmt: skip

    def settle(self) -> None:
        """Wait until the thread beside the steps has done what it was asked for."""
        self.loop.checkpoints._thread.submit(lambda: None).result(30)

    def await_snapshot(self, step: int) -> None:
        """Wait until the snapshot of ``step`` is complete, which a thread of the loop notes."""
        file, deadline = self.store / "memory.json", time.monotonic() + 30
        while not file.is_file() or json.loads(file.read_text())["step"] < step:
            assert time.monotonic() < deadline, f"no snapshot of step {step}"
            time.sleep(0.01)

    def engines_protocol(self) -> Any:
        """Return the engines; direct transfers, which they lack, are not used."""
        return self.engines


def shared_gpus() -> dict[str, Any]:
    """Return the fields of a job whose engine uses the trainers' GPUs."""
    spec = job()["spec"]
    offload = dict.fromkeys(("parameters", "gradients", "optimizer"), True)
    template = spec["rollout"]["template"] | {"replicas": 1, "minAvailable": 1}
    template["engine"] |= {"device": "cuda"}
    return {
        "mode": "colocated",
        "trainer": spec["trainer"] | {"device": "cuda", "offload": offload},
        "rollout": spec["rollout"] | {"template": template},
    }
