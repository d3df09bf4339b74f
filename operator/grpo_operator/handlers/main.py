"""kopf's side: watches fill the cache, and one loop reconciles whatever is there."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import kopf
from kubernetes import client, config
from prometheus_client import Counter, Histogram, start_http_server

from grpo_operator.apply.cache import Cache, store
from grpo_operator.apply.probe import PodProbe
from grpo_operator.apply.writer import Writer
from grpo_operator.handlers.reconcile import Reconciler
from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.plan.names import JOB_LABEL
from grpo_operator.render.settings import load_settings

log = logging.getLogger(__name__)
SETTINGS_FILE = Path(os.environ.get("GRPO_SETTINGS", "/etc/grpo-operator/settings.json"))
LOOK_SECONDS = 1.0
METRICS_PORT = 9090

_SECONDS = Histogram("grpo_reconcile_seconds", "Duration of one reconcile", ["kind"])
_ERRORS = Counter("grpo_reconcile_errors_total", "Reconciles that raised", ["kind"])

cache = Cache()
_wake = asyncio.Event()


@kopf.on.startup()
async def startup(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """Configure kopf and start the reconcile loop."""
    settings.posting.enabled = False  # events are written from state changes, not from logs
    settings.watching.server_timeout = 120
    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    writer = Writer(Kube(client.ApiClient()))
    memo.probe = PodProbe()
    reconciler = Reconciler(cache, writer, memo.probe, load_settings(SETTINGS_FILE))
    start_http_server(METRICS_PORT)
    memo.task = asyncio.create_task(_loop(reconciler))


@kopf.on.cleanup()
async def cleanup(memo: Any, **_: Any) -> None:
    """Stop the loop; running jobs are not touched."""
    memo.task.cancel()
    await memo.probe.close()


async def _loop(reconciler: Reconciler) -> None:
    """Look at everything once a second, or at once after a watch event."""
    while True:
        work = [_one("GRPOJob", reconciler.job, job) for job in list(cache.jobs.values())]
        work += [_one("RolloutPool", reconciler.pool, pool) for pool in list(cache.pools.values())]
        await asyncio.gather(*work)
        try:
            await asyncio.wait_for(_wake.wait(), LOOK_SECONDS)
            await asyncio.sleep(0.1)  # events come in bursts
        except TimeoutError:
            pass
        _wake.clear()


async def _one(kind: str, reconcile: Any, obj: dict[str, Any]) -> None:
    meta = obj["metadata"]
    try:
        with _SECONDS.labels(kind).time():
            await reconcile(obj)
    except Exception:
        _ERRORS.labels(kind).inc()
        log.exception("%s %s/%s", kind, meta["namespace"], meta["name"])


def _key(body: Any) -> tuple[str, str]:
    return body["metadata"]["namespace"], body["metadata"]["name"]


@kopf.on.event("rl.grpo.dev", "v1alpha1", "grpojobs")
async def on_job(event: Any, body: Any, **_: Any) -> None:
    store(cache.jobs, _key(body), event)
    _wake.set()


@kopf.on.event("rl.grpo.dev", "v1alpha1", "rolloutpools")
async def on_pool(event: Any, body: Any, **_: Any) -> None:
    store(cache.pools, _key(body), event)
    _wake.set()


@kopf.on.event("ray.io", "v1", "rayclusters", labels={JOB_LABEL: kopf.PRESENT})
async def on_ray_cluster(event: Any, body: Any, **_: Any) -> None:
    store(cache.ray_clusters, _key(body), event)
    _wake.set()


@kopf.on.event("", "v1", "pods", labels={JOB_LABEL: kopf.PRESENT})
async def on_pod(event: Any, body: Any, **_: Any) -> None:
    store(cache.pods, _key(body), event)
    _wake.set()


@kopf.on.event("", "v1", "configmaps", labels={JOB_LABEL: kopf.PRESENT})
async def on_config_map(event: Any, body: Any, **_: Any) -> None:
    store(cache.children, ("configmaps", *_key(body)), event)


@kopf.on.event("", "v1", "services", labels={JOB_LABEL: kopf.PRESENT})
async def on_service(event: Any, body: Any, **_: Any) -> None:
    store(cache.children, ("services", *_key(body)), event)


@kopf.on.event("", "v1", "nodes")
async def on_node(event: Any, body: Any, **_: Any) -> None:
    store(cache.nodes, body["metadata"]["name"], event)
