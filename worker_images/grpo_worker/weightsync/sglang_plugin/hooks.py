"""SGLang plugin: direct loads through the engine's own update routes (SGLang 0.5.16 to 0.5.23).

The hooks wrap SGLang's ``WeightUpdater``. An agent joins an update group by SGLang's own route; the answer
then contains a mark, which tells the agent that this engine can load a whole version by one request to
``/update_weights_from_distributed``. Such a request is recognized by its ``load_format``. All other requests
are passed to SGLang unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.protocol.agent_stream import STREAM, place_of_rank
from grpo_worker.weightsync.protocol.direct_load import (
    AGENT,
    FETCH,
    KEPT,
    LINK,
    LINK_INSTALL,
    LINK_LOAD,
    MARK,
    PREFIX,
    DirectLoad,
    Fetch,
)
from grpo_worker.weightsync.protocol.region_stream import READ
from grpo_worker.weightsync.sglang_plugin import engine_ranks, whole_update
from grpo_worker.weightsync.sglang_plugin.agent_stream import AgentStream
from grpo_worker.weightsync.sglang_plugin.contents import CONTENTS
from grpo_worker.weightsync.sglang_plugin.engine_link import EngineLink, LinkPlace, join_link
from grpo_worker.weightsync.sglang_plugin.recipes import RECIPES
from grpo_worker.weightsync.sglang_plugin.region_reader import UnreadableError
from grpo_worker.weightsync.sglang_plugin.region_server import RegionServer
from grpo_worker.weightsync.sglang_plugin.staged_receiver import specs_of
from grpo_worker.weightsync.sglang_plugin.versions import (
    fetch_version,
    install_version,
    load_version,
    not_kept,
    receive_version,
)
from grpo_worker.weightsync.transport import torch_group
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS, connect

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
_LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_drafts: list[Any] = []  # runners of the models that draft for this process's model
_links: dict[str, EngineLink] = {}  # by name
_streams: dict[str, AgentStream] = {}  # by name


def register() -> None:
    """Register the hooks; entry point of the group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {
        "init_weights_update_group": _on_join,
        "destroy_weights_update_group": _on_leave,
    }
    if tuple(int(part) for part in version("sglang").split(".")[:3]) >= (0, 5, 21):
        hooks |= {
            "receive_weights_from_distributed": _on_receive,
            "load_weights_from_distributed": _on_load,
            "begin_weight_update": _on_begin,
        }
    else:
        hooks["update_weights_from_distributed"] = _on_update
    for name, hook in hooks.items():
        HookRegistry.register(_UPDATER + name, hook, HookType.AROUND)
    HookRegistry.register(_LOAD_MODEL, _on_load_model, HookType.AROUND)
    HookRegistry.register(whole_update.TARGET, whole_update.on_update, HookType.AROUND)


@dataclass(slots=True)
class _Announced:
    """A version whose bytes are received while they are loaded.

    ``load``: loads it into all models of this process; returns success, and the report or the error.
    ``result``: of ``load``, once it was called.
    """

    load: Callable[[], tuple[bool, str]]
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
    if group_name.startswith(FETCH):
        success, message = _fetch(group_name)
    elif group_name.startswith(LINK):
        success, message = _join_link(updater, backend, *place)
    elif group_name.startswith(READ):
        success, message = _serve_regions(updater, master_address, master_port, group_name)
    elif group_name.startswith(STREAM):
        success, message = _join_stream(updater, master_address, master_port, world_size, group_name)
    elif group_name.startswith(AGENT):
        success, message = _join_agent_group(updater, *place)
    else:
        success, message = original(updater, *place, backend)
    return success, f"{message} {MARK}" if success else message


def _join_link(
    updater: Any, backend: str, address: str, port: int, first: int, world: int, name: str
) -> tuple[bool, str]:
    """Join a link: the group of all trainer ranks, followed by this engine's ranks from ``first`` on."""
    for old in list(_links):  # a restarted agent does not know the link that it had joined
        _links.pop(old).close()
    models = _models(updater)
    problem, link, recorded = "", None, RECIPES.recorded
    try:
        place = LinkPlace(name, address, port, first, world, Backend(backend))
        link = join_link(models, place, updater.tp_rank, _device(updater))
    except (RuntimeError, ValueError) as error:  # the store raises RuntimeError when it is gone
        problem = str(error)
    problem = engine_ranks.first_problem(problem or not_kept(link, models))
    if link is not None:
        _links[name] = link
    kept = "" if any(engine_ranks.gather(RECIPES.recorded > recorded)) else f"{KEPT} "
    return not problem, kept + (problem or "joined")


