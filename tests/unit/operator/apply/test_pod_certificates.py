"""Objects that the operator creates and renews for ``scheduling.tls``."""

import asyncio
import ssl
from typing import Any, cast

from grpo_operator.api.names import MASTER_SECRET, tls_secret
from grpo_operator.api.v1alpha1.tls import TlsSpec
from grpo_operator.apply.pod_certificates import PodCertificates
from grpo_operator.apply.pod_keys import PodKeys
from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.render.certificates import RENEWED, VALID
from support.objects import job
from support.secrets_api import SecretsApi

_SPEC = TlsSpec()
MONTH = RENEWED.total_seconds()


class World:
    """An operator, its clock and the Secrets."""

    def __init__(self) -> None:
        self.kube, self.now = SecretsApi(), 1_800_000_000 // MONTH * MONTH
        self.seen: dict[str, Any] | None = None  # the ConfigMap in the cluster
        self.restart()

    def restart(self) -> None:
        keys = PodKeys(cast(Kube, self.kube), 300, lambda: self.now)
        self.certificates = PodCertificates(keys, lambda: self.now)

    def children(self, spec: TlsSpec | None = _SPEC) -> list[tuple[str, dict[str, Any]]]:
        return asyncio.run(self.certificates.children(job(), spec, self._live))

    def _live(self, plural: str, key: tuple[str, str]) -> dict[str, Any] | None:
        assert (plural, key) == ("configmaps", ("default", "tiny-moe-tls"))
        return self.seen

    def config(self) -> dict[str, Any]:
        ((plural, config),) = self.children()
        assert plural == "configmaps"
        return config

    def context(self, of: dict[str, Any]) -> ssl.SSLContext:
        return asyncio.run(self.certificates.context(of))


def test_nothing_is_created_for_jobs_without_the_field() -> None:
    world = World()
    asyncio.run(world.certificates.provide(job(), None))
    assert world.children(None) == []
    assert not world.kube.asked


def test_the_secret_is_created_once_and_never_read() -> None:
    world = World()
    for _ in range(3):
        asyncio.run(world.certificates.provide(job(), TlsSpec()))
    own = tls_secret(job())
    made = world.kube.secrets[own]
    assert made["immutable"] and made["type"] == "Opaque"
    assert world.kube.asked.count(f"create {own}") == 1
    world.restart()
    asyncio.run(world.certificates.provide(job(), TlsSpec()))
    assert f"get {own}" not in world.kube.asked and world.kube.secrets[own] == made


def test_another_operator_renders_the_same_certificates_until_they_are_renewed() -> None:
    world = World()
    first = world.config()
    world.now += MONTH - 1
    world.restart()
    assert world.config() == first, "an idle operator writes nothing"
    world.now += 1
    assert world.config() != first
    assert {"tls.crt", "ca.crt"} == world.config()["data"].keys()


def test_the_operator_trusts_the_namespaces_ca_and_nothing_else() -> None:
    world = World()
    (authority,) = world.context(job()).get_ca_certs()
    assert "OpenSSL" not in str(authority) and len(world.context(job()).get_ca_certs()) == 1
    assert world.context(job()) is world.context(job())
    world.kube.secrets.clear()
    world.now += 100  # the master key is read again
    assert world.context(job()).get_ca_certs() != [authority]
    assert MASTER_SECRET in world.kube.secrets


def test_certificates_of_another_master_key_stay_because_the_pods_have_its_private_key() -> None:
    world = World()
    world.seen = world.config()
    world.now += MONTH
    assert world.children(), "they are renewed"
    world.kube.secrets.clear()
    world.now += 100  # the master key is read again, and is another one
    assert world.children() == []
    world.seen = None
    assert world.children()


def test_a_changed_config_map_is_mended() -> None:
    world = World()
    world.seen = world.config() | {"data": {"ca.crt": "nothing"}}
    assert world.children()


def test_with_a_bundle_of_the_user_the_operator_trusts_that() -> None:
    world = World()
    bundle = world.config()["data"]["ca.crt"]
    asked = len(world.kube.asked)
    given = job(scheduling={"tls": {"secretName": "mine", "caBundle": bundle + bundle}})
    assert len(world.context(given).get_ca_certs()) == 1 and len(world.kube.asked) == asked


def test_an_absent_operator_may_come_back_within_five_months() -> None:
    assert (VALID - RENEWED).days == 150
