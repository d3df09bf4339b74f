"""One step ahead: nothing is lost, nothing comes twice, and a replay sees the very same samples."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from grpo_worker.controller.generation.scheduler import OneStepAhead, OnPolicy
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.data.routed_experts import RoutedExperts
from grpo_worker.data.tasks import open_gym
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.weightsync.protocol.version import Version
from support.objects import job, spec_of
from support.rollout_fakes import WANTED, Even, N

ATTEMPT = 2


class Engines(Even):
    """Answers whose length, log-prob and experts follow from prompt, number and version."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.versions: list[int] = []
        self.failures = 0  # of the next calls

        self.threads = ThreadPoolExecutor(1)

    def submit(self, prompt: Prompt, version: int, arrived: Any = None) -> "Future[list[Sample]]":
        return self.threads.submit(self._group, prompt, version)

    def _group(self, prompt: Prompt, version: int) -> list[Sample]:
        self.gate.wait(10)
        if self.failures:
            self.failures -= 1
            raise TimeoutError(f"no engine serves version {version}")
        self.versions.append(version)
        return [self._answer(prompt, number, version) for number in range(N)]

    def _answer(self, prompt: Prompt, number: int, version: int) -> Sample:
        ids = tuple(range(1 + (prompt.index + number) % 5))
        tokens, key = len(prompt.ids) + len(ids) - 1, f"{prompt.index}-{number}-{version}"
        routed = RoutedExperts("http://e:9000", key, tokens, 2, 4, 7)
        return Sample(prompt.index, number, ids, (-0.1 * version,) * len(ids), version, "e", routed=routed)


class Run:
    """The part of the loop that produces and consumes, with checkpoints."""

    def __init__(self, folder: Path, engines: Any, **algorithm: Any) -> None:
        spec = spec_of(job())
        spec = spec.model_copy(update={"algorithm": type(spec.algorithm).model_validate(algorithm)})
        self.source = PromptSource(
            open_gym("reasoning-gym:gcd", seed=3), load_tokenizer("preset:tiny-moe"), 4096
        )
        self.scheduler = OneStepAhead(StepSampler(spec, self.source, engines, engines), folder)
        self.folder = folder

    def steps(self, first: int, last: int) -> list[RolloutBatch]:
        """What the steps ``first`` to ``last`` trained on; each is followed by a checkpoint."""
        found = []
        for step in range(first, last + 1):
            found.append(self.scheduler.next_batch(Version(step - 1), StepTimer()))
            self.scheduler.start_next(Version(step - 1))
            self.scheduler.before_push(StepTimer())
            self.source.consumed(found[-1].taken)
            self.scheduler.wait()
            self.scheduler.save(step, ATTEMPT)()
            (self.folder / f"source-{step}.json").write_text(json.dumps(self.source.state_dict()))
        return found

    def resume(self, step: int) -> None:
        self.scheduler.restore(step, ATTEMPT)
        self.source.load_state_dict(json.loads((self.folder / f"source-{step}.json").read_text()))


def test_each_step_trains_on_samples_of_the_weights_before(tmp_path: Path) -> None:
    found = Run(tmp_path, Engines()).steps(1, 5)
    assert [{s.version for s in step.samples} for step in found] == [{0}, {0}, {1}, {2}, {3}]
    prompts = [p.index for step in found for p in step.prompts]
    assert prompts == list(range(5 * WANTED)), "every prompt once, in order"


def test_what_is_consumed_is_what_was_generated_so_no_length_is_favoured(tmp_path: Path) -> None:
    found = Run(tmp_path, Engines()).steps(1, 6)
    consumed = [len(s.ids) for step in found for s in step.samples]
    generated = [1 + (index + number) % 5 for index in range(6 * WANTED) for number in range(N)]
    assert consumed == generated


