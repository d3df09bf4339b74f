"""Async access to the API server: server-side apply, create, delete.

The official client is synchronous; calls run in threads so that the event loop never blocks.
"""

import asyncio
import json
from typing import Any

from kubernetes import client
from prometheus_client import Counter

MANAGER = "grpo-operator"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
PAGE = 500  # objects of one page of a listing
TIMEOUT = (5, 30)  # seconds to connect and to answer
REQUESTS = Counter("grpo_api_requests_total", "Writes to the API server", ["verb", "code"])


class Kube:
    """Thin wrapper over kubernetes.client.ApiClient with plain JSON objects."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    async def apply(
        self, group: str, plural: str, manifest: dict[str, Any], subresource: str = ""
    ) -> dict[str, Any]:
        """Server-side apply as this operator; conflicts with other managers are taken over."""
        meta = manifest["metadata"]
        path = _path(group, plural, meta.get("namespace", ""), meta["name"]) + subresource
        query = [("fieldManager", MANAGER), ("force", "true")]
        return await self._call("PATCH", path, query, manifest)

    async def delete(self, group: str, plural: str, namespace: str, name: str) -> None:
        """Delete in the background; fine when it does not exist."""
        body = {"propagationPolicy": "Background"}
        try:
            await self._call("DELETE", _path(group, plural, namespace, name), body=body)
        except client.ApiException as error:
            if error.status != 404:
                raise

    async def get(self, group: str, plural: str, namespace: str, name: str) -> dict[str, Any] | None:
        """The object; None when it does not exist."""
        return await self._found(_path(group, plural, namespace, name))

    async def create(self, group: str, plural: str, manifest: dict[str, Any]) -> dict[str, Any]:
        path = _path(group, plural, manifest["metadata"]["namespace"])
        return await self._call("POST", path, body=manifest)

    async def names(self, group: str, plural: str, namespace: str, selector: str) -> set[tuple[str, str]]:
        """(namespace, name) of every object; none when the API server does not know the kind.

        ``namespace``: "" for all. Only metadata is asked for, in pages.
        """
        found: set[tuple[str, str]] = set()
        path = _path(group, plural, namespace)
        query = {"limit": str(PAGE), "labelSelector": selector}
        while True:
            page = await self._found(path, list(query.items()), _METADATA)
            if page is None:
                return set()
            metadata = [item["metadata"] for item in page["items"] or ()]
            found |= {(meta.get("namespace", ""), meta["name"]) for meta in metadata}
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return found

    async def kinds(self, group: str) -> set[str]:
        """Plural names that the API server serves in a group and version (``apis/GROUP/VERSION``)."""
        found = await self._found(f"/{group}")
        return {resource["name"] for resource in found["resources"]} if found else set()

    async def schemas(self, group: str) -> dict[str, Any]:
        """OpenAPI schemas by name of a group and version; empty when it is not served."""
        found = await self._found(f"/openapi/v3/{group}")
        return dict(found["components"]["schemas"]) if found else {}

    async def _found(
        self, path: str, query: list[tuple[str, str]] | None = None, accept: str = "application/json"
    ) -> dict[str, Any] | None:
        """What a GET answers; None for 404."""
        try:
            return await self._call("GET", path, query, accept=accept)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    async def _call(
        self, method: str, path: str, query: list[tuple[str, str]] | None = None, body: Any = None,
        accept: str = "application/json",
    ) -> dict[str, Any]:  # fmt: skip
        return await asyncio.to_thread(self._request, method, path, query or [], body, accept)

    def _request(
        self, method: str, path: str, query: list[tuple[str, str]], body: Any, accept: str
    ) -> dict[str, Any]:
        apply = method == "PATCH"
        headers = {
            "Accept": accept,
            "Content-Type": "application/apply-patch+yaml" if apply else "application/json",
        }
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
            raise client.ApiException(status=response.status, reason=_message(text)[:1024])
        data: dict[str, Any] = json.loads(text)
        return data


def _message(answer: str) -> str:
    """What a refusing API server says: the message of its Status object."""
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer


def _path(group: str, plural: str, namespace: str = "", name: str = "") -> str:
    parts = [group, *(["namespaces", namespace] if namespace else []), plural, *([name] if name else [])]
    return "/" + "/".join(parts)
