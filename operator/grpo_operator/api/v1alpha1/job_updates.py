"""Updates of a GRPOJob: fields that are fixed, and fields that can change only while it is stopped."""

from grpo_operator.api.rules import UpdateRule, unchanged
from grpo_operator.api.v1alpha1.trainer import TrainerSpec

# Fields of trainer that change only its pods. They may change while there are none, so that a job whose pods
# have too little memory, or fit no node, need not begin again.
_OF_PODS = ("resources", "agent_resources", "pod_template", "node_selector", "eviction_seconds")
_OF_RESULT = [name for name in TrainerSpec.model_fields if name not in _OF_PODS]
_STOPPED = (
    "has(oldSelf.status) && has(oldSelf.status.phase) && (oldSelf.status.phase in ['Succeeded', 'Failed',"
    " 'Invalid'] || (oldSelf.status.phase == 'Suspended' && oldSelf.spec.suspend))"
)
STOPPED_RULES = (
    UpdateRule(
        f"({_STOPPED}) || ({unchanged(TrainerSpec, 'spec.trainer', _OF_PODS)})",
        "trainer.resources, agentResources, podTemplate, nodeSelector and evictionSeconds can change only"
        " while the job is stopped: set suspend to true, wait for the phase Suspended, and change them then",
        ".spec.trainer",
    ),
)
UPDATE_RULES = (
    UpdateRule(
        "oldSelf.model == self.model && oldSelf.data == self.data && oldSelf.seed == self.seed"
        " && oldSelf.algorithm == self.algorithm"
        " && oldSelf.staleness == self.staleness && has(oldSelf.reward) == has(self.reward)"
        " && (!has(self.reward) || oldSelf.reward == self.reward)"
        " && oldSelf.checkpoint.store == self.checkpoint.store",
        "model, data, reward, seed, algorithm, staleness and checkpoint.store are fixed once the job exists:"
        " create a new job",
    ),
    UpdateRule(
        unchanged(TrainerSpec, "trainer", _OF_RESULT),
        "trainer is fixed once the job exists, but for resources, agentResources, podTemplate, nodeSelector"
        " and evictionSeconds: create a new job",
    ),
    UpdateRule(
        "has(oldSelf.rollout.poolRef) == has(self.rollout.poolRef)"
        " && (!has(self.rollout.poolRef) || oldSelf.rollout.poolRef == self.rollout.poolRef)",
        "rollout.poolRef is fixed once the job exists: create a new job",
    ),
    UpdateRule(
        "has(oldSelf.validation) == has(self.validation)"
        " && (!has(self.validation) || oldSelf.validation == self.validation)",
        "validation is fixed once the job exists: create a new job",
    ),
    UpdateRule(
        "has(oldSelf.divergence) == has(self.divergence)"
        " && (!has(self.divergence) || oldSelf.divergence == self.divergence)",
        "divergence is fixed once the job exists: create a new job",
    ),
    UpdateRule(
        "has(oldSelf.checkpoint.resumeFrom) == has(self.checkpoint.resumeFrom)"
        " && (!has(self.checkpoint.resumeFrom)"
        " || oldSelf.checkpoint.resumeFrom == self.checkpoint.resumeFrom)",
        "checkpoint.resumeFrom is fixed once the job exists: create a new job",
    ),
    UpdateRule(
        "has(oldSelf.head.gcsFaultTolerance) == has(self.head.gcsFaultTolerance)"
        " && (!has(self.head.gcsFaultTolerance)"
        " || oldSelf.head.gcsFaultTolerance == self.head.gcsFaultTolerance)",
        "head.gcsFaultTolerance is fixed once the job exists: create a new job",
    ),
    UpdateRule("oldSelf.mode == self.mode", "mode is fixed once the job exists: create a new job"),
    UpdateRule(
        "oldSelf.managedBy == self.managedBy",
        "managedBy is fixed once the job exists: create a new job",
    ),
)
