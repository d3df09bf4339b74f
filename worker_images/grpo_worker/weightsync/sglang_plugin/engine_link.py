"""Link of an engine rank: it tells what the rank keeps, and receives its part of the engine's plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.planner.boxes import disjoint
from grpo_worker.weightsync.planner.regions import Box
from grpo_worker.weightsync.protocol.link_exchange import LinkExchange
from grpo_worker.weightsync.sglang_plugin.loader import idle_draft
from grpo_worker.weightsync.sglang_plugin.recipes import RECIPES
from grpo_worker.weightsync.sglang_plugin.wave_loader import WaveLoader
from grpo_worker.weightsync.sglang_plugin.wave_receiver import WaveReceiver
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import TransferError, TransferGroup, connect, give_up


@dataclass(frozen=True, slots=True)
class LinkPlace:
    """Store of a link, and the engine's first place in its group."""

    name: str
    address: str
    port: int
    first: int
    world: int
    backend: Backend


@dataclass(frozen=True, slots=True)
class EngineLink:
    """This engine rank in a link.

    ``names``: of all tensors. ``kept``: of those of which the rank keeps a part.
    """

    group: TransferGroup
    receiver: WaveReceiver
    names: tuple[str, ...]
    kept: frozenset[str]

    def close(self) -> None:
        """Leave the link."""
        self.group.close()


def join_link(models: Sequence[Any], place: LinkPlace, rank: int, device: torch.device) -> EngineLink:
    """Join as rank ``rank`` of the engine.

    ``models``: the served model, then those that draft for it. Their weights are lost when they load tensors
    of these names and shapes for the first time: see ``record``. A rank that cannot join makes the other
    members give up. Raises TransferError, ValueError without a plan, and the store's RuntimeError when it
    is gone.
    """
    store = connect(place.address, place.port)
    try:
        return _join(models, place, rank, device, store)
    except (RuntimeError, ValueError):
        give_up(store, place.name)
        raise


def _join(
    models: Sequence[Any], place: LinkPlace, rank: int, device: torch.device, store: TCPStore
) -> EngineLink:
    exchange = LinkExchange(PrefixStore(place.name, store))
    rows = exchange.tensors()
    if rows is None:
        raise TransferError(f"the trainer ranks left no tensors for {place.name}: use one release")
    recipes = [RECIPES.of(model, rows, exchange.beat) for model in models]
    for model, recipe in zip(models[1:], recipes[1:], strict=True):
        if not recipe.kept():
            raise TransferError(idle_draft(model))
    kept = _union([recipe.kept() for recipe in recipes])
    exchange.put_kept(rank, kept)
    group = join(place.backend, store, place.name, place.first + rank, place.world, place.first, device)
    try:
        part = exchange.receives(rank, group.wait_for)
    except (TransferError, ValueError):
        group.close()
        raise
    loaders = [WaveLoader(model, recipe, part) for model, recipe in zip(models, recipes, strict=True)]
    receiver = WaveReceiver(part, rank, group, place.first, loaders, device)
    return EngineLink(group, receiver, tuple(row.name for row in rows), frozenset(kept))


def _union(kept: Sequence[dict[str, list[Box]]]) -> dict[str, list[Box]]:
    names = {name for of_model in kept for name in of_model}
    return {name: disjoint(box for of_model in kept for box in of_model.get(name, ())) for name in names}
