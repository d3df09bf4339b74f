"""TLS of pods: the Secret, the ConfigMap and the volume with their keys and certificates (pure)."""

from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.keys import generate_key, owner_key
from grpo_operator.api.names import CERTIFICATE, GENERATE, PRIVATE_KEY, TRUSTED
from grpo_operator.api.v1alpha1.tls import TlsSpec
from grpo_operator.render.certificates import Authority, private_key
from grpo_operator.render.metadata import metadata

_MOUNT = "/etc/grpo-tls"


@dataclass(frozen=True, slots=True)
class PodTls:
    """TLS of one owner's pods.

    ``name``: in their certificates. ``secret``, ``config``: names of their Secret and ConfigMap.
    ``pair_name``: in the certificates of the shared pool that a job uses, if it uses one.
    """

    spec: TlsSpec
    name: str
    secret: str
    config: str
    pair_name: str | None = None

    def volume(self) -> dict[str, Any]:
        """Return the volume that ``share`` mounts."""
        given = self.spec.secret_name
        own = [GENERATE] if given else [PRIVATE_KEY, GENERATE]
        public = [TRUSTED] if given else [CERTIFICATE, TRUSTED]
        sources = [
            {"secret": {"name": self.secret, "items": _items(own)}},
            {"configMap": {"name": self.config, "items": _items(public)}},
        ]
        if given:
            sources.append({"secret": {"name": given, "items": _items([CERTIFICATE, PRIVATE_KEY])}})
        return {"name": "tls", "projected": {"sources": sources}}

    def share(self, container: dict[str, Any]) -> None:
        """Let a container serve over TLS and call others over it."""
        values = {"GRPO_TLS_DIR": _MOUNT, "GRPO_TLS_NAME": self.name}
        values |= {"GRPO_TLS_PAIR_NAME": self.pair_name} if self.pair_name else {}
        container["env"] += [{"name": name, "value": value} for name, value in values.items()]
        container["volumeMounts"].append({"name": "tls", "mountPath": _MOUNT, "readOnly": True})


def pod_tls(owner: dict[str, Any], spec: TlsSpec | None, pool: str | None = None) -> PodTls | None:
    """Return the TLS of an owner's pods, if its spec asks for it. ``pool``: the shared pool of a job."""
    if spec is None:
        return None
    own = names.owner_of(owner)
    pair = names.Owner("RolloutPool", own.namespace, pool).tls_name if pool else None
    return PodTls(spec, own.tls_name, names.tls_secret(owner), names.tls_config(own.name), pair)


def tls_secret(master: str, owner: dict[str, Any], spec: TlsSpec, pool: str | None) -> dict[str, str]:
    """Return the content of the Secret, which never changes."""
    serving = {"kind": "RolloutPool", "metadata": {"name": pool}} if pool else owner
    content = {GENERATE: generate_key(owner_key(master, serving))}
    return content if spec.secret_name else content | {PRIVATE_KEY: private_key(master, owner)}


def tls_config(master: str, owner: dict[str, Any], spec: TlsSpec, now: float) -> dict[str, Any]:
    """Return the ConfigMap with what is no secret. It changes when certificates are renewed."""
    own = names.owner_of(owner)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(owner, names.tls_config(own.name)),
        "data": _public(Authority(master, own.namespace), owner, spec, now),
    }


def is_of_another_master(seen: dict[str, Any] | None, master: str, owner: dict[str, Any]) -> bool:
    """Return whether a ConfigMap of ``tls_config`` was made with another master key than ``master``."""
    trusted = ((seen or {}).get("data") or {}).get(TRUSTED)
    try:
        return trusted is not None and not Authority(master, names.owner_of(owner).namespace).is_of(trusted)
    except ValueError:  # a user has changed it
        return False


def _public(authority: Authority, owner: dict[str, Any], spec: TlsSpec, now: float) -> dict[str, str]:
    if spec.ca_bundle is not None:
        return {TRUSTED: spec.ca_bundle}
    return {TRUSTED: authority.trusted(now), CERTIFICATE: authority.certificate(owner, now)}


def _items(files: list[str]) -> list[dict[str, str]]:
    return [{"key": file, "path": file} for file in files]
