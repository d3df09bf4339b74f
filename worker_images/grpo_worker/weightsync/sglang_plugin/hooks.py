"""SGLang plugin: direct loads through the engine's own update routes (SGLang 0.5.16 to 0.5.23).

The hooks wrap SGLang's ``WeightUpdater``. An agent joins an update group by SGLang's own route; the answer
then contains a mark, which tells the agent that this engine can load a whole version by one request to
``/update_weights_from_distributed``. Such a request is recognized by its ``load_format``. All other requests
are passed to SGLang unchanged.
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

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.protocol.agent_stream import STREAM
from grpo_worker.weightsync.protocol.direct_load import AGENT, LINK, MARK, PREFIX, DirectLoad
from grpo_worker.weightsync.sglang_plugin.agent_stream import AgentStream
from grpo_worker.weightsync.sglang_plugin.direct_receiver import DirectReceiver, GroupMember
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader, Report
from grpo_worker.weightsync.sglang_plugin.receivers import DirectLoadError, Spec, StagedReceiver, specs_of
from grpo_worker.weightsync.transport import torch_group
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS, TransferError, connect

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
_LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_drafts: list[Any] = []  # runners of the models that draft for this process's model
_loaders: dict[int, DirectLoader] = {}  # by id of the model
_members: dict[str, GroupMember] = {}  # by name of the transfer group
_streams: dict[str, AgentStream] = {}  # by name


def register() -> None:
    """Register the hooks; entry point of the group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {
        "init_weights_update_group": _on_join,
        "destroy_weights_update_group": _on_leave,
    }
    if tuple(int(part) for part in version("sglang").split(".")[:3]) >= (0, 5, 21):
        hooks |= {"receive_weights_from_distributed": _on_receive, "load_weights_from_distributed": _on_load}
    else:
        hooks["update_weights_from_distributed"] = _on_update
    for name, hook in hooks.items():
        HookRegistry.register(_UPDATER + name, hook, HookType.AROUND)
    HookRegistry.register(_LOAD_MODEL, _on_load_model, HookType.AROUND)


@dataclass(slots=True)
class _Announced:
    """A direct load; its bytes are received while they are loaded.

    ``result``: success and message, once the version was loaded into all models of this process.
    """

    request: DirectLoad
    buckets: list[list[Spec]]
    receiver: StagedReceiver | DirectReceiver
    result: tuple[bool, str] | None = None


def _on_load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(runner, *args, **kwargs)
    if runner.is_draft_worker and runner not in _drafts:
        _drafts.append(runner)
    return result


def _on_join(
    original: Callable[..., Any], updater: Any, master_address: str, master_port: int, rank_offset: int,
    world_size: int, group_name: str, backend: str = "nccl",
) -> Any:  # fmt: skip
    place = master_address, master_port, rank_offset, world_size, group_name
    if group_name.startswith(LINK):
        success, message = _join_transfer_group(updater, backend, *place)
    elif group_name.startswith(STREAM):
        success, message = _join_stream(updater, master_address, master_port, group_name)
    elif group_name.startswith(AGENT):
        success, message = _join_agent_group(updater, *place)
    else:
        success, message = original(updater, *place, backend)
    return success, f"{message} {MARK}" if success else message


def _join_transfer_group(
    updater: Any, backend: str, address: str, port: int, first: int, world: int, name: str
) -> tuple[bool, str]:
    """Join a group of all trainer ranks, followed by all engine ranks.

    ``first``: rank of this engine's first rank. The number of trainer ranks is part of the name.
    """
    for old in list(_members):  # a restarted agent does not know the group that it had joined
        _members.pop(old).group.close()
    trainers, device = int(name.removeprefix(LINK).split("-", maxsplit=1)[0]), torch.device(updater.device)
    try:
        store, rank = connect(address, port), first + updater.tp_rank
        group = join(Backend(backend), store, name, rank, world, trainers, device)
    except (TransferError, ValueError) as error:
        return False, str(error)
    _members[name] = GroupMember(group)
    return True, "joined"


def _join_stream(updater: Any, address: str, port: int, name: str) -> tuple[bool, str]:
    """Connect to the agent, which sends staged versions."""
    for old in list(_streams):  # of an agent that is gone
        _streams.pop(old).close()
    try:
        _streams[name] = AgentStream(address, port, name, updater.tp_rank)
    except OSError as error:
        return False, f"the agent at {address}:{port}: {error!r}"
    return True, "joined"


def _join_agent_group(
    updater: Any, address: str, port: int, first: int, world: int, name: str
) -> tuple[bool, str]:
    """Join an agent's group as SGLang does, but with a short timeout.

    SGLang would wait for half an hour. Requests of an agent that gave up or died are still in the scheduler's
    queue, and every later request waits for them.
    """
    limit = timedelta(seconds=JOIN_SECONDS)
    try:
        store = PrefixStore(name, connect(address, port))
        group = torch_group.join(store, name, first + updater.tp_rank, world, limit, "gloo")
    except RuntimeError as error:
        return False, str(error)
    updater._model_update_group[name] = group
    return True, "joined"


