"""Writes children and statuses by server-side apply, only when they differ, and records events."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from kubernetes.client import ApiException

from grpo_operator.api.base import API_VERSION, Model
from grpo_operator.api.names import Owner, owner_reference
from grpo_operator.kuberay_client.client import RayClusterApi
from grpo_operator.kuberay_client.kube import MERGE, STRATEGIC_MERGE, Kube
from grpo_operator.kuberay_client.models import RayCluster
from grpo_operator.plan.compatibility import declared
from grpo_operator.render.metadata import is_child, is_current, with_hash

_GROUP = f"apis/{API_VERSION}"
_PLURALS = {"GRPOJob": "grpojobs", "RolloutPool": "rolloutpools"}


class Writer:
    """All writes of the operator except Secrets."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._ray = RayClusterApi(kube)

    async def ray_cluster(self, cluster: RayCluster, observed: dict[str, Any] | None) -> None:
        """Apply a RayCluster unless the observed one was made from the same manifest."""
        stamped = _changed(cluster.wire(), observed)
        if stamped:
            await self._ray.apply(cluster.model_copy(update={"metadata": stamped["metadata"]}))

    async def delete_ray_cluster(self, namespace: str, name: str) -> None:
        await self._ray.delete(namespace, name)

    async def child(
        self, group: str, plural: str, manifest: dict[str, Any], observed: dict[str, Any] | None
    ) -> None:
        """Apply a child unless the observed one was made from the same manifest.

        A changed RolloutPool is not reverted: users may scale it.
        """
        stamped = _changed(manifest, observed, shared=plural == "rolloutpools")
        if stamped:
            await self._kube.apply(group, plural, stamped)

    async def is_taken(self, group: str, plural: str, manifest: dict[str, Any]) -> bool:
        """Return whether an object of this name exists that belongs to somebody else."""
        meta = manifest["metadata"]
        found = await self._kube.get(group, plural, meta["namespace"], meta["name"])
        return found is not None and not is_child(found, manifest)

    async def status(
        self, plural: str, owner: dict[str, Any], status: Model, older: dict[str, Any] | None = None
    ) -> bool:
        """Apply a status if it differs from the object's; return whether it was written.

        ``older``: schema of the status in the installed CRD if it lacks fields, which are left out.

        The status is not written when the object has changed since it was read, because it was computed from
        the old object. The change itself enqueues the object for another reconcile.
        """
        new = declared(status.wire(), older or {})
        if new == (owner.get("status") or {}):
            return False
        meta = owner["metadata"]
        manifest = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "metadata": {key: meta[key] for key in ("name", "namespace", "resourceVersion")},
            "status": new,
        }
        try:
            written = await self._kube.apply(_GROUP, plural, manifest, "/status")
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            return False
        owner["status"] = written.get("status") or {}
        owner["metadata"]["resourceVersion"] = written["metadata"]["resourceVersion"]
        return True

    async def annotate(self, plural: str, owner: dict[str, Any], change: dict[str, str | None]) -> bool:
        """Set annotations, or remove those that are None, in one write; return whether it was done.

        It is not done when the object has changed since it was read; see ``status``.
        """
        return await self._patch_metadata(plural, owner, "annotations", change)

    async def set_finalizers(self, plural: str, owner: dict[str, Any], finalizers: list[str]) -> bool:
        """Replace the finalizers in one write; return whether it was done, like ``annotate``."""
        return await self._patch_metadata(plural, owner, "finalizers", finalizers)

    async def _patch_metadata(self, plural: str, owner: dict[str, Any], field: str, change: Any) -> bool:
        meta = owner["metadata"]
        own = {key: meta[key] for key in ("name", "namespace", "resourceVersion")}
        try:
            written = await self._kube.patch(_GROUP, plural, {"metadata": own | {field: change}}, MERGE)
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            return False
        meta[field] = written["metadata"].get(field) or type(change)()
        meta["resourceVersion"] = written["metadata"]["resourceVersion"]
        return True

    async def create_pod(self, manifest: dict[str, Any]) -> None:
        """Create a pod unless one of its name exists already."""
        try:
            await self._kube.create("api/v1", "pods", manifest)
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise

    async def delete_pod(self, pod: dict[str, Any], confirmed: bool = True) -> None:
        """Delete a pod. ``confirmed``: after the kubelet of its node has confirmed that it has ended."""
        meta, grace = pod["metadata"], None if confirmed else 0
        await self._kube.delete("api/v1", "pods", meta["namespace"], meta["name"], meta.get("uid", ""), grace)

    async def node_condition(self, node: dict[str, Any], condition: dict[str, Any]) -> None:
        """Write one condition of a node; those of others stay."""
        patch = {"metadata": {"name": node["metadata"]["name"]}, "status": {"conditions": [condition]}}
        await self._kube.patch("api/v1", "nodes", patch, STRATEGIC_MERGE, "/status")

    async def node_taints(self, node: dict[str, Any], taints: list[dict[str, Any]]) -> None:
        """Replace the taints of a node unless it has changed since it was read. Raises ApiException (409)."""
        meta = {key: node["metadata"][key] for key in ("name", "resourceVersion")}
        await self._kube.patch("api/v1", "nodes", {"metadata": meta, "spec": {"taints": taints}}, MERGE)

    async def uid_of(self, owner: Owner) -> str | None:
        """Return the UID of a GRPOJob or RolloutPool from the API server, or None when it does not exist."""
        obj = await self._kube.get(_GROUP, _PLURALS[owner.kind], owner.namespace, owner.name)
        return str(obj["metadata"]["uid"]) if obj else None

    async def delete_job(self, job: dict[str, Any]) -> None:
        meta = job["metadata"]
        await self._kube.delete(_GROUP, "grpojobs", meta["namespace"], meta["name"])

    async def event(self, owner: dict[str, Any], reason: str, message: str, warning: bool) -> None:
        """Record a Kubernetes event on the object."""
        meta, now = owner["metadata"], datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        reference = owner_reference(owner)
        manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": reference["apiVersion"],
                "kind": reference["kind"],
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "reason": reason,
            "message": message[:1024],
            "type": "Warning" if warning else "Normal",
            "source": {"component": "grpo-operator"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self._kube.create("api/v1", "events", manifest)


def _changed(
    manifest: dict[str, Any], observed: dict[str, Any] | None, shared: bool = False
) -> dict[str, Any] | None:
    """Return the manifest with its digest, or None when the observed object was made from the same one."""
    stamped = with_hash(manifest)
    return None if is_current(stamped, observed, shared) else stamped
