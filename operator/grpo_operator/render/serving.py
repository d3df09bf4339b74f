"""Serving of a model by a RolloutPool: the API key in its pods, its Service and who may call it (pure)."""

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.names import API_KEY, API_KEY_VARIABLE, ENGINE_PORT, owner_of
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.plan.serving import Serving
from grpo_operator.render.metadata import metadata
from grpo_operator.render.sglang_command import API_KEY_COPY, API_KEY_FOLDER


def share_api_key(pod: dict[str, Any], serving: Serving) -> None:
    """Mount the API key into the engine, the first container of the pod, which copies it for its agent."""
    items = [{"key": API_KEY, "path": API_KEY}]
    volume = {"name": "api", "secret": {"secretName": serving.secret, "items": items}}
    pod["spec"].setdefault("volumes", []).append(volume)
    engine = pod["spec"]["containers"][0]
    engine["volumeMounts"].append({"name": "api", "mountPath": API_KEY_FOLDER, "readOnly": True})
    engine["env"].append({"name": API_KEY_VARIABLE, "value": API_KEY_COPY})


def serve_service(pool: dict[str, Any], spec: RolloutPoolSpec, serving: Serving) -> dict[str, Any]:
    """Return the Service in front of all engines of a pool that are Ready."""
    owner = owner_of(pool)
    first = {names.HOST_INDEX: "0"} if spec.engine.nodes_per_engine > 1 else {}
    port = {"name": serving.scheme, "port": serving.port, "targetPort": ENGINE_PORT, "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pool, owner.serve_service),
        "spec": {"type": "ClusterIP", "selector": owner.labels(names.ROLLOUT) | first, "ports": [port]},
    }
