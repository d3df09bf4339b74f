"""Ranks of a link whose engine is two ranks; every part but SGLang itself is the real one."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from grpo_worker.weightsync.protocol.buffers import dtype_of
from grpo_worker.weightsync.protocol.direct_load import LINK, direct_load_request
from grpo_worker.weightsync.protocol.group_offer import transfer_plan_of
from grpo_worker.weightsync.sglang_plugin.direct_receiver import DirectReceiver, GroupMembership
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader
from grpo_worker.weightsync.sglang_plugin.receivers import DirectLoadError, specs_of
from grpo_worker.weightsync.trainer.endpoint import TrainerEndpoint
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import connect

TRAINERS, WORLD, EXPERTS, BUCKET = 2, 4, 4, 160 << 10
_CPU = torch.device("cpu")


def tensors(version: int) -> dict[str, torch.Tensor]:
    """All weights of a version."""
    generator = torch.Generator().manual_seed(version)
    shapes = {f"experts.{n}": (128, 64) for n in range(EXPERTS)} | {"rows": (64, 32), "columns": (16, 128)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def parts(rank: int, version: int) -> list[Any]:
    """Experts whole at one trainer rank each; the rest cut."""
    found = []
    for name, tensor in tensors(version).items():
        shape = tuple(tensor.shape)
        if "experts" in name:
            if int(name[-1]) * TRAINERS // EXPERTS == rank:
                found.append((name, shape, 0, 0, tensor))
        else:
            dim = int(name == "columns")
            size = shape[dim] // TRAINERS
            piece = tensor.narrow(dim, rank * size, size).contiguous()
            found.append((name, shape, dim, rank * size, piece))
    return found


class Half(nn.Module):
    """An engine rank's model: every other expert, half of the rows, all columns."""

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

    Of a trainer rank: what went wrong with each. Of an engine rank: bytes received, whether it then held
    the version, and what was wrong.
    """
    rank = dist.get_rank()
    layouts = [TrainerEndpoint(r, TRAINERS, _CPU).layout(parts(r, 0), False) for r in range(TRAINERS)]
    name, plan_id = f"{LINK}{TRAINERS}-partial", transfer_plan_of(layouts, BUCKET).plan_id
    end = TrainerEndpoint(rank, TRAINERS, _CPU)
    place = [("127.0.0.1", end.listen(name)) if rank == 0 else None]
    dist.broadcast_object_list(place)
    assert place[0] is not None
    if rank < TRAINERS:
        found: list[Any] = [end.open(name, *place[0], WORLD, layouts, BUCKET, plan_id, backend)]
        for version in range(1, count + 1):
            found.append(end.send(parts(rank, version), 20, False))
            dist.barrier()
    else:
        members = join(backend, connect(*place[0]), name, rank, WORLD, TRAINERS, _CPU)
        found = _receive(rank, GroupMembership(members), layouts, count, moves_at)
    (Path(root) / f"done-{rank}").write_text(json.dumps(found))
    dist.barrier()
    return found


def _receive(rank: int, link: GroupMembership, layouts: list[str], count: int, moves_at: int) -> list[Any]:
    model = Half(rank - TRAINERS)
    loader, transfer_plan, found = DirectLoader(model, "cpu"), transfer_plan_of(layouts, BUCKET), []
    load = direct_load_request(transfer_plan, 20)
    buckets = [
        specs_of((tensor.name, dtype_of(tensor.dtype), tensor.shape) for tensor in bucket.tensors)
        for bucket in transfer_plan.buckets
    ]
    for version in range(1, count + 1):
        if version == moves_at and rank == TRAINERS:
            model.columns = nn.Parameter(model.columns.data.clone())
        incoming, wrong = DirectReceiver(load, link, buckets), ""
        try:
            loader.load(load.plan_id, buckets, incoming)
            if not incoming.partial:
                kept = loader.kept(load.plan_id, buckets)
                assert kept is not None
                incoming.keep(kept)
        except DirectLoadError as error:
            wrong = str(error)
        found.append((incoming.nbytes, model.holds(version), wrong))
        dist.barrier()
    return found
