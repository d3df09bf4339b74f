"""Entry point of the operator: kopf's watches fill the cache, and one loop reconciles from it."""

import asyncio
import logging
import os
import socket
import ssl
import time
from functools import partial
from pathlib import Path
from typing import Any

import kopf
from kubernetes import client, config
from prometheus_client import REGISTRY, start_http_server

from grpo_operator.api.names import OWNER_LABELS, Owner, owner_in_labels, owner_of
from grpo_operator.apply.gpu_ledger import GpuLedger
from grpo_operator.apply.pod_certificates import PodCertificates
from grpo_operator.apply.pod_keys import PodKeys
from grpo_operator.apply.writer import Writer
from grpo_operator.handlers.background import Pauses, keep_running, succeeds
from grpo_operator.handlers.gpu_health import GpuHealth
from grpo_operator.handlers.health import Health, HealthCollector, HealthServer
from grpo_operator.handlers.job_times import JobTimesCollector
from grpo_operator.handlers.kopf_storage import NoProgress, NullDiffBase
from grpo_operator.handlers.leader import Leader, lease_name
from grpo_operator.handlers.metrics import JobCollector
from grpo_operator.handlers.reconcile_loop import Loop
from grpo_operator.handlers.reconcilers.admission_round import AdmissionRound
from grpo_operator.handlers.reconcilers.context import ReconcileContext
from grpo_operator.handlers.tasks import Tasks
from grpo_operator.handlers.workqueue import WorkQueue
from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.observe.cache import Cache, key_of
from grpo_operator.observe.freshness import Freshness
from grpo_operator.observe.outage_watch import OutageWatch
from grpo_operator.observe.pod_client import PodClient
from grpo_operator.observe.pod_poller import PodPoller
from grpo_operator.observe.prerequisites import Prerequisites
from grpo_operator.observe.relist import Relist
from grpo_operator.observe.watched_kinds import WATCHED, Watched
from grpo_operator.plan.capacity.feasibility import node_capacity
from grpo_operator.settings import load_settings

log = logging.getLogger(__name__)
SETTINGS_FILE = Path(os.environ.get("GRPO_SETTINGS", "/etc/grpo-operator/settings.json"))
METRICS_PORT = int(os.environ.get("GRPO_METRICS_PORT", "9090"))
HEALTH_PORT = int(os.environ.get("GRPO_HEALTH_PORT", "9091"))
IDENTITY = os.environ.get("POD_NAME") or socket.gethostname()  # in the election of a leader
PAGE = 100  # objects per page of a listing, to limit the memory that unreduced objects take
WATCH_SECONDS = 120  # after which the API server ends a watch, and kopf begins the next
CONNECTIONS = 64  # to the API server that are kept open

