"""Restarts of a job's training gang: their limits, and when ranks count as hanging or as stragglers."""

from pydantic import Field

from grpo_operator.api.base import Model

HANG_SECONDS = 240  # of hangSeconds: the smallest default
GRACE_SECONDS = 60  # of graceSeconds: the smallest default


class StragglerPolicy(Model):
    """Ranks that compute more slowly than others with the same work."""

    factor: float = Field(
        1.5,
        ge=1.05,
        le=100,
        description="a rank is slow in a step if its own computing, without the waiting for others, takes "
        "longer than this factor times the median of its pipeline stage",
    )
    steps: int = Field(
        5, ge=1, le=1000, description="number of slow steps in a row after which a rank is a straggler"
    )
    replace: bool = Field(
        False,
        description="true: a straggler counts like a sick GPU, so the pods on its node are replaced, and "
        "after the second strike the node is in quarantine; needs gpuHealth.enabled of the chart. false: "
        "it is only reported",
    )


class AvoidNodesPolicy(Model):
    """Nodes on which training pods or ranks of the job fail again and again, and which it then avoids."""

    failures: int = Field(
        2,
        ge=1,
        le=100,
        description="number of failures on one node after which the job avoids it: ranks of this node alone "
        "died, raised an error or stopped to answer, or became stragglers",
    )
    window_hours: int = Field(
        24, ge=1, le=8760, description="hours after which a failure on a node is forgotten"
    )
    max_nodes_percent: int = Field(
        10,
        ge=0,
        le=100,
        description="largest share of trainer.nodes that the job avoids at a time, in percent, but at least "
        "one node; 0: it avoids no node",
    )


class RestartPolicySpec(Model):
    """Limits on restarts, after which the job fails."""

    max_restarts: int = Field(
        10, ge=0, le=10**6, description="largest number of restarts after errors of the job itself"
    )
    max_same_failures: int = Field(
        3,
        ge=1,
        le=1000,
        description="number of errors of the job itself with the same cause after which the job fails",
    )
    backoff_seconds: int = Field(
        5,
        ge=0,
        le=3600,
        description="delay before the second restart in a row, in seconds; doubles with each further one, "
        "whatever the cause, up to 5 minutes; halves with each step that is finished for the first time",
    )
    hang_seconds: int | None = Field(
        None,
        ge=30,
        le=86400,
        description="seconds without any progress of the trainer ranks (micro-batches, bytes read or "
        "written, buckets sent, collectives) after which the gang counts as hanging and is restarted. The "
        "duration of a call has no limit. Default: eight times the estimated passes of one micro-batch, at "
        "least 240",
    )
    grace_seconds: int | None = Field(
        None,
        ge=1,
        le=86400,
        description="terminationGracePeriodSeconds of the controller's and the training pods: when one is "
        "deleted or evicted, the job saves its finished steps within this time. Pods end as soon as that is "
        "done. Default: one and a half times the estimated update and save, at least 60",
    )
    stragglers: StragglerPolicy = Field(default_factory=StragglerPolicy)
    avoid_nodes: AvoidNodesPolicy = Field(default_factory=AvoidNodesPolicy)

    @property
    def grace_limit(self) -> int:
        """Return ``graceSeconds``, or its smallest default where no plan has set it."""
        return self.grace_seconds or GRACE_SECONDS

    @property
    def hang_limit(self) -> int:
        """Return ``hangSeconds``, or its smallest default where no plan has set it."""
        return self.hang_seconds or HANG_SECONDS
