"""Pod that removes the folder of a deleted job from its store (pure).

It has what the job's controller has: image, volumes, credentials, user, and the ``podTemplate``, but for init
containers and sidecars. Kubelet starts its process again, with a back-off, until it has succeeded.
"""

import json
import shlex
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
from grpo_operator.settings import OperatorSettings

_RESOURCES = Resources(cpu="100m", memory="512Mi")
# Of the controller's container, which a podTemplate may set, and this one must not have.
_OF_SERVERS = ("ports", "readinessProbe", "livenessProbe", "startupProbe", "lifecycle")


def removal_pod(job: dict[str, Any], spec: GRPOJobSpec, settings: OperatorSettings) -> dict[str, Any]:
    """Return the pod. Its image is not that of the job's time, which may not have the program."""
    template = spec.rollout.template
    parts = job_parts(job, spec, job_weight_path(spec, template) if template else WeightPath(), settings)
    folder = names.job_store(parts.owner.namespace, names.writer(job))
    store = JobStore(parts, spec, folder)
    arguments = (folder, json.dumps(spec.checkpoint.store.wire()))
    program = f"{PYTHON} -m grpo_worker.checkpointing.removal {shlex.join(arguments)}"
    image = spec.image or settings.trainer_image
    # By this name a podTemplate adds environment and mounts to it, such as a proxy's address or a CA.
    container = parts.container(names.CONTROLLER, image, _RESOURCES, command=stoppable(program))
    container["env"] += store.credentials()
    fixed = {key: container[key] for key in ("command", "args", "resources")}
    containers = [store.share_root(container)]
    pod = parts.pod(names.STORE_REMOVAL, containers, spec.controller, parts.off_gpus())
    pod["spec"].setdefault("volumes", []).append(store.volume)
    made = finished(pod, spec.controller, parts.security)
    (merged,) = [found for found in made["spec"]["containers"] if found["name"] == names.CONTROLLER]
    kept = {key: value for key, value in merged.items() if key not in _OF_SERVERS}
    made["spec"] |= {"containers": [kept | fixed], "restartPolicy": "OnFailure"}
    made["spec"].pop("initContainers", None)
    described = metadata(job, names.store_removal(job), made["metadata"]["labels"])
    # The garbage collector would delete it before the job when the deletion is --cascade=foreground.
    for reference in described["ownerReferences"]:
        del reference["blockOwnerDeletion"]
    annotations = made["metadata"].get("annotations") or {}
    described |= {"annotations": annotations} if annotations else {}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": described, "spec": made["spec"]}