@pytest.mark.parametrize(
    "algorithm", [{}, {"filter_groups": {"max_num_gen_batches": 4}}], ids=["all", "dapo"]
)
def test_a_replay_trains_on_the_same_samples(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    undisturbed = Run(tmp_path / "a", Engines(), **algorithm).steps(1, 6)
    run = Run(tmp_path / "b", Engines(), **algorithm)
    assert run.steps(1, 4) == undisturbed[:4]
    again = Run(tmp_path / "b", Engines(), **algorithm)
    again.resume(3)
    replayed = again.steps(4, 6)
    assert replayed == undisturbed[3:]
    first, second = replayed[0].samples[0].routed, undisturbed[3].samples[0].routed
    assert first is not None and first == second


def test_what_is_under_way_is_known(tmp_path: Path) -> None:
    engines = Engines()
    scheduler = Run(tmp_path, engines).scheduler
    scheduler.next_batch(Version(0), StepTimer())
    assert not scheduler.generates_ahead
    engines.gate.clear()
    scheduler.start_next(Version(0))
    assert scheduler.generates_ahead, "saving would wait"
    engines.gate.set()
    scheduler.before_push(StepTimer())
    assert not scheduler.generates_ahead


def test_a_restart_waits_for_what_is_under_way_and_forgets_it(tmp_path: Path) -> None:
    engines = Engines()
    run = Run(tmp_path, engines)
    run.steps(1, 2)
    run.scheduler.next_batch(Version(2), StepTimer())
    engines.gate.clear()
    run.scheduler.start_next(Version(2))
    threading.Timer(0.2, engines.gate.set).start()
    run.resume(2)
    found = run.steps(3, 3)[0]
    assert [p.index for p in found.prompts] == list(range(2 * WANTED, 3 * WANTED))
    assert {s.version for s in found.samples} == {1}


@pytest.mark.parametrize("place", ["before_push", "wait"])
def test_engines_that_were_away_generate_the_same_samples_again(tmp_path: Path, place: str) -> None:
    undisturbed = Run(tmp_path / "a", Engines()).steps(1, 4)
    engines = Engines()
    run = Run(tmp_path / "b", engines)
    found, scheduler = run.steps(1, 2), run.scheduler
    scheduler._continues = place == "wait"
    found.append(scheduler.next_batch(Version(2), StepTimer()))
    engines.failures = 2
    scheduler.start_next(Version(2))
    if place == "before_push":
        _until_it_works(lambda: scheduler.before_push(StepTimer()))
    run.source.consumed(found[-1].taken)
    _until_it_works(scheduler.wait)
    scheduler.save(3, ATTEMPT)()
    found.append(scheduler.next_batch(Version(3), StepTimer()))
    assert found == undisturbed


def _until_it_works(work: Callable[[], None]) -> None:
    """Do as the loop does: park after an error, and try again."""
    for _ in range(3):
        try:
            return work()
        except TimeoutError:
            continue
    raise AssertionError("it fails again and again")


def test_what_is_under_way_holds_up_no_change_of_weights_when_it_may_go_on(tmp_path: Path) -> None:
    engines = Engines()
    run = Run(tmp_path, engines)
    run.scheduler._continues = True
    run.scheduler.next_batch(Version(0), StepTimer())
    engines.gate.clear()
    run.scheduler.start_next(Version(0))
    run.scheduler.before_push(StepTimer())  # returns, although nothing is generated yet
    engines.gate.set()
    run.scheduler.wait()  # as a checkpoint does
    assert run.scheduler.next_batch(Version(1), StepTimer()).prompts


def test_samples_are_kept_as_long_as_their_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path, Engines())
    run.steps(1, 6)
    (tmp_path / f"step-00000003.attempt-{ATTEMPT}.experts").mkdir()
    (tmp_path / "step-00000004.npz").touch()  # of an earlier version
    (tmp_path / f"step-00000004.attempt-{ATTEMPT + 1}.npz").touch()
    run.scheduler.prune({2, 5, 6, 7}, ATTEMPT)
    kept = [(2, ATTEMPT), (4, ATTEMPT + 1), (5, ATTEMPT), (6, ATTEMPT)]
    names = [f"step-{step:08d}.attempt-{attempt}.npz" for step, attempt in kept]
    assert [f.name for f in sorted(tmp_path.glob("step-*"))] == names


def test_copies_of_experts_are_not_copied_onto_themselves(tmp_path: Path) -> None:
    """A snapshot in memory and a checkpoint in the store may be of the same step, also after a restore."""
    copied: list[str] = []

    def durable(samples: list[Sample], folder: Path) -> Callable[[], list[Sample]]:
        copied.append(folder.name)
        return lambda: samples

    run = Run(tmp_path, Engines())
    run.scheduler._durable = durable
    run.steps(1, 2)
    run.scheduler.save(2, ATTEMPT)()
    run.resume(2)
    run.scheduler.save(2, ATTEMPT)()
    assert copied == [f"step-0000000{step}.attempt-{ATTEMPT}.experts" for step in (1, 2)]


def test_on_policy_samples_come_from_the_newest_weights() -> None:
    engines: Any = Engines()
    spec = spec_of(job())
    source = PromptSource(open_gym("reasoning-gym:gcd", seed=3), load_tokenizer("preset:tiny-moe"), 4096)
    scheduler = OnPolicy(StepSampler(spec, source, engines, engines))
    for step in range(1, 4):
        found = scheduler.next_batch(Version(step - 1), StepTimer())
        scheduler.start_next(Version(step - 1))
        assert {s.version for s in found.samples} == {step - 1}
        source.consumed(found.taken)
