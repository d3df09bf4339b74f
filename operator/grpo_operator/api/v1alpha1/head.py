"""Ray's head of a job: its resources and pod template, and whether its state outlives it."""

from pydantic import Field

from grpo_operator.api.base import Model, Resources
from grpo_operator.api.v1alpha1.scheduling import PodOverlay
from grpo_operator.api.v1alpha1.volumes import CredentialSpec


class GcsFaultToleranceSpec(Model):
    """Redis in which Ray's head keeps its state (KubeRay: gcsFaultToleranceOptions)."""

    redis_address: str = Field(
        min_length=3,
        max_length=253,
        pattern=r"^(rediss?://)?[A-Za-z0-9.-]+:[0-9]{1,5}$",
        description="host and port of the Redis server, for example redis.ray.svc:6379; rediss:// uses TLS",
    )
    redis_username: CredentialSpec | None = Field(
        None, description="Secret with the name of the user; default: Redis' default user"
    )
    redis_password: CredentialSpec | None = Field(None, description="Secret with the password")


class HeadSpec(Model):
    """The pod of Ray's head, which runs no actors. Its nodes are those of the controller's pod."""

    resources: Resources = Field(
        default_factory=Resources, description="resources of the container; default: for the number of ranks"
    )
    pod_template: PodOverlay | None = Field(None, description="changes to the pod template of the head")
    gcs_fault_tolerance: GcsFaultToleranceSpec | None = Field(
        None,
        description="where the head keeps its state, so that the ranks outlive its loss. Without it the loss "
        "of the head restarts the gang",
    )
