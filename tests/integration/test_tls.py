"""``scheduling.tls`` on the API server: what the operator creates and keeps, and what users may change."""

from typing import Any

import pytest

from grpo_operator.api.names import TLS_LABEL, tls_config, tls_secret
from grpo_operator.render.certificates import Authority
from support.api_server import POOL, Api, until

CA = Authority("m" * 64, "default").trusted(0)
CONFIG = tls_config("tiny-moe")


@pytest.fixture
def job(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> dict[str, Any]:
    """The manifest of a job with the field, whose pods exist."""
    fake_nodes(3)
    tiny["spec"]["scheduling"] = {"tls": {}}
    done = api.apply(tiny)
    assert done.returncode == 0, done.stderr
    until("its pods", lambda: len(_pods(api)) == 6, 60)
    return tiny


def _pods(api: Api) -> list[dict[str, Any]]:
    return list(api.get("pods", "-l", "rl.grpo.dev/job=tiny-moe")["items"])


@pytest.mark.usefixtures("job")
def test_pods_have_their_secret_and_certificates_come_back(api: Api) -> None:
    pools = {p["metadata"]["labels"][POOL] for p in _pods(api) if TLS_LABEL in p["metadata"]["labels"]}
    assert pools == {"controller", "trainer", "rollout"}
    secret = api.get("secret", tls_secret(api.get("grpojob", "tiny-moe")))
    assert secret["immutable"] and secret["data"].keys() == {"tls.key", "generate"}
    until("the certificates", lambda: api.exists("configmap", CONFIG), 30)
    data = api.get("configmap", CONFIG)["data"]
    assert data.keys() == {"tls.crt", "ca.crt"}
    api.ok("delete", "configmap", CONFIG)
    until("the same certificates", lambda: api.exists("configmap", CONFIG), 30)
    assert api.get("configmap", CONFIG)["data"] == data


def test_the_field_is_fixed(api: Api, job: dict[str, Any]) -> None:
    for tls, refusal in (
        (None, "scheduling.tls is fixed once the object exists"),
        ({"secretName": "mine", "caBundle": CA}, "tls.secretName is fixed once the object exists"),
        ({"caBundle": CA}, "set secretName and caBundle together, or neither"),
    ):
        scheduling = {} if tls is None else {"tls": tls}
        done = api.apply(job | {"spec": job["spec"] | {"scheduling": scheduling}})
        assert done.returncode != 0 and refusal in done.stderr, done.stderr
