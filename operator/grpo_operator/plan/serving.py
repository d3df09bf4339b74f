"""Address, name and key of the model that a RolloutPool serves (pure)."""

from typing import Any, NamedTuple

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.serve import ServeStatus

_PORTS = {False: ("http", 80), True: ("https", 443)}


class Serving(NamedTuple):
    """A served model. ``name``: of the model in the API. ``secret``: name of the Secret with the API key.

    ``scheme``, ``port``: of the Service.
    """

    name: str
    secret: str
    scheme: str
    port: int


def serving_of(pool: dict[str, Any], spec: RolloutPoolSpec) -> Serving | None:
    """Return what a pool serves; None for a pool that waits for the weights of jobs."""
    if spec.serve is None:
        return None
    name = spec.serve.model_name or pool["metadata"]["name"]
    secret = spec.serve.secret_name or names.api_secret(pool)
    return Serving(name, secret, *_PORTS[spec.scheduling.tls is not None])


def serve_status(pool: dict[str, Any], spec: RolloutPoolSpec) -> ServeStatus | None:
    """Return how clients reach the model of a pool; None for a pool that waits for the weights of jobs."""
    serving = serving_of(pool, spec)
    if serving is None:
        return None
    owner = names.owner_of(pool)
    url = f"{serving.scheme}://{owner.serve_service}.{owner.namespace}.svc"
    return ServeStatus(url=url, model_name=serving.name, secret_name=serving.secret)
