"""Sampler of one step: generates and scores groups, with or without dynamic sampling."""

import math
import threading
from collections.abc import Callable, Iterable

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.controller.generation.batch_selection import BatchSelection
from grpo_worker.controller.generation.group import Group, GroupClient, Scorer
from grpo_worker.controller.generation.group_scoring import GroupScoring
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import PromptRefusedError
from grpo_worker.weightsync.protocol.version import Version


class StepSampler:
    """Turns prompts into scored groups. A replay of a step draws the same prompts in the same order."""

    def __init__(
        self, spec: GRPOJobSpec, source: PromptSource, client: GroupClient, reward: Scorer,
        generates: Callable[[bool], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """``generates``: is called when engines begin and end to generate."""
        self._generates = generates
        self._size = spec.data.train_batch_size
        self._filter = spec.algorithm.filter_groups
        self._refusals = max(1, int(spec.data.max_refused_share * self._size))
        self._spare = math.ceil(spec.rollout.over_sample_rate * self._size)
        self._continues = spec.staleness.partial_rollouts
        self._cut: dict[int, Group | None] = {}  # prompts left to the next step, and their groups
        self._kept: tuple[Version | None, dict[int, Group]] = None, {}  # groups of a call that failed
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
        constant. Each answer is scored when it arrives, while others are generated. With overSampleRate
        the batch has the first groups that are scored, and the others are left to the next call.

        Raises UnfitEngineError when engines refuse too many prompts, and the errors of generation and reward.
        After TimeoutError and ConnectionError (no engine serves, no reward server answers) a call with the
        same version uses the groups that were generated before, those that still are, and the tokens of those
        that no engine served.
        """
        most = self._size * (self._filter.max_num_gen_batches if self._filter else 1)
        awaited = frozenset(self._cut)
        earlier = self._earlier_groups(version)
        chosen = BatchSelection(
            self._size, most, self._filter is not None, self._refusals, self._spare, awaited
        )
        scoring = GroupScoring()
        groups: dict[int, Group] = {}
        try:
            while not chosen.complete:
                self._generates(True)
                prompts = self._source.take(chosen.missing, after=skip + chosen.count)
                chosen.start(prompts)
                for prompt in prompts:
                    group = earlier.pop(prompt.index, None) or self._group(prompt, version)
                    groups[prompt.index] = group
                    scoring.add(group)
                generating = scoring.generating
                self._generates(generating)
                with timer.phase("gen" if generating else "reward"):
                    arrivals = scoring.wait(cancelled)
                for arrived in arrivals:
                    if isinstance(arrived, PromptRefusedError):
                        chosen.refuse(arrived)
                    else:
                        chosen.add(*arrived)
            batch, left = chosen.batch(), chosen.cut()
            batch.cut = len(left)
            self._leave(left, groups)
        except (TimeoutError, ConnectionError):
            self._cut = dict.fromkeys(awaited)
            self._kept = version, {index: group for index, group in groups.items() if not group.failed}
            groups.clear()
            raise
        finally:
            self._generates(False)
            scoring.cancel()
            _cancel([*groups.values(), *earlier.values()])
        return batch

    def _group(self, prompt: Prompt, version: int) -> Group:
        return Group(prompt, version, self._client, self._reward)

    def forget(self) -> None:
        """Forget the groups of earlier calls, before a restart goes on with other weights."""
        _cancel(self._earlier_groups(None).values())
        self._client.forget()

    def _earlier_groups(self, version: Version | None) -> dict[int, Group]:
        """Take over the groups of earlier calls that a call with this version may use, by prompt index."""
        (kept_version, kept), self._kept = self._kept, (None, {})
        groups = {index: group for index, group in self._cut.items() if group is not None}
        self._cut = {}
        if kept_version == version:
            return groups | kept
        _cancel(kept.values())
        return groups

    def _leave(self, prompts: list[Prompt], groups: dict[int, Group]) -> None:
        """Leave prompts to the next call: to be continued, or to be generated again with its weights."""
        self._source.put_back(prompts)
        for prompt in prompts[: self._size]:
            self._cut[prompt.index] = groups.pop(prompt.index) if self._continues else None


def _cancel(groups: Iterable[Group]) -> None:
    for group in groups:
        group.cancel()
