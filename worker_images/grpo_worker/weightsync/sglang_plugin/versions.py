"""One version in all ranks of an engine: received over a link, or loaded from the agent's stream."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_worker.common.weight_checksum import checksum
from grpo_worker.weightsync.protocol.buffers import dtype_name
from grpo_worker.weightsync.protocol.direct_load import FETCHED, DirectLoad
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.sglang_plugin import engine_ranks
from grpo_worker.weightsync.sglang_plugin.engine_link import EngineLink
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader, Report
from grpo_worker.weightsync.sglang_plugin.recipes import RECIPES
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError, Source, Spec, StagedReceiver
from grpo_worker.weightsync.sglang_plugin.wave_receiver import Received
from grpo_worker.weightsync.transport.rendezvous import TransferError

_loaders: dict[int, DirectLoader] = {}  # by id of the served model


def receive_version(link: EngineLink, patience: float) -> tuple[bool, str]:
    """Receive a version over a link; return whether it succeeded, and the report as JSON or the error."""
    return _reported(link, lambda: link.receiver.receive(patience))


def fetch_version(link: EngineLink, version: str, patience: float) -> tuple[bool, str]:
    """Begin to fetch a version beside generation, or look how far it is.

    Returns whether no rank has failed, and a text that contains FETCHED when all ranks have the version.
    """
    fetched, problem = False, ""
    try:
        fetch = link.fetch(version, patience)
        fetched, problem = fetch.result.done(), fetch.problem()
    except TransferError as error:
        problem = str(error)
    of_ranks = engine_ranks.gather((fetched, problem))
    for rank, (_, text) in enumerate(of_ranks):
        if text:
            return False, f"fetch failed: rank {rank}: {text}"
    return True, FETCHED if all(done for done, _ in of_ranks) else "fetching"


def install_version(link: EngineLink, version: str) -> tuple[bool, str]:
    """Install a version that was fetched; return success, and the report as JSON or the error."""

    def install() -> Received:
        fetch = link.fetched(version)
        received, began = fetch.result.result(), time.monotonic()
        fetch.receiver.install()
        # The peak of memory contains what generation allocated meanwhile.
        extra = fetch.receiver.buffer_bytes + fetch.receiver.second_bytes
        seconds = received.seconds | {"install": time.monotonic() - began}
        return replace(received, extra_bytes=extra, seconds=seconds)

    return _reported(link, install)


def _reported(link: EngineLink, load: Callable[[], Received]) -> tuple[bool, str]:
    """Run ``load`` on every rank; return whether it succeeded, and the report as JSON or the error."""
    problem, report = "", None
    try:
        report = load()
    except (DirectLoadError, TransferError) as error:
        problem = str(error)
    if problem := engine_ranks.first_problem(problem):
        return False, f"direct load failed: {problem}"
    assert report is not None
    counted, totals = zip(*engine_ranks.gather((report.counted, report.total)), strict=True)
    answer = {
        "seconds": report.seconds, "received": link.receiver.nbytes,
        "checksum": checksum(sum(counted), sum(totals)), "extraBytes": report.extra_bytes,
    }  # fmt: skip
    return True, json.dumps(answer)


def load_version(
    models: Sequence[Any], device: str, request: DirectLoad, buckets: list[list[Spec]], source: Source
) -> tuple[bool, str]:
    """Load a staged version; return whether it succeeded, and the report as JSON or the error.

    ``models``: the served model, then those that draft for it.
    """
    if request.record:
        rows = [TensorRow(s.name, s.shape, dtype_name(s.dtype)) for bucket in buckets for s in bucket]
        for model in models:
            RECIPES.of(model, rows)
    loader = _loaders.setdefault(id(models[0]), DirectLoader(models, device))
    receiver, report, problem = StagedReceiver(source), Report(), ""
    try:
        report = loader.load(request.plan_id, buckets, receiver)
    except (DirectLoadError, TransferError) as error:
        problem = str(error)
    problem = engine_ranks.first_problem(problem)
    if not problem and (missing := _not_loaded(_layers(models), buckets, report)):
        problem = f"no rank of the engine loaded {', '.join(missing[:5])} ({len(missing)} tensors)"
    if problem:
        return False, f"direct load failed: {problem}"
    answer = {
        "copies": report.copies, "byLoader": report.by_loader, "recorded": report.recorded,
        "seconds": report.seconds, "fingerprints": report.fingerprints,
        "extraBytes": report.extra_bytes, "received": receiver.nbytes,
    }  # fmt: skip
    return True, json.dumps(answer)


def not_kept(link: EngineLink | None, models: Sequence[Any]) -> str:
    """Return an error if no rank keeps a tensor, because a model's loader drops unknown tensors silently."""
    kept = set().union(*engine_ranks.gather(link.kept if link else frozenset()))
    layers = _layers(models)
    names = link.names if link else ()
    missing = [name for name in names if name not in kept and (layers is None or _layer(name) < layers)]
    return f"no rank of the engine loads {', '.join(missing[:5])} ({len(missing)} tensors)" if missing else ""


def _not_loaded(layers: int | None, buckets: Sequence[Sequence[Spec]], report: Report) -> list[str]:
    """Return the names that no rank loaded, because a model's loader drops unknown tensors silently."""
    if not any(engine_ranks.gather(report.recorded)):
        return []
    loaded = set().union(*engine_ranks.gather(report.loaded))
    names = (spec.name for bucket in buckets for spec in bucket)
    return [name for name in names if name not in loaded and (layers is None or _layer(name) < layers)]


def _layers(models: Sequence[Any]) -> int | None:
    """Return the number of layers of an engine without drafts, which ignores layers after the last one."""
    return int(models[0].config.num_hidden_layers) if len(models) == 1 else None


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") and parts[2].isdigit() else -1
