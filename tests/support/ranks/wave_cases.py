"""Trainer ranks and the ranks of one engine that execute plans over gloo; only SGLang is a stand-in."""

from typing import Any

import torch
import torch.distributed as dist

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.planner.boxes import held_regions
from grpo_worker.weightsync.planner.engine_plan import EnginePlan, Part, plan_engine
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe, record
from grpo_worker.weightsync.sglang_plugin.second_copy import SecondCopy
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError
from grpo_worker.weightsync.sglang_plugin.wave_loader import WaveLoader
from grpo_worker.weightsync.sglang_plugin.wave_receiver import WaveReceiver
from grpo_worker.weightsync.trainer.wave_packer import Shards
from grpo_worker.weightsync.trainer.wave_sender import WaveSender
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import TransferGroup
from support.random_plans import Case, EngineModel, differences, draw

_CPU = torch.device("cpu")
_PATIENCE = 60.0


def run_plans(
    trainers: int, seeds: list[int], bucket: int, flip: bool = False, buffered: bool = False
) -> list[Any]:
    """Return, for each seed, what was wrong in this rank after two versions.

    ``buffered``: engine ranks fetch into a second copy, and install each version after the fetch.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    group = join(Backend.GLOO, store, "plans", rank, world, trainers, _CPU)
    cases = [draw(seed, trainers, world - trainers) for seed in seeds]
    return [_run(case, group, trainers, bucket, flip, buffered) for case in cases]


def _run(case: Case, group: TransferGroup, trainers: int, bucket: int, flip: bool, buffered: bool) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, recipe, kept = None, None, {}
    if rank >= trainers:
        model = EngineModel(case, rank - trainers)
        recipe = record(model, case.specs())
        kept = recipe.kept()
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, kept)
    tensors, held = held_regions([case.slices(r) for r in range(trainers)])
    plan = plan_engine(tensors, held, dict(enumerate(everything[trainers:])), lambda gpu: gpu // 2, bucket)
    if model is None or recipe is None:
        _send(case, plan, group, trainers, flip)
        return []
    second = SecondCopy() if buffered else None
    return _receive(case, plan, group, trainers, model, recipe, second)


def _send(case: Case, plan: EnginePlan, group: TransferGroup, trainers: int, flip: bool) -> None:
    rank = dist.get_rank()
    part = Part.from_data(plan.of_trainers(trainers)[rank].to_data())
    sender = WaveSender(part, group, trainers, _CPU)
    if flip and rank == 0:
        _flip_sent_bytes(group)
    for version in (1, 2):
        sender.send(Shards(case.parts(rank, version)), _PATIENCE)


def _flip_sent_bytes(group: TransferGroup) -> None:
    original = group.exchange

    def flipped(sends: Any, receives: Any, deadline: float) -> Any:
        for data, _ in sends:
            data[len(data) // 2] ^= 1
        return original(sends, receives, deadline)

    group.exchange = flipped  # type: ignore[method-assign]


def _receive(
    case: Case,
    plan: EnginePlan,
    group: TransferGroup,
    trainers: int,
    model: EngineModel,
    recipe: Recipe,
    second: SecondCopy | None,
) -> Any:
    rank, ranks = dist.get_rank() - trainers, dist.get_world_size() - trainers
    part = Part.from_data(plan.of_engine(ranks)[rank].to_data())
    loader = WaveLoader(model, recipe, part, second)
    receiver = WaveReceiver(part, rank, group, trainers, [loader], _CPU, second)
    wrong = []
    for version in (1, 2):
        try:
            receiver.fetch(_PATIENCE)
        except DirectLoadError as error:
            wrong.append(str(error))
            continue
        if second is not None and version == 2:
            wrong += [f"installed before: {name}" for name in differences(case, rank, model, 1)]
        receiver.install()
        wrong += [f"version {version}: {name}" for name in differences(case, rank, model, version)]
    return wrong
