"""Bearer token shared by the pods of a namespace, kept in a Secret that the operator creates."""

import base64
import secrets
import time
from http import HTTPStatus
from typing import Any

from kubernetes.client import ApiException

from grpo_operator.api.names import KEY, KEY_SECRET
from grpo_operator.kuberay_client.kube import MANAGER, Kube

_BYTES = 32
_CACHE_SECONDS = 60.0  # a replaced Secret is noticed after this time


class AgentSecrets:
    """Tokens by namespace. A token is created with the first pods of a namespace and never deleted."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._cache: dict[str, tuple[str, float]] = {}  # token and time of the read

    async def key(self, namespace: str) -> str:
        """Return the namespace's token; create it if needed. Raises ApiException when that fails."""
        key, read = self._cache.get(namespace, ("", 0.0))
        if not key or time.monotonic() - read > _CACHE_SECONDS:
            key = await self._read(namespace) or await self._create(namespace)
            self._cache[namespace] = key, time.monotonic()
        return key

    async def _read(self, namespace: str) -> str | None:
        secret = await self._kube.get("api/v1", "secrets", namespace, KEY_SECRET)
        data = (secret or {}).get("data") or {}
        return base64.b64decode(data[KEY]).decode() if KEY in data else None

    async def _create(self, namespace: str) -> str:
        key = secrets.token_hex(_BYTES)
        try:
            await self._kube.create("api/v1", "secrets", _secret(namespace, key))
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            existing = await self._read(namespace)
            if not existing:
                raise _missing_key(namespace) from error
            return existing
        return key


def _missing_key(namespace: str) -> ApiException:
    return ApiException(
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        reason=f"Secret {namespace}/{KEY_SECRET} has no {KEY!r}: delete it, and the operator creates a "
        "new one",
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
