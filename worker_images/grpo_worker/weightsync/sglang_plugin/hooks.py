"""SGLang plugin: direct loads through the engine's own update route (0.5.16 to 0.5.23).

An update group is joined as ever; the answer then carries a mark, by which the agent knows that this
engine takes a whole version in one request of ``/update_weights_from_distributed``, announced by its
``load_format``. Requests of any other form are SGLang's own business.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from grpo_worker.weightsync.protocol.direct_load import AGENT, LINK, MARK, PREFIX, DirectLoad
from grpo_worker.weightsync.sglang_plugin.direct_receiver import DirectReceiver, GroupMembership
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader, Report
from grpo_worker.weightsync.sglang_plugin.receivers import DirectLoadError, Spec, StagedReceiver, specs_of
from grpo_worker.weightsync.transport import torch_group
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS, TransferError, connect

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
_loaders: dict[int, DirectLoader] = {}
_links: dict[str, GroupMembership] = {}


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {
        "init_weights_update_group": _joined,
        "destroy_weights_update_group": _left,
    }
    if tuple(int(part) for part in version("sglang").split(".")[:3]) >= (0, 5, 21):
        hooks |= {"receive_weights_from_distributed": _receive, "load_weights_from_distributed": _load}
    else:
        hooks["update_weights_from_distributed"] = _update
    for name, hook in hooks.items():
        HookRegistry.register(_UPDATER + name, hook, HookType.AROUND)


@dataclass(frozen=True, slots=True)
class _Announced:
    """A direct load that is received while it is loaded."""

    request: DirectLoad
    buckets: list[list[Spec]]
    incoming: StagedReceiver | DirectReceiver


def _joined(
    original: Callable[..., Any], updater: Any, master_address: str, master_port: int, rank_offset: int,
    world_size: int, group_name: str, backend: str = "nccl",
) -> Any:  # fmt: skip
    place = master_address, master_port, rank_offset, world_size, group_name
    if group_name.startswith(LINK):
        success, message = _linked(updater, backend, *place)
    elif group_name.startswith(AGENT):
        success, message = _of_agent(updater, *place)
    else:
        success, message = original(updater, *place, backend)
    # A draft model takes the same weights a second time, which a stream of buckets is not there for.
    drafts = getattr(updater.get_model_runner().server_args, "speculative_algorithm", None)
    return success, f"{message} {MARK}" if success and not drafts else message


def _linked(
    updater: Any, backend: str, address: str, port: int, first: int, world: int, name: str
) -> tuple[bool, str]:
    """Join a link, whose trainer ranks come before the engines'. ``first``: rank of this engine's first."""
    for old in list(_links):  # of an agent that has forgotten it
        _links.pop(old).members.close()
    trainers, device = int(name.removeprefix(LINK).split("-")[0]), torch.device(updater.device)
    try:
        store, rank = connect(address, port), first + updater.tp_rank
        members = join(backend, store, name, rank, world, trainers, device)
    except TransferError as error:
        return False, str(error)
    _links[name] = GroupMembership(members)
    return True, "joined"


def _of_agent(updater: Any, address: str, port: int, first: int, world: int, name: str) -> tuple[bool, str]:
    """Join an agent's group as SGLang does, but not for half an hour: an agent that has given up or died has
    left such requests behind, and every later one waits for them."""
    limit = timedelta(seconds=JOIN_SECONDS)
    try:
        store = PrefixStore(name, connect(address, port))
        group = torch_group.join(store, name, first + updater.tp_rank, world, limit, "gloo")
    except RuntimeError as error:
        return False, str(error)
    updater._model_update_group[name] = group
    return True, "joined"


def _left(original: Callable[..., Any], updater: Any, group_name: str) -> Any:
    link = _links.pop(group_name, None)
    if link is None:
        return original(updater, group_name)
    link.members.close()
    return True, "left"


def _receive(
    original: Callable[..., Any], updater: Any, *, load_format: str | None = None, **fields: Any
) -> Any:
    if not (load_format or "").startswith(PREFIX):
        return original(updater, load_format=load_format, **fields)
    return _announced(updater, load_format or "", **fields)


def _load(original: Callable[..., Any], updater: Any, weights: Any) -> tuple[bool, str]:
    if not isinstance(weights, _Announced):
        success, message = original(updater, weights)
        return success, message
    return _run(updater, weights)


def _update(
    original: Callable[..., Any], updater: Any, names: Any, dtypes: Any, shapes: Any, group_name: Any,
    load_format: str | None = None,
) -> Any:  # fmt: skip
    if not (load_format or "").startswith(PREFIX):
        return original(updater, names, dtypes, shapes, group_name, load_format)
    fields = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name}
    return _run(updater, _announced(updater, load_format or "", **fields))


def _announced(
    updater: Any, load_format: str, *, names: Sequence[str], dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]], group_name: str,
) -> _Announced:  # fmt: skip
    request = DirectLoad.from_load_format(load_format)
    if sum(request.counts) != len(names) or 0 in request.counts:
        raise ValueError(f"buckets of {sum(request.counts)} tensors for {len(names)} names")
    rows = iter(zip(names, map(_dtype, dtypes), shapes, strict=True))
    buckets = [specs_of(islice(rows, count)) for count in request.counts]
    if group_name in _links:
        return _Announced(request, buckets, DirectReceiver(request, _links[group_name], buckets))
    return _Announced(request, buckets, StagedReceiver(request, updater._model_update_group[group_name]))


def _dtype(told: Any) -> torch.dtype:
    return told if isinstance(told, torch.dtype) else getattr(torch, told)


def _run(updater: Any, announced: _Announced) -> tuple[bool, str]:
    model = updater.get_model()
    loader = _loaders.setdefault(id(model), DirectLoader(model, updater.device))
    report, problem = Report(), ""
    try:
        report = loader.load(announced.request.plan_id, announced.buckets, announced.incoming)
        _tell(loader, announced)
    except (DirectLoadError, TransferError) as error:
        problem = str(error)
    problem = _anyones(problem or None)
    if not problem and (untaken := _untaken(model, announced, report)):
        problem = f"no rank of the engine took {', '.join(untaken[:5])} ({len(untaken)} tensors)"
    if problem:
        return False, f"direct load failed: {problem}"
    told = {
        "copies": report.copies, "byLoader": report.by_loader, "recorded": report.recorded,
        "seconds": report.seconds, "fingerprints": report.fingerprints,
        "extraBytes": report.extra_bytes, "received": announced.incoming.nbytes,
    }  # fmt: skip
    return True, json.dumps(told)


def _tell(loader: DirectLoader, announced: _Announced) -> None:
    """Let the trainer ranks of a link know what this rank keeps, once. Raises LinkError."""
    incoming = announced.incoming
    if not isinstance(incoming, DirectReceiver) or incoming.partial:
        return
    kept = loader.kept(announced.request.plan_id, announced.buckets)
    if kept is not None:
        incoming.keep(kept)


def _gathered(mine: Any) -> list[Any]:
    """What every rank of the engine says."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return [mine]
    everyone = [None] * group.world_size
    dist.all_gather_object(everyone, mine, group=group.cpu_group)
    return everyone


def _anyones(problem: str | None) -> str:
    """The first problem that a rank of the engine has, or an empty text: all fail or none."""
    told = [f"rank {rank}: {text}" for rank, text in enumerate(_gathered(problem)) if text]
    return told[0] if told else ""


def _untaken(model: Any, announced: _Announced, report: Report) -> list[str]:
    """Names that no rank took: a loader that drops a tensor says nothing. Layers after the last are
    there for engines that draft."""
    if not any(_gathered(report.recorded)):
        return []
    taken = set().union(*_gathered(report.taken))
    layers = int(model.config.num_hidden_layers)
    names = (spec.name for bucket in announced.buckets for spec in bucket)
    return [name for name in names if name not in taken and _layer(name) < layers]


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") and parts[2].isdigit() else -1