def _fetch(text: str) -> tuple[bool, str]:
    """Begin to receive a version beside generation, or look how far it is."""
    try:
        fetch = Fetch.from_group_name(text)
    except ValueError as error:  # SGLang's scheduler would end
        return False, str(error)
    if fetch.link not in _links:
        return False, f"{fetch.link} has not been joined"
    return fetch_version(_links[fetch.link], fetch.version, fetch.patience)


def _join_stream(updater: Any, address: str, port: int, ranks: int, name: str) -> tuple[bool, str]:
    """Connect to the agent of this rank's pod, which sends staged versions."""
    for old in list(_streams):  # of an agent that is gone
        _streams.pop(old).close()
    own, problem = place_of_rank(address, port, updater.tp_rank, ranks), ""
    try:
        _streams[name] = AgentStream(*own, name, updater.tp_rank)
    except OSError as error:
        problem = f"the agent at {own[0]}:{own[1]}: {error!r}"
    problem = engine_ranks.first_problem(problem)
    return not problem, problem or "joined"


def _serve_regions(updater: Any, address: str, port: int, name: str) -> tuple[bool, str]:
    """Let the agent read this rank's parameters, while they hold the version that they hold now."""
    complete, problem = CONTENTS.complete, ""
    if complete is None:
        problem = "its ranks hold no complete version, or have not recorded where it lies"
    else:
        try:
            place = address, port, name, updater.tp_rank, _device(updater)
            RegionServer(CONTENTS, complete, *place)
        except (UnreadableError, OSError) as error:
            problem = str(error)
    problem = engine_ranks.first_problem(problem)
    return not problem, problem or "joined"


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
    link = _links.pop(group_name, None)
    if link is None:
        return original(updater, group_name)
    link.close()
    return True, "left"


def _on_begin(original: Callable[..., Any], updater: Any) -> Any:
    CONTENTS.overwritten()
    return original(updater)


def _on_receive(
    original: Callable[..., Any], updater: Any, *, load_format: str | None = None, **fields: Any
) -> Any:
    if not (load_format or "").startswith(PREFIX):
        return original(updater, load_format=load_format, **fields)
    return _announce(updater, load_format or "", **fields)


def _on_load(original: Callable[..., Any], updater: Any, weights: Any) -> tuple[bool, str]:
    if not isinstance(weights, _Announced):
        CONTENTS.overwritten()
        success, message = original(updater, weights)
        return success, message
    # SGLang calls this for the served model and then for each draft; the first call loads all of them, and
    # the answer to the request is that of the last call.
    if weights.result is None:
        if updater.get_model_runner().is_draft_worker:
            return False, "a direct load writes the served model and its drafts together: use selector all"
        CONTENTS.overwritten()
        weights.result = weights.load()
    return weights.result


def _on_update(
    original: Callable[..., Any], updater: Any, names: Any, dtypes: Any, shapes: Any, group_name: Any,
    load_format: str | None = None,
) -> Any:  # fmt: skip
    CONTENTS.overwritten()
    if not (load_format or "").startswith(PREFIX):
        return original(updater, names, dtypes, shapes, group_name, load_format)
    fields = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name}
    return _announce(updater, load_format or "", **fields).load()


def _announce(
    updater: Any, load_format: str, *, names: Sequence[str], dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]], group_name: str,
) -> _Announced:  # fmt: skip
    """Parse the announcement of a version. Raises ValueError for one that does not fit its names."""
    if load_format.startswith((LINK_LOAD, LINK_INSTALL)):
        if group_name not in _links:
            raise ValueError(f"{group_name} has not been joined")
        link = _links[group_name]
        if load_format.startswith(LINK_INSTALL):
            return _Announced(partial(install_version, link, load_format.removeprefix(LINK_INSTALL)))
        return _Announced(partial(receive_version, link, float(load_format.removeprefix(LINK_LOAD))))
    request = DirectLoad.from_load_format(load_format)
    if sum(request.counts) != len(names) or 0 in request.counts:
        raise ValueError(f"buckets of {sum(request.counts)} tensors for {len(names)} names")
    rows = iter(zip(names, map(_dtype, dtypes), shapes, strict=True))
    buckets = [specs_of(islice(rows, count)) for count in request.counts]
    if group_name not in _streams:
        raise ValueError(f"{group_name} has not been joined")
    stream = _streams[group_name]
    stream.wait_at_most(request.patience)
    return _Announced(partial(load_version, _models(updater), updater.device, request, buckets, stream))


def _models(updater: Any) -> list[Any]:
    """Return the served model, then those that draft for it."""
    return [updater.get_model(), *(runner.model for runner in _drafts)]


def _device(updater: Any) -> torch.device:
    """Return this rank's device with its number: other threads would take the first GPU without it."""
    device = torch.device(updater.device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def _dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
