"""TLS of pods: creates what they mount, and verifies them when the operator itself calls them."""

import ssl
import time
from collections.abc import Callable
from typing import Any

from grpo_operator.api.names import owner_of, tls_config, tls_secret
from grpo_operator.api.v1alpha1.tls import TlsSpec
from grpo_operator.apply.pod_keys import LABELS, PodKeys
from grpo_operator.render import tls
from grpo_operator.render.certificates import Authority
from grpo_operator.render.metadata import metadata

Seen = Callable[[str, tuple[str, str]], dict[str, Any] | None]


class PodCertificates:
    """Certificates by owner, which follow from the master key of their namespace."""

    def __init__(self, keys: PodKeys, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._clock = clock
        self._contexts: dict[str, ssl.SSLContext] = {}  # by trusted certificates

    async def provide(self, owner: dict[str, Any], spec: TlsSpec | None, pool: str | None = None) -> None:
        """Create the Secret that the owner's pods mount, if they use TLS. Raises ApiException.

        ``pool``: name of the shared pool that a job uses.
        """
        if spec is not None:
            master = await self._keys.master(owner["metadata"]["namespace"])
            described = metadata(owner, tls_secret(owner), LABELS)
            await self._keys.provide_once(described, tls.tls_secret(master, owner, spec, pool))

    async def children(
        self, owner: dict[str, Any], spec: TlsSpec | None, seen: Seen
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return (plural, manifest) of the ConfigMap with the certificates, if the owner's pods use TLS.

        ``seen``: returns a ConfigMap of the cluster by namespace and name. One that was made with another
        master key stays as it is: the pods have the private key to that one.
        """
        if spec is None:
            return []
        master, own = await self._keys.master(owner["metadata"]["namespace"]), owner_of(owner)
        before = seen("configmaps", (own.namespace, tls_config(own.name)))
        if spec.ca_bundle is None and tls.is_of_another_master(before, master, owner):
            return []
        return [("configmaps", tls.tls_config(master, owner, spec, self._clock()))]

    async def context(self, owner: dict[str, Any]) -> ssl.SSLContext:
        """Return what verifies the certificates of an owner's pods. Raises ApiException, SSLError."""
        given = ((owner["spec"].get("scheduling") or {}).get("tls") or {}).get("caBundle")
        if given is None:
            namespace = owner_of(owner).namespace
            given = Authority(await self._keys.master(namespace), namespace).trusted(self._clock())
        if given not in self._contexts:
            self._contexts[given] = ssl.create_default_context(cadata=given)
        return self._contexts[given]
