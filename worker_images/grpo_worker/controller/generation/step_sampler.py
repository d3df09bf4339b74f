"""Sampler of one step: generates and scores groups, with or without dynamic sampling."""

import math
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Protocol

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.controller.generation.batch_selection import BatchSelection
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import PromptRefusedError, Sample
from grpo_worker.weightsync.protocol.version import Version

_CANCEL_SECONDS = 0.2  # between two looks at ``cancelled``
_Group = Future[list[Sample]]


class GroupClient(Protocol):
    """The part of RolloutClient that a sampler uses."""

    def submit(self, prompt: Prompt, version: int) -> _Group:
        """Start to generate the samples of a prompt."""


class StepSampler:
    """Turns prompts into scored groups. A replay of a step draws the same prompts in the same order."""

    def __init__(
        self, spec: GRPOJobSpec, source: PromptSource, client: GroupClient, reward: RewardManager
    ) -> None:
        self._size = spec.data.train_batch_size
        self._filter = spec.algorithm.filter_groups
        self._refusals = max(1, int(spec.data.max_refused_share * self._size))
        self._spare = math.ceil(spec.rollout.over_sample_rate * self._size)
        self._continues = spec.staleness.partial_rollouts
        self._cut: dict[int, _Group | None] = {}  # prompts left to the next step, and their groups
        self._kept: tuple[Version | None, dict[int, _Group]] = None, {}  # groups of a call that failed
        self._source = source
        self._client = client
        self._reward = reward

    def sample(
        self,
        version: Version,
        timer: StepTimer,
        skip: int = 0,
        cancelled: threading.Event | None = None,
    ) -> RolloutBatch:
        """Return the groups of one step, sampled at ``version``.

        ``skip``: prompts that were drawn but belong to the step before. ``cancelled``: raise CancelledError
        once it is set.

        With filterGroups, groups whose scores are all equal are left out, and others are generated in their
        place, up to maxNumGenBatches batches. After that, left-out groups fill the batch, so that its size is
        constant. Groups are scored when they arrive, while engines generate the others. With overSampleRate
        the batch has the first groups that arrive, and the others are left to the next call.

        Raises UnfitEngineError when engines refuse too many prompts, and the errors of generation and reward.
        After TimeoutError and ConnectionError (no engine serves, no reward server answers) a call with the
        same version uses the groups that were generated before, and those that still are.
        """
        most = self._size * (self._filter.max_num_gen_batches if self._filter else 1)
        awaited = frozenset(self._cut)
        earlier = self._earlier_groups(version)
        chosen = BatchSelection(
            self._size, most, self._filter is not None, self._refusals, self._spare, awaited
        )
        arrived: queue.SimpleQueue[tuple[Prompt, _Group]] = queue.SimpleQueue()
        groups: dict[int, _Group] = {}
        try:
            while not chosen.complete:
                prompts = self._source.take(chosen.missing, after=skip + chosen.count)
                chosen.start(prompts)
                for prompt in prompts:
                    group = earlier.pop(prompt.index, None) or self._client.submit(prompt, version)
                    groups[prompt.index] = group
                    group.add_done_callback(partial(_report, arrived, prompt))
                with timer.phase("gen"):
                    found = _wait(arrived, cancelled)
                with timer.phase("reward"):
                    self._add(chosen, found)
            batch, left = chosen.batch(), chosen.cut()
            batch.cut = len(left)
            self._leave(left, groups)
        except (TimeoutError, ConnectionError):
            self._cut = dict.fromkeys(awaited)
            self._kept = version, {index: group for index, group in groups.items() if not _failed(group)}
            groups.clear()
            raise
        finally:
            _cancel([*groups.values(), *earlier.values()])
        return batch

    def forget(self) -> None:
        """Forget the groups of earlier calls, before a restart goes on with other weights."""
        _cancel(self._earlier_groups(None).values())

    def _earlier_groups(self, version: Version | None) -> dict[int, _Group]:
        """Take over the groups of earlier calls that a call with this version may use, by prompt index."""
        (kept_version, kept), self._kept = self._kept, (None, {})
        groups = {index: group for index, group in self._cut.items() if group is not None}
        self._cut = {}
        if kept_version == version:
            return groups | kept
        _cancel(kept.values())
        return groups

    def _leave(self, prompts: list[Prompt], groups: dict[int, _Group]) -> None:
        """Leave prompts to the next call: to be continued, or to be generated again with its weights."""
        self._source.put_back(prompts)
        for prompt in prompts[: self._size]:
            self._cut[prompt.index] = groups.pop(prompt.index) if self._continues else None

    def _add(self, chosen: BatchSelection, found: list[tuple[Prompt, _Group]]) -> None:
        """Score the groups that arrived, all in one call so that a verifier can judge them side by side."""
        scored: list[tuple[Prompt, list[Sample]]] = []
        for prompt, group in found:
            try:
                scored.append((prompt, group.result()))
            except PromptRefusedError as error:
                chosen.refuse(error)
        answers = [sample for _, samples in scored for sample in samples]
        scores = self._reward.score(answers) if answers else []
        for prompt, samples in scored:
            chosen.add(prompt, samples, scores[: len(samples)])
            scores = scores[len(samples) :]


def _cancel(groups: Iterable[_Group]) -> None:
    for group in groups:
        group.cancel()


def _failed(group: _Group) -> bool:
    return group.cancelled() or (group.done() and group.exception() is not None)


def _report(arrived: "queue.SimpleQueue[tuple[Prompt, _Group]]", prompt: Prompt, group: _Group) -> None:
    arrived.put((prompt, group))


def _wait(
    arrived: "queue.SimpleQueue[tuple[Prompt, _Group]]", cancelled: threading.Event | None
) -> list[tuple[Prompt, _Group]]:
    """Wait for at least one group; return all that have arrived, in the order of the prompts."""
    found: list[tuple[Prompt, _Group]] = []
    while not found:
        if cancelled is not None and cancelled.is_set():
            raise CancelledError
        try:
            found.append(arrived.get(timeout=_CANCEL_SECONDS))
        except queue.Empty:
            continue
    while not arrived.empty():
        found.append(arrived.get())
    return sorted(found, key=lambda item: item[0].index)
