"""Pods in which one program works on the store of a job (pure).

Such a pod has what the job's controller has: image, volumes, credentials, user, and the ``podTemplate``, but
for init containers and sidecars.
"""

from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import Resources
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.weight_path import WeightPath
from grpo_operator.plan.weight_path import job_weight_path
from grpo_operator.render.metadata import metadata
from grpo_operator.render.pod_template import PYTHON, finished, stoppable
from grpo_operator.render.ray_cluster import job_parts
from grpo_operator.render.store import JobStore
from grpo_operator.render.volumes import model_files
from grpo_operator.settings import OperatorSettings

# Of the controller's container, which a podTemplate may set, and this one must not have.
_OF_SERVERS = ("ports", "readinessProbe", "livenessProbe", "startupProbe", "lifecycle")


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its pod.

    ``command``: of the Python interpreter. ``whole_store``: it may rename and remove folders of the store;
    else it has the mounts of the controller, and the files of the model.
    """

    pool: str  # label of the pod
    name: str
    command: str
    resources: Resources
    restart_policy: str
    whole_store: bool = False


def program_pod(
    job: dict[str, Any], spec: GRPOJobSpec, settings: OperatorSettings, program: Program
) -> dict[str, Any]:
    """Return the pod. Its image is not that of the job's time, which may not have the program."""
    template = spec.rollout.template
    parts = job_parts(job, spec, job_weight_path(spec, template) if template else WeightPath(), settings)
    store = JobStore(parts, spec, names.job_store(parts.owner.namespace, names.writer(job)))
    image = spec.image or settings.trainer_image
    # By this name a podTemplate adds environment and mounts to it, such as a proxy's address or a CA.
    command = stoppable(f"{PYTHON} -m {program.command}")
    container = parts.container(names.CONTROLLER, image, program.resources, command=command)
    container["env"] += store.credentials()
    fixed = {key: container[key] for key in ("command", "args", "resources")}
    if program.whole_store:
        container = store.share_root(container)
    else:
        container["volumeMounts"] += store.mounts()
    pod = parts.pod(program.pool, [container], spec.controller, parts.off_gpus())
    pod["spec"].setdefault("volumes", []).append(store.volume)
    model = None if program.whole_store else model_files(spec.model)
    if model:
        model.mount_into(pod, container)
    made = finished(pod, spec.controller, parts.security)
    (merged,) = [found for found in made["spec"]["containers"] if found["name"] == names.CONTROLLER]
    kept = {key: value for key, value in merged.items() if key not in _OF_SERVERS}
    made["spec"] |= {"containers": [kept | fixed], "restartPolicy": program.restart_policy}
    made["spec"].pop("initContainers", None)
    described = metadata(job, program.name, made["metadata"]["labels"])
    # The garbage collector would delete it before the job when the deletion is --cascade=foreground.
    for reference in described["ownerReferences"]:
        del reference["blockOwnerDeletion"]
    annotations = made["metadata"].get("annotations") or {}
    described |= {"annotations": annotations} if annotations else {}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": described, "spec": made["spec"]}