def _on_leave(original: Callable[..., Any], updater: Any, group_name: str) -> Any:
    if (stream := _streams.pop(group_name, None)) is not None:
        stream.close()
        return True, "left"
    member = _members.pop(group_name, None)
    if member is None:
        return original(updater, group_name)
    member.group.close()
    return True, "left"


def _on_receive(
    original: Callable[..., Any], updater: Any, *, load_format: str | None = None, **fields: Any
) -> Any:
    if not (load_format or "").startswith(PREFIX):
        return original(updater, load_format=load_format, **fields)
    return _announce(updater, load_format or "", **fields)


def _on_load(original: Callable[..., Any], updater: Any, weights: Any) -> tuple[bool, str]:
    if not isinstance(weights, _Announced):
        success, message = original(updater, weights)
        return success, message
    # SGLang calls this for the served model and then for each draft; the first call loads all of them, and
    # the answer to the request is that of the last call.
    if weights.result is None:
        if updater.get_model_runner().is_draft_worker:
            return False, "a direct load writes the served model and its drafts together: use selector all"
        weights.result = _load_version(updater, weights)
    return weights.result


def _on_update(
    original: Callable[..., Any], updater: Any, names: Any, dtypes: Any, shapes: Any, group_name: Any,
    load_format: str | None = None,
) -> Any:  # fmt: skip
    if not (load_format or "").startswith(PREFIX):
        return original(updater, names, dtypes, shapes, group_name, load_format)
    fields = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name}
    return _load_version(updater, _announce(updater, load_format or "", **fields))


def _announce(
    updater: Any, load_format: str, *, names: Sequence[str], dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]], group_name: str,
) -> _Announced:  # fmt: skip
    """Parse a direct load. Raises ValueError if its buckets do not match the request's names."""
    request = DirectLoad.from_load_format(load_format)
    if sum(request.counts) != len(names) or 0 in request.counts:
        raise ValueError(f"buckets of {sum(request.counts)} tensors for {len(names)} names")
    rows = iter(zip(names, map(_dtype, dtypes), shapes, strict=True))
    buckets = [specs_of(islice(rows, count)) for count in request.counts]
    if group_name in _members:
        return _Announced(request, buckets, DirectReceiver(request, _members[group_name], buckets))
    if group_name not in _streams:
        raise ValueError(f"{group_name} has not been joined")
    return _Announced(request, buckets, StagedReceiver(_streams[group_name]))


def _dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def _load_version(updater: Any, announced: _Announced) -> tuple[bool, str]:
    """Load a version; return whether it succeeded, and the report as JSON or the error."""
    model, drafts = updater.get_model(), [runner.model for runner in _drafts]
    loader = _loaders.setdefault(id(model), DirectLoader([model, *drafts], updater.device))
    report, problem = Report(), ""
    try:
        report = loader.load(announced.request.plan_id, announced.buckets, announced.receiver)
        _publish_needed_ranges(loader, announced)
    except (DirectLoadError, TransferError) as error:
        problem = str(error)
    problem = _first_problem(problem or None)
    layers = None if drafts else int(model.config.num_hidden_layers)
    if not problem and (missing := _not_loaded(layers, announced, report)):
        problem = f"no rank of the engine loaded {', '.join(missing[:5])} ({len(missing)} tensors)"
    if problem:
        return False, f"direct load failed: {problem}"
    answer = {
        "copies": report.copies, "byLoader": report.by_loader, "recorded": report.recorded,
        "seconds": report.seconds, "fingerprints": report.fingerprints,
        "extraBytes": report.extra_bytes, "received": announced.receiver.nbytes,
    }  # fmt: skip
    return True, json.dumps(answer)


def _publish_needed_ranges(loader: DirectLoader, announced: _Announced) -> None:
    """Publish the byte ranges that this rank needs, once for each transfer group. Raises TransferError."""
    receiver = announced.receiver
    if not isinstance(receiver, DirectReceiver) or receiver.partial:
        return
    used = loader.used_ranges(announced.request.plan_id, announced.buckets)
    if used is not None:
        receiver.publish_needed_ranges(used)


def _gather(value: Any) -> list[Any]:
    """Return the value of every rank of the engine."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return [value]
    values = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values


def _first_problem(problem: str | None) -> str:
    """Return the first problem of any rank of the engine, or an empty text: all ranks fail together."""
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(_gather(problem)) if text]
    return problems[0] if problems else ""


def _not_loaded(layers: int | None, announced: _Announced, report: Report) -> list[str]:
    """Return the names that no rank loaded, because a model's loader drops unknown tensors silently.

    ``layers``: number of layers of an engine without drafts. Layers after the last one are ignored then; an
    engine with drafts loads them too.
    """
    if not any(_gather(report.recorded)):
        return []
    loaded = set().union(*_gather(report.loaded))
    names = (spec.name for bucket in announced.buckets for spec in bucket)
    return [name for name in names if name not in loaded and (layers is None or _layer(name) < layers)]


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") and parts[2].isdigit() else -1
