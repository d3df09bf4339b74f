"""References of a manifest, and whether each is resolved.

An object is resolved by the file itself, by the operator, or by an input of the user, which the comment at
the top names. A file is resolved by its place: in a ConfigMap of the file, in a claim or directory into which
a command of the comment writes it, or in a model or data set of the hub.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_operator.api import names
from grpo_operator.api.catalog.presets import PRESET
from grpo_operator.api.v1alpha1.data import GYM
from grpo_worker.data.tasks import open_gym
from support.manifest_inputs import Inputs, read_inputs
from support.manifests import (
    OWN_KINDS,
    SETTINGS,
    UID,
    cluster,
    documents,
    file_of,
    mount_of,
    named_files,
    pods,
)

Object = tuple[str, str]  # kind and name

_BY_KEY = {
    "claimName": "PersistentVolumeClaim", "secretName": "Secret", "runtimeClassName": "RuntimeClass",
    "priorityClassName": "PriorityClass", "serviceAccountName": "ServiceAccount", "image": "image",
    "topologyKey": "label", "kueue.x-k8s.io/queue-name": "LocalQueue",
    "k8s.v1.cni.cncf.io/networks": "NetworkAttachmentDefinition",
}  # fmt: skip
_BY_NAME = {
    "secret": "Secret", "secretRef": "Secret", "secretKeyRef": "Secret", "imagePullSecrets": "Secret",
    "configMap": "ConfigMap", "configMapRef": "ConfigMap", "configMapKeyRef": "ConfigMap",
}  # fmt: skip
# What every cluster with GPUs has.
_GIVEN = {("resource", name) for name in ("cpu", "memory", "nvidia.com/gpu")} | {
    ("label", "kubernetes.io/hostname")
}
_OTHER_RESOURCES = {"pods", "rayclusters.ray.io"}  # of APIs whose CRDs are not in this repository


def unresolved(text: str) -> list[str]:
    """Return what a manifest refers to and nothing provides, and what its comment names in vain."""
    inputs, made = read_inputs(text), documents(text)
    used = {reference for document in made for reference in objects(document)}
    known = {(document["kind"], document["metadata"]["name"]) for document in made} | inputs.objects
    known |= _api_resources()
    maps = {each["metadata"]["name"]: each["data"] for each in made if each["kind"] == "ConfigMap"}
    return [
        *inputs.problems,
        *(f"{kind} {name}: nothing provides it" for kind, name in sorted(used - known)),
        *(f"{kind} {name}: nothing uses it" for kind, name in sorted(inputs.objects - used)),
        *(problem for document in made for problem in _Files(inputs, maps).missing(document)),
    ]


def objects(document: dict[str, Any]) -> set[Object]:
    """Return the objects and properties of the cluster that a document needs, but for the operator's own."""
    if document["kind"] not in OWN_KINDS:
        return set(_of_policy(document))
    return {*_rendered(cluster(document)), *_of_spec(document["spec"])} - _own(document) - _GIVEN


def _own(document: dict[str, Any]) -> set[Object]:
    """Return what the operator brings."""
    name, owner = document["metadata"]["name"], {"metadata": document["metadata"] | {"uid": UID}}
    secrets = (names.EPOCH_SECRET, names.key_secret(owner), names.tls_secret(owner))
    images = (SETTINGS.trainer_image, SETTINGS.rollout_image)
    return {
        *(("Secret", secret) for secret in secrets),
        *(("ConfigMap", config) for config in (names.job_config(name), names.tls_config(name))),
        *(("image", image) for image in images),
    }


def _of_spec(spec: dict[str, Any]) -> Iterator[Object]:
    """Yield what a spec names and no pod mounts."""
    if reference := spec.get("rollout", {}).get("poolRef"):
        yield "RolloutPool", reference["name"]
    if job := spec.get("checkpoint", {}).get("resumeFrom", {}).get("job"):
        yield "GRPOJob", job


def _of_policy(document: dict[str, Any]) -> Iterator[Object]:
    """Yield the policy of a binding, and the resources and labels that both match."""
    spec = document.get("spec", {})
    if "policyName" in spec:
        yield document["kind"].removesuffix("Binding"), spec["policyName"]
    for rule in spec.get("matchConstraints", {}).get("resourceRules", []):
        for group in rule["apiGroups"]:
            yield from ((f"resource of group {group}", name) for name in rule["resources"])
    selector = spec.get("matchResources", {}).get("namespaceSelector", {})
    yield from (("label", expression["key"]) for expression in selector.get("matchExpressions", []))