cache = Cache()
loop = Loop(cache, WorkQueue())


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def startup(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """Configure kopf and start the background tasks. What fails here no retry heals: the process ends."""
    _configure(settings)
    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    chart = load_settings(SETTINGS_FILE)
    connection = client.Configuration.get_default_copy()
    connection.connection_pool_maxsize = CONNECTIONS
    kube = Kube(client.ApiClient(connection))
    writer, admissions = Writer(kube), AdmissionRound(cache)
    keys = PodKeys(kube, chart.key_overlap_seconds)
    certificates = PodCertificates(keys)
    memo.pod_client = PodClient(partial(_verification, certificates))
    memo.poller = PodPoller(cache, memo.pod_client, lambda owner: loop.enqueue([owner]))
    memo.freshness = Freshness(kube, cache, chart.watch_namespaces)
    context = ReconcileContext(
        cache,
        writer,
        memo.pod_client,
        memo.poller,
        chart,
        admissions,
        keys,
        OutageWatch(cache),
        certificates,
    )
    ledger, relist = GpuLedger(kube, chart.namespace), Relist(kube, cache, chart.watch_namespaces)
    gpu_health = GpuHealth(cache, memo.pod_client, writer, ledger, chart.gpu_health, loop.enqueue)
    memo.leader = leader = Leader(kube, chart.namespace, lease_name(chart.watch_namespaces), IDENTITY)
    prerequisites = Prerequisites(kube, cache)
    tasks = Tasks(loop, context, admissions, relist, prerequisites, gpu_health, memo.freshness, leader)
    health = Health(
        loop, memo.freshness, lambda: relist.waiting_for, time.monotonic, lambda: tasks.on_standby
    )
    memo.probes = HealthServer(health, port=HEALTH_PORT)
    await memo.probes.start()
    for collector in (
        JobCollector(cache, lambda: leader.leads),
        JobTimesCollector(cache, lambda: leader.leads, chart.phase_seconds),
        HealthCollector(health),
    ):
        REGISTRY.register(collector)
    start_http_server(METRICS_PORT)
    memo.tasks = [asyncio.create_task(keep_running(name, run)) for name, run in tasks.all().items()]
    for task in memo.tasks:
        task.add_done_callback(_exit)


async def _verification(certificates: PodCertificates, owner: Owner) -> ssl.SSLContext | None:
    """Return what verifies the pods of an owner; None when the owner is gone."""
    obj = cache.owner(owner)
    return None if obj is None else await certificates.context(obj)


def _configure(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False  # events are written from state changes, not from logs
    settings.watching.server_timeout = WATCH_SECONDS
    # A connection whose other end is gone without a word would never deliver anything.
    settings.watching.client_timeout = WATCH_SECONDS + 30
    # kopf would end the process when one kind cannot be watched for a minute; see handlers/health.py.
    settings.networking.error_backoffs = Pauses()
    settings.watching.chunk_size = PAGE
    for kind in WATCHED:
        if kind.label:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.label
    # An idle worker keeps the whole last event of its object in memory until it ends.
    settings.queueing.idle_timeout = 0.1
    settings.persistence.diffbase_storage = NullDiffBase()
    settings.persistence.progress_storage = NoProgress()
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it logs a line per event of each pod


def _exit(task: asyncio.Task[None]) -> None:
    """Exit the process, so that Kubernetes restarts it: what ends these tasks no retry heals."""
    log.critical(
        "a background task of the operator ended", exc_info=None if task.cancelled() else task.exception()
    )
    os._exit(1)


@kopf.on.cleanup()
async def cleanup(memo: Any, **_: Any) -> None:
    """Stop the background tasks. Running jobs are not affected."""
    for task in memo.tasks:
        task.remove_done_callback(_exit)
        task.cancel()
    await asyncio.gather(*memo.tasks, return_exceptions=True)  # nothing is written any more
    await succeeds("releasing the lease", memo.leader.release)
    memo.poller.stop()
    await memo.probes.stop()
    await memo.pod_client.close()


def _store(memo: Any, plural: str, event: Any) -> None:
    cache.store(plural, event)
    memo.freshness.seen(plural, event["object"])


async def on_job(event: Any, memo: Any, **_: Any) -> None:
    """Handle a GRPOJob event. If its resource claim changed, enqueue every owner: capacity may be free."""
    before = cache.jobs.get(key_of(event["object"]))
    _store(memo, "grpojobs", event)
    loop.enqueue([owner_of(event["object"])])
    if event["type"] == "DELETED" or before is None or _claim(before) != _claim(event["object"]):
        loop.enqueue(cache.owners())


async def on_pool(event: Any, memo: Any, **_: Any) -> None:
    """Handle a RolloutPool event: enqueue its job, or the pool itself and every job that references it."""
    _store(memo, "rolloutpools", event)
    owner = owner_in_labels(event["object"])
    loop.enqueue(
        [owner] if owner else [owner_of(event["object"]), *cache.jobs_of_pool(*key_of(event["object"]))]
    )


async def on_node(event: Any, memo: Any, **_: Any) -> None:
    """Handle a node event: enqueue every owner if its capacity changed, which heartbeats do not do."""
    before = cache.node(event["object"]["metadata"]["name"])
    _store(memo, "nodes", event)
    if (
        event["type"] == "DELETED"
        or before is None
        or node_capacity(before) != node_capacity(event["object"])
    ):
        loop.enqueue(cache.owners())


async def on_child(event: Any, resource: Any, memo: Any, **_: Any) -> None:
    """Handle an event of a child object: enqueue the owner that its label names, or named before."""
    key, owner = key_of(event["object"]), owner_in_labels(event["object"])
    before = cache.owner_of_child(resource.plural, key)
    if owner:
        _store(memo, resource.plural, event)
    else:
        cache.forget(resource.plural, key)
    loop.enqueue(filter(None, {owner, before}))


def _claim(job: Any) -> tuple[Any, ...]:
    """Return the fields whose change affects capacity: generation and phase."""
    return job["metadata"]["generation"], (job.get("status") or {}).get("phase")


def _is_child(labels: Any, body: Any, resource: Any, **_: Any) -> bool:
    """Return whether the object has an owner's label, or has lost it since it was cached."""
    labelled = any(label in labels for label in OWNER_LABELS.values())
    return labelled or cache.owner_of_child(resource.plural, key_of(body)) is not None


def _watch(kind: Watched) -> None:
    handler = {"grpojobs": on_job, "rolloutpools": on_pool, "nodes": on_node}.get(kind.plural, on_child)
    kopf.on.event(kind.group, kind.version, kind.plural, when=_is_child if kind.owned else None)(handler)


for _kind in WATCHED:
    _watch(_kind)
