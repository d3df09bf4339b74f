"""One version in all ranks of an engine: received over a link, or loaded from the agent's stream."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from grpo_worker.common.garbage import collector_paused
from grpo_worker.common.weight_checksum import checksum
from grpo_worker.weightsync.protocol.buffers import dtype_name
from grpo_worker.weightsync.protocol.direct_load import FETCHED, DirectLoad
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.sglang_plugin import engine_ranks
from grpo_worker.weightsync.sglang_plugin.contents import CONTENTS
from grpo_worker.weightsync.sglang_plugin.engine_link import EngineLink
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader, Report, idle_draft
from grpo_worker.weightsync.sglang_plugin.part_loader import PartLoader
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe
from grpo_worker.weightsync.sglang_plugin.recipes import RECIPES
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError, Source, Spec, StagedReceiver
from grpo_worker.weightsync.sglang_plugin.wave_receiver import Received
from grpo_worker.weightsync.transport.rendezvous import TransferError

_loaders: dict[int, DirectLoader] = {}  # by id of the served model
_part_loaders: dict[tuple[int, str], PartLoader] = {}  # by id of the served model, and plan


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
        with collector_paused():
            report = load()
    except (DirectLoadError, TransferError) as error:
        problem = str(error)
    if problem := engine_ranks.first_problem(problem):
        return False, f"direct load failed: {problem}"
    assert report is not None
    CONTENTS.completed(link.models, link.recipes)
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
    load: Callable[[StagedReceiver], Report]
    recipes: Sequence[Recipe] = ()
    if request.parts:
        part_loader, problem = _part_loader(models, device, request.plan_id, buckets, source)
        # All give up together: the others would wait for bytes that the agent does not send.
        problem = engine_ranks.first_problem(problem)
        if problem or part_loader is None:
            return False, f"direct load failed: {problem}"
        load, recipes = part_loader.load, part_loader.recipes
    else:
        recipes = _record(models, buckets) if request.record else ()
        load = _whole_load(models, device, request, buckets)
    receiver, report, problem = StagedReceiver(source), Report(), ""
    try:
        report = load(receiver)
    except (DirectLoadError, TransferError) as error:
        problem = str(error)
    problem = engine_ranks.first_problem(problem)
    if not problem and (missing := _not_loaded(_layers(models), buckets, report)):
        problem = f"no rank of the engine loaded {', '.join(missing[:5])} ({len(missing)} tensors)"
    if problem:
        return False, f"direct load failed: {problem}"
    if recipes:
        CONTENTS.completed(models, recipes)
    answer = {
        "copies": report.copies, "byLoader": report.by_loader, "recorded": report.recorded,
        "seconds": report.seconds, "fingerprints": report.fingerprints,
        "extraBytes": report.extra_bytes, "received": receiver.nbytes,
    }  # fmt: skip
    return True, json.dumps(answer)


def _whole_load(
    models: Sequence[Any], device: str, request: DirectLoad, buckets: list[list[Spec]]
) -> Callable[[StagedReceiver], Report]:
    """Return what loads the whole buckets; see DirectLoader.load."""
    loader = _loaders.setdefault(id(models[0]), DirectLoader(models, device))
    return partial(loader.load, request.plan_id, buckets)


def _part_loader(
    models: Sequence[Any], device: str, plan_id: str, buckets: list[list[Spec]], source: Source
) -> tuple[PartLoader | None, str]:
    """Tell the agent what this rank keeps, and return what loads it, or why there is none."""
    try:
        recipes = _record(models, buckets, source.beat)
        for model, recipe in zip(models[1:], recipes[1:], strict=True):
            if not recipe.kept():
                return None, idle_draft(model)
        key = id(models[0]), plan_id
        loader = _part_loaders.get(key)
        if loader is None or any(a is not b for a, b in zip(loader.recipes, recipes, strict=True)):
            _part_loaders.clear()  # those of another layout, or of parameters that were elsewhere
            loader = _part_loaders[key] = PartLoader(models, recipes, buckets, device)
        source.send_kept(loader.table)
    except Exception as error:  # noqa: BLE001 - a model's loader raises anything
        return None, f"recording what it keeps: {type(error).__name__}: {error}"
    return loader, ""


def _record(
    models: Sequence[Any], buckets: list[list[Spec]], beat: Callable[[], None] = lambda: None
) -> list[Recipe]:
    rows = [TensorRow(s.name, s.shape, dtype_name(s.dtype)) for bucket in buckets for s in bucket]
    return [RECIPES.of(model, rows, beat) for model in models]


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
