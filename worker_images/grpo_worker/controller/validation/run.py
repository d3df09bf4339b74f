"""Validation of one weight version: responses of engines to all prompts, and their scores."""

import threading
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from grpo_worker.controller.generation.group import Group, GroupClient
from grpo_worker.controller.generation.group_scoring import GroupScoring
from grpo_worker.controller.validation.scores import SetScores
from grpo_worker.controller.validation.sets import ValidationSet
from grpo_worker.rollout.sampling import PromptRefusedError
from grpo_worker.samples.validation_table import ValidatedGroup
from grpo_worker.weightsync.protocol.version import Version


class Keeper(Protocol):
    """Keeps samples of a validation."""

    def asked(self, of: str, prompt: int) -> None:
        """Note that engines are asked for responses to a prompt of the set ``of``."""

    def add(self, group: ValidatedGroup) -> None:
        """Keep the samples of a group, if they are wanted."""


class Keepers:
    """Several keepers as one."""

    def __init__(self, *keepers: Keeper) -> None:
        self._keepers = keepers

    def asked(self, of: str, prompt: int) -> None:
        """Note a prompt; see Keeper."""
        for keeper in self._keepers:
            keeper.asked(of, prompt)

    def add(self, group: ValidatedGroup) -> None:
        """Keep the samples of a group; see Keeper."""
        for keeper in self._keepers:
            keeper.add(group)


def validate(
    sets: Sequence[ValidationSet], version: Version, client: GroupClient, *, n: int, pass_score: float,
    pass_at: Sequence[int], at_once: int, keeper: Keeper, cancelled: threading.Event,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the figures of each set at a weight version.

    ``client``: draws ``n`` responses to a prompt. ``pass_at``: see ``draws``. ``at_once``: prompts whose
    responses are in memory at most. ``keeper``: gets the responses with their scores.

    Raises CancelledError once ``cancelled`` is set, and the errors of generation and reward.
    """
    return {
        one.name: _validate(
            one, version, client, SetScores(n, pass_score, pass_at), at_once, keeper, cancelled
        ).figures()
        for one in sets
    }


def _validate(
    one: ValidationSet, version: Version, client: GroupClient, scores: SetScores, at_once: int,
    keeper: Keeper, cancelled: threading.Event,
) -> SetScores:  # fmt: skip
    scoring, groups, prompts = GroupScoring(), dict[int, Group](), one.prompts()
    try:
        while True:
            for prompt in islice(prompts, at_once - len(groups)):
                keeper.asked(one.name, prompt.index)
                groups[prompt.index] = Group(prompt, version, client, one.reward)
                scoring.add(groups[prompt.index])
            if not groups:
                return scores
            for arrived in scoring.wait(cancelled):
                if isinstance(arrived, PromptRefusedError):
                    del groups[arrived.prompt.index]
                    scores.refused += 1
                    refused = ValidatedGroup(one.name, one.first, arrived.prompt, refused=str(arrived))
                    keeper.add(refused)
                    continue
                prompt, samples, values = arrived
                del groups[prompt.index]
                keeper.add(ValidatedGroup(one.name, one.first, prompt, samples, values))
                scores.add(prompt.index, values, sum(len(sample.ids) for sample in samples))
    finally:
        scoring.cancel()
        for group in groups.values():
            group.cancel()
