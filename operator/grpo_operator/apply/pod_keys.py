"""Keys of the pods: Secrets that the operator creates, and the tokens of its own calls.

The operator reads the master key and the epochs of a namespace, but never the Secret of a job or pool: it
derives that key again. So it may read two Secrets by name, and create others.
"""

import base64
import logging
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from kubernetes.client import ApiException

from grpo_operator.api.keys import Epochs, api_key, owner_key, secret_data, token
from grpo_operator.api.names import (
    API_KEY,
    EPOCH,
    EPOCH_SECRET,
    KEY,
    MASTER_SECRET,
    ROTATE_ANNOTATION,
    api_secret,
    key_secret,
)
from grpo_operator.api.v1alpha1.status import KeyScope
from grpo_operator.kuberay_client.kube import MANAGER, MERGE, Kube
from grpo_operator.render.metadata import metadata

log = logging.getLogger(__name__)
_BYTES = 32
_CACHES_IN_OVERLAP = 5  # reads of the Secrets within the time in which pods see a new epoch
_PROVIDED_SECONDS = 600.0  # a deleted Secret of a job or pool is created again after this time
LABELS = {"app.kubernetes.io/managed-by": MANAGER}


class PodKeys:
    """Keys by namespace and owner. Master keys and epochs are created with the first pods of a namespace.

    ``overlap``: seconds within which all pods see a new epoch.
    """

    def __init__(self, kube: Kube, overlap: float, clock: Callable[[], float] = time.time) -> None:
        self._kube = kube
        self._overlap = overlap
        self._clock = clock
        self._cache_seconds = overlap / _CACHES_IN_OVERLAP
        self._masters: dict[str, tuple[str, float]] = {}  # and the time of the read
        self._epochs: dict[str, tuple[Epochs, float]] = {}
        self._provided: dict[tuple[str, str], float] = {}  # time by namespace and name

    async def provide(self, owner: dict[str, Any], scope: KeyScope, pool: str | None = None) -> None:
        """Create the Secrets that the owner's pods mount. Raises ApiException when that fails.

        ``pool``: name of the shared pool that a job uses.
        """
        meta = owner["metadata"]
        master = await self.master(meta["namespace"])
        if scope == "namespace":
            return
        await self._current(meta["namespace"])
        await self.provide_once(metadata(owner, key_secret(owner), LABELS), secret_data(master, owner, pool))

    async def provide_api_key(self, pool: dict[str, Any]) -> None:
        """Create the Secret with the API key of a pool that serves its model. Raises ApiException."""
        master = await self.master(pool["metadata"]["namespace"])
        described = metadata(pool, api_secret(pool), LABELS)
        await self.provide_once(described, {API_KEY: api_key(master, pool)})

    async def provide_once(self, described: dict[str, Any], content: dict[str, str]) -> None:
        """Create a Secret that never changes. ``described``: its metadata."""
        place = described["namespace"], described["name"]
        if not self._is_fresh(self._provided.get(place, 0.0), _PROVIDED_SECONDS):
            await self._create(_secret(described, content, immutable=True))
            self._provided[place] = self._clock()

    async def token(self, owner: dict[str, Any], scope: KeyScope) -> str:
        """Return the token of a call to the owner's pods. Raises ApiException."""
        namespace = owner["metadata"]["namespace"]
        master = await self.master(namespace)
        if scope == "namespace":
            return master
        epochs = await self._current(namespace)
        return token(owner_key(master, owner), epochs.sent(self._clock()))

    async def master(self, namespace: str) -> str:
        """Return the namespace's master key; create it if needed."""
        key, read = self._masters.get(namespace, ("", 0.0))
        if not key or not self._is_fresh(read, self._cache_seconds):
            new = {KEY: secrets.token_hex(_BYTES)}
            seen = await self._read_or_create(namespace, MASTER_SECRET, new, immutable=True)
            key = _entry(seen, KEY)
            self._masters[namespace] = key, self._clock()
        return key

    async def _current(self, namespace: str) -> Epochs:
        """Return the namespace's epochs; create them if needed, and begin a new one on request."""
        epochs, read = self._epochs.get(namespace, (None, 0.0))
        if epochs is None or not self._is_fresh(read, self._cache_seconds):
            # Epochs that were deleted come back as they were: pods have no others.
            new = epochs or Epochs(secrets.token_hex(_BYTES), self._clock(), None, self._overlap)
            seen = await self._read_or_create(namespace, EPOCH_SECRET, {EPOCH: new.text()})
            epochs = await self._rotated(seen, _epochs_in(seen))
            self._epochs[namespace] = epochs, self._clock()
        return epochs

    async def _rotated(self, seen: dict[str, Any], epochs: Epochs) -> Epochs:
        """Return the epochs after a new one has begun, if an annotation asks for it and none is beginning."""
        meta, now = seen["metadata"], self._clock()
        if ROTATE_ANNOTATION not in (meta.get("annotations") or {}) or not epochs.settled(now):
            return epochs
        following = epochs.next(secrets.token_hex(_BYTES), now, self._overlap)
        change = {name: meta[name] for name in ("name", "namespace", "resourceVersion")}
        patch = {
            "metadata": change | {"annotations": {ROTATE_ANNOTATION: None}},
            "data": _encoded({EPOCH: following.text()}),
        }
        try:
            await self._kube.patch("api/v1", "secrets", patch, MERGE)
        except ApiException as error:  # jobs go on in the old epoch, and the next read tries again
            log.warning("no new epoch in namespace %s: %s", meta["namespace"], error.reason)
            return epochs
        log.info("a new epoch of keys begins in namespace %s", meta["namespace"])
        return following

    async def _read_or_create(
        self, namespace: str, name: str, new: dict[str, str], immutable: bool = False
    ) -> dict[str, Any]:
        seen = await self._kube.get("api/v1", "secrets", namespace, name)
        if seen is not None:
            return seen
        manifest = _secret({"name": name, "namespace": namespace, "labels": LABELS}, new, immutable)
        await self._create(manifest)
        # Another replica may have created it first.
        return await self._kube.get("api/v1", "secrets", namespace, name) or manifest

    async def _create(self, manifest: dict[str, Any]) -> None:
        """Create a Secret; one that exists stays as it is."""
        try:
            await self._kube.create("api/v1", "secrets", manifest)
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise

    def _is_fresh(self, since: float, seconds: float) -> bool:
        return self._clock() - since < seconds


def _epochs_in(secret: dict[str, Any]) -> Epochs:
    try:
        return Epochs.read(_entry(secret, EPOCH))
    except ValueError as error:
        raise _unusable(secret, f"an invalid {EPOCH!r} ({error})") from error


def _entry(secret: dict[str, Any], name: str) -> str:
    data = secret.get("data") or {}
    if name not in data:
        raise _unusable(secret, f"no {name!r}")
    return base64.b64decode(data[name]).decode()


def _unusable(secret: dict[str, Any], what: str) -> ApiException:
    name = f"{secret['metadata']['namespace']}/{secret['metadata']['name']}"
    return ApiException(
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        reason=f"Secret {name} has {what}: delete it, and the operator creates a new one",
    )


def _secret(meta: dict[str, Any], content: dict[str, str], immutable: bool) -> dict[str, Any]:
    kind: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": meta}
    return kind | {"data": _encoded(content)} | ({"immutable": True} if immutable else {})


def _encoded(content: dict[str, str]) -> dict[str, str]:
    return {name: base64.b64encode(value.encode()).decode() for name, value in content.items()}
