"""Async client of the API server: server-side apply, get, list names, create, delete.

The official client is synchronous; calls run in threads so that the event loop never blocks. Each namespace
has a lane of its own: its admission webhooks may hang.
"""

import json
from typing import Any

from kubernetes import client
from prometheus_client import Counter

from grpo_operator.kuberay_client.apply_body import apply_body
from grpo_operator.kuberay_client.lanes import Lanes

MANAGER = "grpo-operator"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_APPLY = "application/apply-patch+yaml"
MERGE, STRATEGIC_MERGE = "application/merge-patch+json", "application/strategic-merge-patch+json"
PAGE = 500  # objects per page of a listing
TIMEOUT = (5, 30)  # seconds to connect, and to read the answer
REQUESTS = Counter("grpo_api_requests_total", "Writes to the API server", ["verb", "code"])


class Kube:
    """Thin wrapper around kubernetes.client.ApiClient with plain JSON objects."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._lanes = Lanes()

    async def apply(
        self, group: str, plural: str, manifest: dict[str, Any], subresource: str = ""
    ) -> dict[str, Any]:
        """Apply as field manager of this operator; fields of other managers are taken over (force)."""
        meta = manifest["metadata"]
        path = _path(group, plural, meta.get("namespace", ""), meta["name"]) + subresource
        query = [("fieldManager", MANAGER), ("force", "true")]
        return await self._call("PATCH", path, query, apply_body(manifest), content=_APPLY)

    async def patch(
        self, group: str, plural: str, manifest: dict[str, Any], content: str, subresource: str = ""
    ) -> dict[str, Any]:
        """Change fields of an object that others own too; those that are None are removed.

        ``content``: MERGE or STRATEGIC_MERGE.
        """
        meta = manifest["metadata"]
        path = _path(group, plural, meta.get("namespace", ""), meta["name"]) + subresource
        return await self._call("PATCH", path, [("fieldManager", MANAGER)], manifest, content=content)

    async def delete(
        self, group: str, plural: str, namespace: str, name: str, uid: str = "", grace: int | None = None
    ) -> None:
        """Delete with background propagation; do nothing when it does not exist.

        ``uid``: of the object that is meant; its successor of the same name is not deleted. ``grace``:
        seconds that a pod has to end, 0 to remove it from the API at once; default: what the pod says.
        """
        body: dict[str, Any] = {"propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", _path(group, plural, namespace, name), body=body)
        except client.ApiException as error:
            if error.status != 404 and not (uid and error.status == 409):
                raise

    async def get(self, group: str, plural: str, namespace: str, name: str) -> dict[str, Any] | None:
        """Return the object, or None when it does not exist."""
        return await self._get(_path(group, plural, namespace, name))

    async def create(self, group: str, plural: str, manifest: dict[str, Any]) -> dict[str, Any]:
        path = _path(group, plural, manifest["metadata"]["namespace"])
        return await self._call("POST", path, body=manifest)

    async def names(self, group: str, plural: str, namespace: str, selector: str) -> set[tuple[str, str]]:
        """Return (namespace, name) of every object; empty when the API server does not serve the kind.

        ``namespace``: "" for all. Only metadata is requested, in pages.
        """
        names: set[tuple[str, str]] = set()
        following = ""
        while True:
            page, following = await self._page(group, plural, namespace, selector, following)
            names |= page.keys()
            if not following:
                return names

    async def versions(
        self, group: str, plural: str, namespace: str, selector: str
    ) -> dict[tuple[str, str], str]:
        """Return the resourceVersions of the first PAGE objects by (namespace, name); see ``names``."""
        page, _ = await self._page(group, plural, namespace, selector)
        return page

    async def _page(
        self, group: str, plural: str, namespace: str, selector: str, following: str = ""
    ) -> tuple[dict[tuple[str, str], str], str]:
        """Return the resourceVersions of one page by (namespace, name), and the token of the next, or ""."""
        query = {"limit": str(PAGE), "labelSelector": selector, "continue": following}
        page = await self._get(_path(group, plural, namespace), list(query.items()), _METADATA)
        if page is None:
            return {}, ""
        metadata = [item["metadata"] for item in page["items"] or ()]
        found = {(meta.get("namespace", ""), meta["name"]): str(meta["resourceVersion"]) for meta in metadata}
        return found, str(page["metadata"].get("continue") or "")

    async def kinds(self, group: str) -> set[str]:
        """Return the plural names that the API server serves in ``group`` (``apis/GROUP/VERSION``)."""
        answer = await self._get(f"/{group}")
        return {resource["name"] for resource in answer["resources"]} if answer else set()

    async def schemas(self, group: str) -> dict[str, Any]:
        """Return the OpenAPI schemas of a group and version by name; empty when it is not served."""
        answer = await self._get(f"/openapi/v3/{group}")
        return dict(answer["components"]["schemas"]) if answer else {}

    async def _get(
        self, path: str, query: list[tuple[str, str]] | None = None, accept: str = "application/json"
    ) -> dict[str, Any] | None:
        """Return the answer to a GET request; None for 404."""
        try:
            return await self._call("GET", path, query, accept=accept)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    async def _call(
        self, method: str, path: str, query: list[tuple[str, str]] | None = None, body: Any = None,
        accept: str = "application/json", content: str = "application/json",
    ) -> dict[str, Any]:  # fmt: skip
        return await self._lanes.call(
            _namespace(path), self._request, method, path, query or [], body, accept, content
        )

    def _request(
        self, method: str, path: str, query: list[tuple[str, str]], body: Any, accept: str, content: str
    ) -> dict[str, Any]:
        headers = {"Accept": accept, "Content-Type": content}
        request = self._api.param_serialize(
            method,
            path,
            query_params=query,
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        response = self._api.call_api(*request, _request_timeout=TIMEOUT)
        if method != "GET":
            REQUESTS.labels(method, str(response.status)).inc()
        text = response.read().decode()
        if not 200 <= response.status < 300:
            raise client.ApiException(status=response.status, reason=_message(text)[:1024], body=text)
        data: dict[str, Any] = json.loads(text)
        return data


def namespace_ends(error: client.ApiException) -> bool:
    """Return whether an object was refused because its namespace is being deleted."""
    try:
        causes = json.loads(error.body)["details"]["causes"]
        return any(cause["reason"] == "NamespaceTerminating" for cause in causes)
    except (ValueError, KeyError, TypeError):
        return False


def _message(answer: str) -> str:
    """Return the message of the Status object in an error answer, or the whole answer."""
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer


def _path(group: str, plural: str, namespace: str = "", name: str = "") -> str:
    parts = [group, *(["namespaces", namespace] if namespace else []), plural, *([name] if name else [])]
    return "/" + "/".join(parts)


def _namespace(path: str) -> str:
    """Return the namespace in a path of the API, or ""."""
    before, _, after = path.partition("/namespaces/")
    return after.split("/")[0] if before else ""
