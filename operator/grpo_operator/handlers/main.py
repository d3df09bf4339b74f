"""kopf's side: watches fill the cache, and one loop reconciles whatever is there."""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import kopf
from kubernetes import client, config
from kubernetes.client import ApiException
from prometheus_client import REGISTRY, start_http_server
from urllib3.exceptions import HTTPError

from grpo_operator.apply.cache import Cache, store
from grpo_operator.apply.probe import PodProbe
from grpo_operator.apply.prober import Prober
from grpo_operator.apply.writer import Writer
from grpo_operator.handlers.metrics import RECONCILE_SECONDS, RECONCILES, JobCollector
from grpo_operator.handlers.reconcile import Reconciler
from grpo_operator.handlers.work import Key, Work
from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.plan.feasibility import room
from grpo_operator.plan.names import JOB_LABEL
from grpo_operator.render.settings import load_settings

log = logging.getLogger(__name__)
SETTINGS_FILE = Path(os.environ.get("GRPO_SETTINGS", "/etc/grpo-operator/settings.json"))
LOOK_SECONDS = 1.0
KUBERAY_SECONDS = 10.0
METRICS_PORT = 9090

cache = Cache()
work = Work()
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
    memo.prober = Prober(cache, memo.probe, _mark_job)
    reconciler = Reconciler(cache, writer, memo.probe, memo.prober, load_settings(SETTINGS_FILE))
    REGISTRY.register(JobCollector(cache))
    start_http_server(METRICS_PORT)
    memo.tasks = [
        asyncio.create_task(_loop(reconciler, memo.prober)),
        asyncio.create_task(_look_for_kuberay(writer)),
    ]


@kopf.on.cleanup()
async def cleanup(memo: Any, **_: Any) -> None:
    """Stop the loop; running jobs are not touched."""
    for task in memo.tasks:
        task.cancel()
    memo.prober.stop()
    await memo.probe.close()


async def _loop(reconciler: Reconciler, prober: Prober) -> None:
    """Reconcile what is due: at once after a change, and everything now and then."""
    while True:
        prober.start()
        work.forget_all_but([*_job_keys(), *(("RolloutPool", *key) for key in cache.pools)])
        due = work.take(time.monotonic())
        if due:
            reconciler.admit()
            await asyncio.gather(*(_one(reconciler, key) for key in due))
        try:
            await asyncio.wait_for(_wake.wait(), LOOK_SECONDS)
            await asyncio.sleep(0.1)  # events come in bursts
        except TimeoutError:
            pass
        _wake.clear()


async def _look_for_kuberay(writer: Writer) -> None:
    """Jobs wait, and say why, while KubeRay is not installed."""
    while True:
        try:
            found = await writer.kuberay_served()
        except (ApiException, HTTPError) as error:
            log.warning("looking for KubeRay: %s", error)
        else:
            if found != cache.kuberay:
                cache.kuberay = found
                _mark(*_job_keys())
        await asyncio.sleep(KUBERAY_SECONDS)


async def _one(reconciler: Reconciler, key: Key) -> None:
    kind, namespace, name = key
    known = cache.jobs if kind == "GRPOJob" else cache.pools
    obj = known.get((namespace, name))
    if obj is None:
        return
    succeeded = False
    try:
        with RECONCILE_SECONDS.labels(kind).time():
            await (reconciler.job(obj) if kind == "GRPOJob" else reconciler.pool(obj))
        succeeded = True
    except Exception:
        log.exception("%s %s/%s", kind, namespace, name)
    RECONCILES.labels(kind, "success" if succeeded else "error").inc()
    work.done(key, succeeded, time.monotonic())


def _job_keys() -> list[Key]:
    return [("GRPOJob", *key) for key in cache.jobs]


def _mark(*keys: Key) -> None:
    for key in keys:
        work.mark(key, time.monotonic())
    _wake.set()


def _mark_job(namespace: str, name: str) -> None:
    _mark(("GRPOJob", namespace, name))


def _key(body: Any) -> tuple[str, str]:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _owner(body: Any) -> tuple[str, str]:
    """The job that a child's label names."""
    return body["metadata"]["namespace"], body["metadata"]["labels"][JOB_LABEL]


@kopf.on.event("rl.grpo.dev", "v1alpha1", "grpojobs")
async def on_job(event: Any, body: Any, **_: Any) -> None:
    before = cache.jobs.get(_key(body))
    store(cache.jobs, _key(body), event)
    _mark_job(*_key(body))
    if event["type"] == "DELETED" or before is None or _claim(before) != _claim(event["object"]):
        _mark(*_job_keys())  # the others find other room


@kopf.on.event("rl.grpo.dev", "v1alpha1", "rolloutpools")
async def on_pool(event: Any, body: Any, **_: Any) -> None:
    store(cache.pools, _key(body), event)
    job = (body["metadata"].get("labels") or {}).get(JOB_LABEL)
    _mark(("RolloutPool", *_key(body)), *([("GRPOJob", body["metadata"]["namespace"], job)] if job else []))


@kopf.on.event("ray.io", "v1", "rayclusters", labels={JOB_LABEL: kopf.PRESENT})
async def on_ray_cluster(event: Any, body: Any, **_: Any) -> None:
    store(cache.ray_clusters, _key(body), event)
    _mark_job(*_owner(body))


@kopf.on.event("", "v1", "pods", labels={JOB_LABEL: kopf.PRESENT})
async def on_pod(event: Any, body: Any, **_: Any) -> None:
    cache.store_pod(_owner(body), event)
    _mark_job(*_owner(body))


async def _on_child(event: Any, body: Any, resource: Any, **_: Any) -> None:
    store(cache.children, (resource.plural, *_key(body)), event)
    _mark_job(*_owner(body))


for _group, _version, _plural in (
    ("", "v1", "configmaps"),
    ("", "v1", "services"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("networking.k8s.io", "v1", "networkpolicies"),
):
    kopf.on.event(_group, _version, _plural, labels={JOB_LABEL: kopf.PRESENT})(_on_child)


@kopf.on.event("", "v1", "nodes")
async def on_node(event: Any, body: Any, **_: Any) -> None:
    before = cache.nodes.get(body["metadata"]["name"])
    store(cache.nodes, body["metadata"]["name"], event)
    if event["type"] == "DELETED" or before is None or room(before) != room(event["object"]):
        _mark(*_job_keys())  # heartbeats change nothing


def _claim(job: Any) -> tuple[Any, ...]:
    """What decides over the room that a job takes."""
    return job["metadata"]["generation"], (job.get("status") or {}).get("phase")
