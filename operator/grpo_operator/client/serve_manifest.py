"""Manifest of a RolloutPool that serves an export of a job (pure)."""

import copy
from typing import Any

from grpo_operator.api.base import API_VERSION, LONGEST_NAME
from grpo_operator.api.catalog.presets import PRESET
from grpo_operator.api.names import STORE_MOUNT

_MOUNT = "/models"
# Fields of the job's engines that a server of users does without, or has defaults of its own for.
_OF_TRAINING = (
    "deterministic", "doubleBuffer", "quantization", "returnRoutedExperts", "routedExpertsGibibytes",
    "tokenizer",
)  # fmt: skip
_KEPT = ("resources", "nodeSelector", "image", "podTemplate", "evictionSeconds")
_OF_JOBS = ("evictTrainers", "tls")


def served(
    job: dict[str, Any], engines: dict[str, Any], export: str, name: str, replicas: int, quantization: str
) -> dict[str, Any]:
    """Return the manifest of RolloutPool ``name``, which serves ``export`` with engines like the job's.

    ``engines``: its rollout.template, or the spec of its shared pool. ``export``: directory inside the job's
    pods. ``quantization``: of the export. Raises ValueError for a name that is too long, or an export that is
    in no file system.
    """
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{name}: a RolloutPool's name has at most {LONGEST_NAME} characters: give --name")
    spec = copy.deepcopy(job["spec"])
    given = copy.deepcopy(engines)
    engine = {key: value for key, value in given.get("engine", {}).items() if key not in _OF_TRAINING}
    if spec.get("mode") == "colocated":
        engine.pop("memoryFraction", None)  # it leaves room for the trainers
    scheduling = {key: value for key, value in spec.get("scheduling", {}).items() if key not in _OF_JOBS}
    if "tls" in spec.get("scheduling", {}):
        scheduling["tls"] = {}  # a certificate of the user's own is for the name of the job
    kept = {key: given[key] for key in _KEPT if key in given}
    return {
        "apiVersion": API_VERSION,
        "kind": "RolloutPool",
        "metadata": {"name": name, "namespace": job["metadata"]["namespace"]},
        "spec": {
            "replicas": replicas,
            "model": _model(spec, export),
            "serve": {},
            "engine": engine | ({} if quantization == "none" else {"quantization": quantization}),
            **kept,
            **({"scheduling": scheduling} if scheduling else {}),
        },
    }


def _model(spec: dict[str, Any], export: str) -> dict[str, Any]:
    """Return ``model`` of the pool: the export, in the job's store, which its pods mount read-only."""
    store, model = spec["checkpoint"]["store"], spec["model"]
    if store.get("uri"):
        raise ValueError(
            f"{export}: engines read models from file systems: copy the export to a PersistentVolumeClaim, "
            "and name it in model.volume.pvc of a RolloutPool with spec.serve"
        )
    inside = export.removeprefix(f"{STORE_MOUNT}/")
    folder, _, directory = inside.rpartition("/")
    if store.get("pvc"):
        path, volume = f"{_MOUNT}/{inside}", {"pvc": store["pvc"]}
    else:
        path, volume = f"{_MOUNT}/{directory}", {"path": f"{store['path'].rstrip('/')}/{folder}"}
    found: dict[str, Any] = {"path": path, "volume": {"mountPath": _MOUNT} | volume}
    preset = model["path"].removeprefix(PRESET) if model["path"].startswith(PRESET) else None
    architecture = model.get("architecture") or preset
    if architecture:
        found["architecture"] = architecture
    if model.get("multiTokenPrediction"):
        found["multiTokenPrediction"] = True
    return found
