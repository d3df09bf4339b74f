"""The key that the pods of a namespace share, kept in a Secret that the operator makes."""

import base64
import secrets
import time
from http import HTTPStatus
from typing import Any

from kubernetes.client import ApiException

from grpo_operator.api.names import KEY, KEY_SECRET
from grpo_operator.kuberay_client.kube import MANAGER, Kube

_BYTES = 32
_FRESH_SECONDS = 60.0  # a Secret that was replaced is noticed after this long


class AgentSecrets:
    """Keys by namespace. A namespace gets one when its first pods do; it stays until the namespace goes."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[str, tuple[str, float]] = {}

    async def of(self, namespace: str) -> str:
        """The namespace's key. Raises ApiException while there is none and none can be made."""
        key, read = self._known.get(namespace, ("", 0.0))
        if not key or time.monotonic() - read > _FRESH_SECONDS:
            key = await self._read(namespace) or await self._make(namespace)
            self._known[namespace] = key, time.monotonic()
        return key

    async def _read(self, namespace: str) -> str | None:
        found = await self._kube.get("api/v1", "secrets", namespace, KEY_SECRET)
        data = (found or {}).get("data") or {}
        return base64.b64decode(data[KEY]).decode() if KEY in data else None

    async def _make(self, namespace: str) -> str:
        key = secrets.token_hex(_BYTES)
        try:
            await self._kube.create("api/v1", "secrets", _secret(namespace, key))
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            return await self._read(namespace) or _unusable(namespace)
        return key


def _unusable(namespace: str) -> str:
    raise ApiException(
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        reason=f"Secret {namespace}/{KEY_SECRET} has no {KEY!r}: delete it, and the operator makes another",
    )


def _secret(namespace: str, key: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": KEY_SECRET,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": MANAGER},
        },
        "stringData": {KEY: key},
    }
