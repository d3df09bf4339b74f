"""Ranks of a transfer group with an engine of two ranks; every part but SGLang itself is real."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.protocol.buffers import dtype_of
from grpo_worker.weightsync.protocol.direct_load import LINK, direct_load_request
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, transfer_plan_of
from grpo_worker.weightsync.protocol.packed_layouts import pack
from grpo_worker.weightsync.sglang_plugin.direct_receiver import DirectReceiver, GroupMember
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader
from grpo_worker.weightsync.sglang_plugin.receivers import DirectLoadError, specs_of
from grpo_worker.weightsync.trainer.endpoint import TrainerEndpoint
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import connect

TRAINERS, WORLD, EXPERTS, BUCKET = 2, 4, 4, 160 << 10
_CPU = torch.device("cpu")


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return all weights of a version."""
    generator = torch.Generator().manual_seed(version)
    shapes = {f"experts.{n}": (128, 64) for n in range(EXPERTS)} | {"rows": (64, 32), "columns": (16, 128)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def parts(rank: int, version: int) -> list[Any]:
    """Return this rank's parts: complete experts, and shards of the rest."""
    own = []
    for name, tensor in tensors(version).items():
        shape = tuple(tensor.shape)
        if "experts" in name:
            if int(name[-1]) * TRAINERS // EXPERTS == rank:
                own.append((name, shape, 0, 0, tensor))
        else:
            dim = int(name == "columns")
            size = shape[dim] // TRAINERS
            piece = tensor.narrow(dim, rank * size, size).contiguous()
            own.append((name, shape, dim, rank * size, piece))
    return own


class Half(nn.Module):
    """Model of an engine rank: every other expert, half of the rows, all columns."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.experts = nn.Parameter(torch.zeros(EXPERTS // 2, 128, 64))
        self.rows = nn.Parameter(torch.zeros(32, 32))
        self.columns = nn.Parameter(torch.zeros(16, 128))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "columns":
                self.columns.data.copy_(tensor)
            elif name == "rows":
                self.rows.data.copy_(tensor.narrow(0, 32 * self._rank, 32))
            elif int(name[-1]) % 2 == self._rank:
                self.experts.data[int(name[-1]) // 2].copy_(tensor)

    def holds(self, version: int) -> bool:
        wanted = tensors(version)
        mine = torch.stack([wanted[f"experts.{n}"] for n in range(self._rank, EXPERTS, 2)])
        pairs = [
            (self.experts, mine),
            (self.rows, wanted["rows"][32 * self._rank :][:32]),
            (self.columns, wanted["columns"]),
        ]
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def versions(root: str, backend: str, count: int, moves_at: int) -> list[Any]:
    """Send ``count`` versions. Engine rank 0's parameters are elsewhere from version ``moves_at`` on.

    A trainer rank returns the error of each version. An engine rank returns the bytes received, whether it
    then held the version, and the error.
    """
    rank = dist.get_rank()
    layouts = [TrainerEndpoint(r, TRAINERS, _CPU).layout(parts(r, 0), False) for r in range(TRAINERS)]
    # The ranks' own group contains the engine's ranks too.
    end = TrainerEndpoint(rank, TRAINERS, _CPU, lambda _: [pack(layout) for layout in layouts])
    end.exchange_layouts(parts(rank % TRAINERS, 0), False)
    name, plan_id = f"{LINK}{TRAINERS}-partial", end.plan(BUCKET, False).plan_id
    place = [("127.0.0.1", *end.listen(name)) if rank == 0 else None]
    dist.broadcast_object_list(place)
    assert place[0] is not None
    if rank < TRAINERS:
        offer = GroupOffer(name, *place[0], WORLD, TRAINERS, Backend(backend), plan_id, BUCKET)
        results: list[Any] = [end.open(offer)]
        for version in range(1, count + 1):
            results.append(end.send(parts(rank, version), 20, False))
            dist.barrier()
    else:
        members = join(Backend(backend), connect(*place[0][:2]), name, rank, WORLD, TRAINERS, _CPU)
        results = _receive(rank, GroupMember(members), layouts, count, moves_at)
    (Path(root) / f"done-{rank}").write_text(json.dumps(results))
    dist.barrier()
    return results


def _receive(rank: int, member: GroupMember, layouts: list[str], count: int, moves_at: int) -> list[Any]:
    model = Half(rank - TRAINERS)
    loader, transfer_plan, results = DirectLoader([model], "cpu"), transfer_plan_of(layouts, BUCKET), []
    load = direct_load_request(transfer_plan, 20)
    buckets = [
        specs_of((tensor.name, dtype_of(tensor.dtype), tensor.shape) for tensor in bucket.tensors)
        for bucket in transfer_plan.buckets
    ]
    for version in range(1, count + 1):
        if version == moves_at and rank == TRAINERS:
            model.columns = nn.Parameter(model.columns.data.clone())
        incoming, wrong = DirectReceiver(load, member, buckets), ""
        try:
            loader.load(load.plan_id, buckets, incoming)
            if not incoming.partial:
                used = loader.used_ranges(load.plan_id, buckets)
                assert used is not None
                incoming.publish_needed_ranges(used)
        except DirectLoadError as error:
            wrong = str(error)
        results.append((incoming.nbytes, model.holds(version), wrong))
        dist.barrier()
    return results
