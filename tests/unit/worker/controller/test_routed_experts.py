"""The controller moves references; groups whose experts are lost are generated again."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_worker.controller.recovery.routed_experts import RoutedExpertsLoader
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import ExpertsLostError, RoutedExperts
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.roles.dispatch import RankInfo
from grpo_worker.roles.shared_batch import SharedBatch
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.train_batch import make_batch
from support.batch_stores import plain_store

RANKS = [RankInfo(rank, 0, 0, 0, rank, 1, 2) for rank in range(2)]
PROMPTS = [Prompt(index, (1, 2)) for index in range(4)]


def _samples(prompts: list[Prompt], engine: str) -> list[Sample]:
    return [
        Sample(p.index, n, (5,) * (1 + p.index), (-0.5,) * (1 + p.index), 3, engine,
               routed=RoutedExperts(f"http://{engine}", f"{engine}-{p.index}.{n}", 2 + p.index, 2, 2, 1))
        for p in prompts
        for n in range(2)
    ]  # fmt: skip


class Trainers:
    """Ranks that find the experts of engines that are not ``gone``."""

    def __init__(self, *gone: str) -> None:
        self.gone = gone
        self.parts: list[list[RoutedExperts]] = []
        self.mapped = 0

    def one_of_each_pod(self) -> frozenset[int]:
        return frozenset({0, 1})

    def call(self, method: str, *args: Any) -> Any:
        if method == "map_routed_experts":
            self.mapped += 1
            return []
        assert method == "load_routed_experts"
        self.parts = args[0]
        return [[r.key for r in part if not self._has(r)] for part in self.parts]

    def beside(self, method: str, references: list[RoutedExperts], folder: str) -> Callable[[], Any]:
        assert method == "store_routed_experts"
        places = {r.key: (f"{folder}/rank-0.bin", i) for i, r in enumerate(references) if self._has(r)}
        return lambda: [places]

    def _has(self, reference: RoutedExperts) -> bool:
        return reference.location.removeprefix("http://") not in self.gone


def _keys(column: np.ndarray) -> list[str]:
    return [key.decode() for key in column.tolist()]


class Reward:
    def score(self, samples: list[Sample]) -> list[float]:
        return [float(sample.engine == "e1") for sample in samples]


def _rollouts() -> RolloutBatch:
    samples = _samples(PROMPTS[:2], "e0") + _samples(PROMPTS[2:], "e1")
    return RolloutBatch(list(PROMPTS), samples, [0.0] * 8, list(PROMPTS))


def _share(rollouts: RolloutBatch) -> SharedBatch:
    return SharedBatch(make_batch(rollouts.prompts, rollouts.samples), 4, RANKS, plain_store())


class Beside:
    """Parking and weights: notes the reasons for which the trainers are parked."""

    def __init__(self) -> None:
        self.runs = 0
        self.reasons: list[str] = []

    def run(self, work: Callable[[], Any], park: Callable[[], None] = lambda: None) -> Any:
        self.runs += 1
        try:
            return work()
        except ExpertsLostError as error:
            self.reasons.append(str(error))
            park()
            return work()

    def before_generation(self, _timer: StepTimer) -> None: ...

    def forget_engines(self) -> None: ...


def _loader(trainers: Any, generate: Any, beside: Beside | None = None) -> RoutedExpertsLoader:
    reward: Any = Reward()
    parking: Any = beside or Beside()
    loader = RoutedExpertsLoader(trainers, generate, parking, reward, parking)
    loader._drop = lambda samples: None  # type: ignore[method-assign]
    return loader


def test_each_rank_gets_the_references_of_its_rows() -> None:
    trainers, rollouts = Trainers(), _rollouts()
    found, shared = _loader(trainers, None).load(rollouts, _share, 3)
    assert found is rollouts and trainers.mapped == 1
    keys = [{r.key for r in part} for part in trainers.parts]
    assert len(keys[0] | keys[1]) == 8 and not keys[0] & keys[1]
    for part, own in enumerate(keys):
        rows = np.concatenate([pieces[part] for pieces in shared.partition.pieces])
        assert set(_keys(shared.batch.row["routed_experts"][rows])) == own


def test_groups_of_an_engine_that_is_gone_are_generated_again() -> None:
    asked: list[tuple[list[int], int]] = []

    def generate(prompts: list[Prompt], version: int, _cancelled: threading.Event) -> list[Sample]:
        asked.append(([p.index for p in prompts], version))
        return _samples(prompts, "e1")

    rollouts = _rollouts()
    found, shared = _loader(Trainers("e0"), generate).load(rollouts, _share, 3)
    assert asked == [([0, 1], 3)]
    assert [s.uid for s in found.samples] == [s.uid for s in rollouts.samples], "each sample in its place"
    assert found.scores == [1.0] * 4 + [0.0] * 4 and found.prompts == rollouts.prompts
    assert {s.engine for s in found.samples} == {"e1"}
    assert all(key.startswith("e1") for key in _keys(shared.batch.row["routed_experts"]))


def test_experts_that_cannot_be_had_are_named() -> None:
    with pytest.raises(ExpertsLostError, match=r"4 samples .*engine\.routedExpertsGibibytes"):
        _loader(Trainers("e1"), None).load(_rollouts(), _share, 3)


def test_repeated_losses_park_the_trainers_until_an_engine_keeps_the_experts() -> None:
    trainers, rounds, beside = Trainers("e0", "e1"), itertools.count(1), Beside()

    def generate(prompts: list[Prompt], _version: int, _cancelled: threading.Event) -> list[Sample]:
        if next(rounds) == 5:
            trainers.gone = ("e0",)
        return _samples(prompts, "e1")

    found, _ = _loader(trainers, generate, beside).load(_rollouts(), _share, 3)
    assert {sample.engine for sample in found.samples} == {"e1"} and trainers.mapped == 1
    assert len(beside.reasons) == 3, "the third loss of the batch and those after it"
    assert all("8 samples" in reason for reason in beside.reasons)


def test_failures_of_the_ranks_end_the_step_and_are_not_waited_for() -> None:
    trainers, beside = Trainers("e0"), Beside()
    failed = GangError("load_routed_experts: rank 1 has no memory", [])

    def generate(prompts: list[Prompt], _version: int, _cancelled: threading.Event) -> list[Sample]:
        trainers.one_of_each_pod = broken  # type: ignore[method-assign]
        return _samples(prompts, "e1")

    def broken() -> frozenset[int]:
        raise failed

    with pytest.raises(GangError) as raised:
        _loader(trainers, generate, beside).load(_rollouts(), _share, 3)
    assert raised.value is failed
    assert beside.runs == 2 and not beside.reasons, "generation and reward"


def test_generation_that_outlives_its_gang_is_cancelled() -> None:
    events: list[threading.Event] = []

    def generate(_prompts: list[Prompt], _version: int, cancelled: threading.Event) -> list[Sample]:
        events.append(cancelled)
        raise GangError("the processes of rank 1 have ended", [1])

    with pytest.raises(GangError):
        _loader(Trainers("e0"), generate).load(_rollouts(), _share, 3)
    assert events[0].is_set()


def test_saved_samples_refer_to_the_store(tmp_path: Path) -> None:
    samples = _rollouts().samples
    found = _loader(Trainers("e1"), None).durable(samples, tmp_path)()
    references = [sample.routed for sample in found]
    assert all(r is not None for r in references)
    assert [r.in_file for r in references if r] == [True] * 4 + [False] * 4, "those of e1 are lost"
    assert references[2] and references[2].offset == 2
    batch = replace(_rollouts(), samples=found)
    batch.write(tmp_path / "step.npz")
    again = RolloutBatch.read(tmp_path / "step.npz")
    assert [sample.routed for sample in again.samples] == references and again == batch


def test_agents_keep_experts_until_both_the_trainers_and_the_store_have_them(tmp_path: Path) -> None:
    trainers = Trainers()
    loader = _loader(trainers, None)
    del loader._drop
    dropped: list[int] = []
    loader._drop_all = lambda samples: dropped.append(len(samples))  # type: ignore[method-assign]
    wait = loader.durable(_rollouts().samples, tmp_path)
    loader.load(_rollouts(), _share, 3)
    assert trainers.mapped == 1 and dropped == [], "the copy still reads them"
    assert wait() == wait() and dropped == [8]
    loader.load(_rollouts(), _share, 3)
    assert dropped == [8, 8]


def test_a_copy_that_ends_with_its_gang_is_reported_and_its_experts_are_dropped(tmp_path: Path) -> None:
    def ends(*_args: Any) -> Callable[[], Any]:
        def wait() -> None:
            raise GangError("rank 1 has ended", [1])

        return wait

    trainers: Any = Trainers()
    trainers.beside = ends
    loader = _loader(trainers, None)
    del loader._drop
    dropped: list[int] = []
    loader._drop_all = lambda samples: dropped.append(len(samples))  # type: ignore[method-assign]
    wait = loader.durable(_rollouts().samples, tmp_path)
    loader.load(_rollouts(), _share, 3)
    with pytest.raises(GangError, match="rank 1"):
        wait()
    assert dropped == [8]


def test_a_job_without_replay_moves_nothing() -> None:
    rollouts = _rollouts()
    rollouts.samples = [replace(sample, routed=None) for sample in rollouts.samples]
    trainers: Any = Trainers()
    found, shared = _loader(trainers, None).load(rollouts, _share, 3)
    assert found is rollouts and not shared.batch.row and trainers.mapped == 0
