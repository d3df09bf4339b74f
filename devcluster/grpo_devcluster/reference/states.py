"""Page of the state diagrams, drawn from the tables and functions that the code uses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.names import RESUME_ANNOTATION
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.v1alpha1.status import LayoutStatus, Phase
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.status.grpojob import job_status, refused_status
from grpo_worker.weightsync.agent import engine_state, update

Edge = tuple[str, str, str]  # from, to, label
_START = "[*]"
_TEXT = """# State diagrams

## Job

Phases of a GRPOJob. The operator computes the phase from what it observes and stores no state of its own, so
phases can be skipped.

{job}
Succeeded and Failed stay until the job is [resumed](../guides/checkpoints.md#resume-a-job-that-has-ended). A
job whose spec becomes invalid or infeasible goes to Invalid with the condition `Stalled`. A job is Pending
while Kueue has not admitted it.

## Engine

States of one engine, kept by the agent beside it. The pod is Ready only in SERVING, and the only way there is
the commit of a complete, verified weight version.

{engine}
## Weight update

Phases of one weight update of one engine.

{update}"""


@dataclass(frozen=True, slots=True)
class _Case:
    """A change that leads from one of the phases ``after`` to another. ``step``: steps finished before."""

    label: str
    after: tuple[Phase, ...]
    observed: Observed
    suspend: bool = False
    step: int = 0
    annotations: tuple[tuple[str, str], ...] = ()


_RUNNING = (Phase.STARTING, Phase.TRAINING, Phase.RECOVERING)


def states_page() -> str:
    """Return the page with the diagrams of a job, an engine and an update."""
    return _TEXT.format(
        job=_diagram(_job_edges()), engine=_diagram(_engine_edges()), update=_diagram(_update_edges())
    )


def _diagram(edges: Iterable[Edge]) -> str:
    lines = [f"    {start} --> {end}{f': {label}' if label else ''}\n" for start, end, label in edges]
    return "```mermaid\nstateDiagram-v2\n" + "".join(lines) + "```\n"


def _engine_edges() -> Iterator[Edge]:
    yield _START, engine_state.EngineStateMachine().state, ""
    for state, following in engine_state._EDGES.items():
        yield from ((state, target, "") for target in sorted(following))


def _update_edges() -> Iterator[Edge]:
    yield _START, next(iter(update._NEXT)), ""
    for phase, following in update._NEXT.items():
        yield phase, following, ""
        yield phase, update.Phase.ABORTED, ""


def _job_edges() -> Iterator[Edge]:
    """Yield the transitions that the status functions make in each case."""
    job = {"metadata": {"name": "job", "generation": 1}}
    refused = refused_status(job, "WaitingForCapacity", "", "now", waits=True).phase
    yield _START, str(refused), "applied"
    for case in _cases():
        for phase in case.after:
            after = _phase_after(case, phase)
            if after != phase:
                yield phase, after, case.label


def _cases() -> Iterator[_Case]:
    cluster = RayClusterStatus()
    suspended = RayClusterStatus(state="suspended")

    def reports(phase: Phase) -> Observed:
        return Observed(ray_cluster=cluster, controller=ControllerStatus(phase=phase, attempt=1, step=1))

    created = (Phase.INVALID, Phase.WAITING, Phase.PENDING)
    yield _Case("pods are created", created, Observed(ray_cluster=cluster))
    yield _Case("the gang is ready", (Phase.STARTING, Phase.RECOVERING), reports(Phase.TRAINING))
    yield _Case("a rank or the controller is lost", (Phase.TRAINING,), Observed(ray_cluster=cluster), step=1)
    yield _Case("spec.suspend is set", _RUNNING, Observed(ray_cluster=cluster), suspend=True)
    yield _Case("all pods are gone", (Phase.SUSPENDING,), Observed(ray_cluster=suspended), suspend=True)
    yield _Case("spec.suspend is unset", (Phase.SUSPENDED,), Observed(ray_cluster=cluster), step=1)
    yield _Case("all steps are finished", (Phase.TRAINING,), reports(Phase.SUCCEEDED), step=1)
    yield _Case("the restart limits are reached", _RUNNING, reports(Phase.FAILED), step=1)
    yield _Case("totalSteps is raised", (Phase.SUCCEEDED,), Observed(ray_cluster=suspended), step=1)
    asked = ((RESUME_ANNOTATION, "1"),)
    gone = Observed(ray_cluster=suspended)
    yield _Case("a new value of rl.grpo.dev/resume", (Phase.FAILED,), gone, step=1, annotations=asked)


def _phase_after(case: _Case, phase: Phase) -> str:
    spec = GRPOJobSpec.model_validate(
        {
            "model": {"path": "preset:tiny-moe"},
            "data": {"train": "reasoning-gym:gcd", "trainBatchSize": 8},
            "trainer": {"device": "cpu", "nodes": 1, "gpusPerNode": 1, "miniBatchSize": 8},
            "rollout": {"template": {"engine": {"device": "cpu", "dtype": "float32"}}},
            "checkpoint": {"store": {"path": "/store"}},
            "totalSteps": 2,
            "suspend": case.suspend,
        }
    )
    layout = LayoutStatus(
        world=1, data=1, tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1, stages=[]
    )  # fmt: skip
    status = {"phase": phase.value} | ({"step": case.step} if case.step else {})
    metadata = {"name": "job", "generation": 1, "annotations": dict(case.annotations)}
    job = {"metadata": metadata, "status": status}
    pool = spec.rollout.template or RolloutTemplate()
    return str(job_status(job, spec, layout, pool, case.observed, "now").phase)
