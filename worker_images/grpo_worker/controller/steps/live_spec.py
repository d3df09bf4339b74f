"""The spec of a job whose file changes while it runs."""

from dataclasses import dataclass

from grpo_worker.controller.live_fields import LiveFields
from grpo_worker.controller.loop_state import LoopState
from grpo_worker.controller.profiles.step_traces import StepTraces
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.validation.validator import Validator
from grpo_worker.rollout.client import RolloutClient


@dataclass(frozen=True, slots=True)
class LiveSpec:
    """Brings changes of the job's file to the state of the loop and to the parts that use these fields."""

    state: LoopState
    live: LiveFields
    board: ProgressBoard
    trainers: TrainerGang
    client: RolloutClient
    traces: StepTraces
    validator: Validator

    def lacks_steps(self) -> bool:
        """Return whether steps are missing, by the job's file as it is now."""
        self.follow()
        return self.state.step < self.state.spec.total_steps

    def follow(self) -> None:
        """Take over what has changed in the job's file. A job that is cut short keeps the steps it has."""
        self.live.look()
        spec = self.state.spec
        total, policy = max(self.live.total_steps, self.state.step), self.live.restart_policy
        if total == spec.total_steps and policy is spec.restart_policy:
            return
        spec = spec.model_copy(update={"total_steps": total, "restart_policy": policy})
        self.state.spec = spec
        self.traces.last_step = self.validator.total_steps = total
        self.client.hang_seconds = float(policy.hang_limit)
        self.board.update(total_steps=total)
        self.trainers.follow(spec)
