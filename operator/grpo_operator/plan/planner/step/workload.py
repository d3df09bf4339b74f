"""Work of one training step: samples, lengths and the models that look at them (pure)."""

from dataclasses import dataclass

from grpo_operator.api.v1alpha1.offload import OffloadModule
from grpo_operator.api.v1alpha1.recompute import FULL, Recompute
from grpo_operator.plan.planner.step.lengths import ResponseLengths
from grpo_operator.plan.planner.training.cost import Rows

PACKING = 0.95  # share of a packed micro-batch that sequences fill


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """One step of a job.

    ``prompts``: of the step. ``group``: responses to each prompt. ``mini_batch``: prompts of one optimizer
    step. ``prompt``: mean tokens of a prompt. ``micro_batch``:
    sequences of a padded micro-batch; ``max_tokens``: tokens of a packed one on each of ``context``
    context-parallel GPUs. ``log_prob_micro_batch``, ``log_prob_max_tokens``: those of passes without
    gradients; None: the same. ``offloaded``: modules whose activations wait in host memory. ``reference``,
    ``critic``, ``reward_model``: models that compute beside the policy. ``ahead``: the next step's responses
    are generated while this step trains.
    """

    prompts: int
    group: int
    mini_batch: int
    prompt: float
    lengths: ResponseLengths
    micro_batch: int = 1
    max_tokens: int | None = None
    log_prob_micro_batch: int | None = None
    log_prob_max_tokens: int | None = None
    context: int = 1
    recompute: Recompute = FULL
    offloaded: tuple[OffloadModule, ...] = ()
    reference: bool = True
    critic: bool = False
    reward_model: bool = False
    ahead: bool = False

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> float:
        """Return the tokens of a step, prompts and responses, without padding."""
        return self.samples * (self.prompt + self.lengths.mean)

    @property
    def updates(self) -> int:
        """Return the number of optimizer steps."""
        return max(self.prompts // self.mini_batch, 1)

    def sizes(self, gradients: bool) -> tuple[int, int | None]:
        """Return the sequences of a padded micro-batch, and the tokens of a packed one on each GPU."""
        if gradients:
            return self.micro_batch, self.max_tokens
        return self.log_prob_micro_batch or self.micro_batch, self.log_prob_max_tokens or self.max_tokens

    def rows(self, samples: int, replicas: int, gradients: bool) -> Rows:
        """Return the micro-batches of one of ``replicas`` data-parallel replicas for ``samples`` samples."""
        micro_batch, max_tokens = self.sizes(gradients)
        each = max(samples // replicas, 1)
        mean = self.prompt + self.lengths.mean
        lengths = [self.prompt + length for length in self.lengths.sample(min(each, 1024))]
        if max_tokens is None:
            width = max(lengths)  # every row is as wide as the batch's longest
            return Rows(each / micro_batch, width * micro_batch, width / 2)
        filled = min(max_tokens * self.context * PACKING, each * mean)
        attended = sum(length**2 for length in lengths) / sum(lengths) / 2
        return Rows(max(each * mean / filled, 1.0), filled, attended, filled / mean)
