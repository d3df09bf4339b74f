"""Routed experts between engines and trainers: the controller moves references, never the experts."""

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx

from grpo_worker.common import tls
from grpo_worker.common.auth import pair_headers
from grpo_worker.controller.recovery.parking import Parking
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.weight_sync.synchronizer import WeightSynchronizer
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.routed_experts import ExpertsLostError, RoutedExperts
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.roles.shared_batch import SharedBatch
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample

log = logging.getLogger(__name__)
_TRIES = 3  # losses of one batch until the trainers count as parked, and the status names the reason
_DROP_TIMEOUT = 10.0
# (prompts, version, event that cancels it) -> samples
Generate = Callable[[list[Prompt], int, threading.Event], list[Sample]]


class RoutedExpertsLoader:
    """Has the trainers fetch the experts of a batch before they use it.

    An engine's pod holds the only copy until then. If it is gone, a recomputed routing would not be the
    engine's, so the samples' groups are generated again, with the same seeds. Afterwards the trainers' pods
    hold the experts, so that engines can go while the step trains.
    """

    def __init__(
        self,
        trainers: TrainerGang,
        generate: Generate | None,
        weights: WeightSynchronizer,
        reward: RewardManager,
        parking: Parking,
    ) -> None:
        """``generate``: draws the samples of prompts; None: engines cannot generate while trainers run.

        ``parking``: runs what engines and the reward server do. The ranks are called outside of it: work that
        outlives its gang must not call the next one.
        """
        self._trainers = trainers
        self._generate = generate
        self._reward = reward
        self._weights = weights
        self._parking = parking
        self._http = httpx.Client(timeout=_DROP_TIMEOUT, verify=tls.pair())
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="drop experts")
        self._copying: Future[list[Sample]] = Future()  # the newest copy of experts to the store
        self._copying.set_result([])

    def load(
        self,
        rollouts: RolloutBatch,
        share: Callable[[RolloutBatch], SharedBatch],
        version: int,
        park: Callable[[RolloutBatch], None] = lambda _batch: None,
    ) -> tuple[RolloutBatch, SharedBatch]:
        """Return the batch, whose experts the trainers hold, with lost groups generated again at ``version``.

        The trainers are parked while engines are away, and when samples are lost repeatedly. ``park``: called
        with the batch when they are; a copy of it loses and draws the same groups again. Raises
        GangError, and ExpertsLostError when samples are lost that cannot be generated now.
        """
        for losses in itertools.count(1):
            shared = share(rollouts)
            lost = self._fetch(rollouts, shared)
            if not lost:
                break
            log.warning("the routed experts of %d samples are lost, and generated again", len(lost))
            rollouts = self._again(rollouts, lost, version, losses >= _TRIES, partial(park, rollouts))
        self._drop([*rollouts.samples, *rollouts.left_out])
        return rollouts, shared

    def durable(self, samples: list[Sample], folder: Path) -> Callable[[], list[Sample]]:
        """Have the trainers copy the samples' experts to a folder of the store, beside the steps.

        Returns a function that waits for the copy, in one thread at a time, and returns samples that refer to
        it. Samples whose experts are lost stay as they are; they are generated again when they are used.
        """
        references = _references(samples)
        if not references:
            return lambda: samples
        stored = self._trainers.beside("store_routed_experts", references, str(folder))
        copied: Future[list[Sample]] = Future()
        self._copying = copied

        def wait() -> list[Sample]:
            if not copied.done():
                try:
                    copied.set_result(_moved(samples, stored()))
                except Exception as error:  # noqa: BLE001 - of the gang; it is raised below, also again
                    copied.set_exception(error)
            return copied.result()

        return wait

    def _fetch(self, rollouts: RolloutBatch, shared: SharedBatch) -> set[str]:
        """Return the keys of lost experts."""
        if not _references(rollouts.samples):
            return set()
        parts: list[list[RoutedExperts]] = []
        for part in range(len(shared.partition.pieces[0])):
            rows = sorted({int(row) for pieces in shared.partition.pieces for row in pieces[part]})
            parts.append(_references([rollouts.samples[row] for row in rows]))
        fetching = self._trainers.one_of_each_pod()
        found = self._trainers.call("load_routed_experts", parts, shared.batch.width, fetching)
        lost = {key for keys in found for key in keys}
        if not lost:
            self._trainers.call("map_routed_experts")
        return lost

    def _again(
        self,
        rollouts: RolloutBatch,
        lost: set[str],
        version: int,
        repeatedly: bool,
        park: Callable[[], None],
    ) -> RolloutBatch:
        """Return the batch with new samples for the groups of lost ones, in the same places.

        ``repeatedly``: the trainers count as parked, even if engines serve.
        """
        problem = ExpertsLostError(
            f"the routed experts of {len(lost)} samples are lost: engines' pods have ended, or "
            "engine.routedExpertsGibibytes is too small for the samples of a step"
        )
        if self._generate is None:
            raise problem
        indices = {s.prompt_index for s in rollouts.samples if s.routed is not None and s.routed.key in lost}
        prompts = [prompt for prompt in rollouts.prompts if prompt.index in indices]
        samples = self._draw(prompts, version, [problem] if repeatedly else [], park)
        scores = self._parking.run(lambda: self._reward.score(samples), park)
        new = dict(zip((s.uid for s in samples), zip(samples, scores, strict=True), strict=True))
        pairs = [
            new.get(sample.uid, (sample, score))
            for sample, score in zip(rollouts.samples, rollouts.scores, strict=True)
        ]
        return replace(rollouts, samples=[s for s, _ in pairs], scores=[score for _, score in pairs])

    def _draw(
        self,
        prompts: list[Prompt],
        version: int,
        problems: list[ExpertsLostError],
        park: Callable[[], None],
    ) -> list[Sample]:
        """Return new samples of prompts; ``problems``: the trainers are parked for each of them first."""
        cancelled = threading.Event()

        def draw() -> list[Sample]:
            assert self._generate is not None
            if problems:
                raise problems.pop()
            self._weights.before_generation(StepTimer())
            return self._generate(prompts, version, cancelled)

        try:
            return self._parking.run(draw, park)
        finally:
            cancelled.set()  # it may have outlived its gang

    def _drop(self, samples: Sequence[Sample]) -> None:
        """Tell the agents to forget experts, when no copy reads them any more.

        That happens in the background: a full volume forgets the oldest anyway.
        """
        self._copying.add_done_callback(lambda _: self._drop_all(samples))

    def _drop_all(self, samples: Sequence[Sample]) -> None:
        by_location: dict[str, list[str]] = defaultdict(list)
        for reference in _references(samples):
            if not reference.in_file:
                by_location[reference.location].append(reference.key)
        for location, keys in by_location.items():
            self._threads.submit(self._drop_at, location, keys)

    def _drop_at(self, location: str, keys: list[str]) -> None:
        try:
            url = f"{location}/v1/routed-experts/drop"
            self._http.post(url, json={"keys": keys}, headers=pair_headers()).raise_for_status()
        except httpx.HTTPError as error:
            log.info("%s keeps the routed experts of %d samples: %r", location, len(keys), error)


def _moved(samples: Sequence[Sample], stored: Iterable[dict[str, tuple[str, int]]]) -> list[Sample]:
    """Return samples that refer to copies. ``stored``: file and offset of each key, by rank."""
    places = {key: place for of_rank in stored for key, place in of_rank.items()}

    def moved(sample: Sample) -> Sample:
        reference = sample.routed
        if reference is None or reference.key not in places:
            return sample
        location, offset = places[reference.key]
        return replace(sample, routed=replace(reference, location=location, offset=offset))

    return [moved(sample) for sample in samples]


def _references(samples: Iterable[Sample]) -> list[RoutedExperts]:
    return [sample.routed for sample in samples if sample.routed is not None]
