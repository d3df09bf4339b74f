"""Link of an engine rank: it tells what the rank keeps, and receives its part of the engine's plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.protocol.link_exchange import LinkExchange
from grpo_worker.weightsync.sglang_plugin.background_fetch import BackgroundFetch
from grpo_worker.weightsync.sglang_plugin.loader import idle_draft
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe, union_of
from grpo_worker.weightsync.sglang_plugin.recipes import RECIPES
from grpo_worker.weightsync.sglang_plugin.second_copy import SecondCopy
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


@dataclass(slots=True)
class EngineLink:
    """This engine rank in a link.

    ``models``: the served model, then those that draft for it. ``recipes``: of each of them.
    ``receiver``: writes into the models; ``make_second``: returns one that writes into a second copy of them.
    ``names``: of all tensors. ``kept``: of those of which the rank keeps a part.
    """

    group: TransferGroup
    models: Sequence[Any]
    recipes: Sequence[Recipe]
    receiver: WaveReceiver
    make_second: Callable[[], WaveReceiver]
    device: torch.device
    names: tuple[str, ...]
    kept: frozenset[str]
    _second: WaveReceiver | None = None
    _fetch: BackgroundFetch | None = None

    def fetch(self, version: str, patience: float) -> BackgroundFetch:
        """Return the fetch of ``version``, which begins if it is new.

        Raises TransferError while another version is fetched.
        """
        if self._fetch is None or self._fetch.version != version:
            if self._fetch is not None and not self._fetch.result.done():
                raise TransferError(f"version {self._fetch.version} is still being fetched")
            self._second = self._second or self.make_second()
            self._fetch = BackgroundFetch(self._second, version, patience, self.device)
        return self._fetch

    def fetched(self, version: str) -> BackgroundFetch:
        """Return the complete fetch of ``version``, to install it. Raises TransferError without one."""
        fetch, self._fetch = self._fetch, None
        if fetch is None or fetch.version != version or not fetch.result.done() or fetch.problem():
            raise TransferError(f"version {version} has not been fetched")
        return fetch

    def close(self) -> None:
        """Leave the link. A fetch that runs ends soon, and leaves then."""
        fetch = self._fetch
        if fetch is None:
            self.group.close()
            return
        fetch.receiver.cancel()
        fetch.result.add_done_callback(lambda _: self.group.close())


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
    kept = union_of([recipe.kept() for recipe in recipes])
    exchange.put_kept(rank, kept)
    group = join(place.backend, store, place.name, place.first + rank, place.world, place.first, device)
    try:
        part = exchange.receives(rank, group.wait_for)
        group.connect([], part.sources(rank))
        within = [place.first + each for each in part.siblings(rank)]
        group.connect(within, [place.first + each for each in part.forwarders(rank)])
    except (TransferError, ValueError):
        group.close()
        raise

    def receiver(second: SecondCopy | None) -> WaveReceiver:
        pairs = zip(models, recipes, strict=True)
        loaders = [WaveLoader(model, recipe, part, second) for model, recipe in pairs]
        return WaveReceiver(part, rank, group, place.first, loaders, device, second)

    into_model = receiver(None)
    into_model.prepare()
    for recipe in recipes:
        recipe.post_load.capture(device)
    names = tuple(row.name for row in rows)
    return EngineLink(
        group, models, recipes, into_model, lambda: receiver(SecondCopy()), device, names, frozenset(kept)
    )
