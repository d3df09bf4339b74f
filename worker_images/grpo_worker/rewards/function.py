"""Verifier that runs a user's function or a built-in one."""

import logging
import threading
from collections.abc import Sequence

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.common.reward_parts import Reward
from grpo_worker.rewards.base import Item, RewardError
from grpo_worker.rewards.builtin import BUILTIN
from grpo_worker.rewards.child import Program
from grpo_worker.rewards.process import DeadError, NotStartedError, Outcome
from grpo_worker.rewards.sandbox import Sandbox

log = logging.getLogger(__name__)
# Seconds before each retry to start a process: a full node or a slow filesystem may recover.
START_PAUSES = (1.0, 5.0, 30.0)


class FunctionVerifier:
    """Verifier that runs a function in separate processes."""

    reads_answers = True
    needs_groups = False

    def __init__(self, spec: RewardSpec) -> None:
        if spec.builtin is not None:
            self._name, function = f"spec.reward.builtin={spec.builtin}", BUILTIN[spec.builtin]
        else:
            assert spec.function is not None
            self._name, function = f"spec.reward.function={spec.function}", spec.function
        field = self._name.partition("=")[0]
        program = Program(field, function, spec.timeout_seconds, spec.memory_megabytes, spec.sandbox)
        self._sandbox = Sandbox(program, spec.workers)
        self._stops = spec.on_failure == "stop"
        self._counting = threading.Lock()
        self.failures = 0
        self._warned = False

    def check(self, item: Item) -> None:
        """Judge one answer without retries, so that an error is reported right after the job is applied."""
        try:
            problem = self._call([item], pauses=())[0].problem
        except ConnectionError as error:  # the caller sees the cause and tries again
            raise RewardError(str(error)) from error
        if problem:
            raise RewardError(f"{self._name}: {problem}")

    def score(self, items: Sequence[Item]) -> list[float]:
        """Return one reward per item; a failure gives 0 or, with onFailure: stop, raises RewardError.

        A reward is a Reward if the function returned numbers beside the score.
        Raises ConnectionError when no process starts for a reason outside the function.
        """
        outcomes = self._call(items, START_PAUSES)
        failed = [outcome.problem for outcome in outcomes if outcome.problem]
        with self._counting:
            self.failures += len(failed)
        if failed and self._stops:
            raise RewardError(f"{self._name}: {failed[0]}")
        if failed:
            log.warning(
                "%s: %d of %d answers get 0, the first: %s", self._name, len(failed), len(items), failed[0]
            )
        return [Reward(one.value, one.parts) if one.parts else one.value for one in outcomes]

    def _call(self, items: Sequence[Item], pauses: Sequence[float]) -> list[Outcome]:
        """Judge all items.

        When no process starts, which is not the answers' fault, raises RewardError if the function's module
        is the reason, else ConnectionError: a node or a file system may recover.
        """
        try:
            outcomes = self._sandbox.call([item.request() for item in items], pauses)
        except NotStartedError as error:
            raise ConnectionError(f"{self._name}: {error}; it is tried again") from error
        except DeadError as error:
            raise RewardError(f"{self._name}: {error}") from error
        self._warn(next((outcome.warning for outcome in outcomes if outcome.warning), ""))
        return outcomes

    def _warn(self, warning: str) -> None:
        """Log the first warning; other answers repeat it."""
        with self._counting:
            first, self._warned = not self._warned, self._warned or bool(warning)
        if warning and first:
            log.warning("%s: %s", self._name, warning)