def _api_resources() -> set[Object]:
    known = _OTHER_RESOURCES | {file.stem for file in (REPO / "crds").iterdir()}
    parts = [name.partition(".") for name in known]
    return {(f"resource of group {group}", plural) for plural, _, group in parts}


def _rendered(node: Any) -> Iterator[Object]:
    """Yield what an object of Kubernetes refers to, at any depth."""
    if isinstance(node, list):
        for entry in node:
            yield from _rendered(entry)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in _BY_KEY and isinstance(value, str):
            yield from ((_BY_KEY[key], name) for name in value.split(","))
        elif key in _BY_NAME:
            entries = value if isinstance(value, list) else [value]
            yield from ((_BY_NAME[key], entry["name"]) for entry in entries if "name" in entry)
        elif key == "hostPath" and value.get("type") != "DirectoryOrCreate":
            yield "directory", value["path"]
        elif key in ("limits", "requests"):
            yield from (("resource", name) for name in value)
        elif key == "nodeSelector":
            yield from (("label", name) for name in value)
        yield from _rendered(value)


@dataclass(frozen=True, slots=True)
class _Files:
    """Files that a manifest and its user provide. ``maps``: data of the file's ConfigMaps by name."""

    inputs: Inputs
    maps: dict[str, dict[str, str]]

    def missing(self, document: dict[str, Any]) -> Iterator[str]:
        """Yield what a document names and nothing provides, with the reason."""
        if document["kind"] not in OWN_KINDS:
            return
        made = pods(cluster(document))
        for field, value, pools in named_files(document):
            pool = next(pool for pool in pools if pool in made)
            path = file_of(value)
            found = mount_of(made[pool], pool, path) if path else None
            given = document["spec"]["model"] if field == "model.path" else document["spec"].get("data", {})
            uri = given.get("volume", {}).get("uri")
            problem = self._problem(field, value, uri, found) if found else _without_mount(value)
            if problem:
                yield f"{field}={value}: {problem}"

    def _problem(
        self, field: str, value: str, uri: str | None, found: tuple[dict[str, Any], dict[str, Any]]
    ) -> str:
        """Return why a volume does not have a file; "" if it does. ``found``: the volume and its mount."""
        volume, mount = found
        inside = file_of(value).removeprefix(mount["mountPath"]).lstrip("/")
        if "configMap" in volume:
            return _function_problem(value, self.maps.get(volume["configMap"]["name"], {}).get(inside))
        if uri:
            return self._hub_problem(uri, value, inside)
        claim = volume.get("persistentVolumeClaim", {}).get("claimName", "")
        place = volume.get("hostPath", {}).get("path") or self.inputs.claims.get(claim, "")
        source = str(PurePosixPath(place, inside))
        written = self.inputs.models if field.endswith("model.path") else self.inputs.files
        return "" if _matches(source, written) else f"no command at the top writes {source}"

    def _hub_problem(self, uri: str, value: str, inside: str) -> str:
        """Return why a download does not have a file. A model's directory has the model's name."""
        name = uri.removeprefix("hf://").removeprefix("datasets/").partition("@")[0]
        if not uri.startswith("hf://datasets/"):
            same = PurePosixPath(value).name == PurePosixPath(name).name
            return "" if same else f"{uri} has another name"
        known = _matches(inside, self.inputs.data_sets.get(name, set()))
        return "" if known else f"the top names no such file of {name}"


def _without_mount(value: str) -> str:
    """Return why a source that no volume has does not exist."""
    if file_of(value):
        return "no volume has it"
    return "" if value.startswith(PRESET) else _gym_problem(value)


def _matches(pattern: str, files: set[str]) -> bool:
    return any(fnmatch(file, pattern) for file in files)


def _function_problem(value: str, code: str | None) -> str:
    """Return why the file of a ConfigMap does not define a function."""
    if code is None:
        return "the ConfigMap has no such file"
    defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    return "" if value.rpartition(":")[2] in defined else "the file defines no such function"


@lru_cache
def _gym_problem(uri: str) -> str:
    """Return why a data source without a path does not exist. Only those of reasoning-gym can be opened."""
    if not uri.startswith(GYM):
        return "the source is not in this file"
    try:
        open_gym(uri, seed=1)
    except ValueError as error:
        return str(error)
    return ""
