"""Random versions at stand-in trainers, and engines of rank threads that load them in parts."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_worker.common.weight_checksum import checksum
from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.agent import staged_version
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.planner.regions import Box
from grpo_worker.weightsync.protocol import digest
from grpo_worker.weightsync.protocol.buffers import dtype_name
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.trainer.publisher import publish
from support.engine_server import JOB
from support.random_plans import Case, EngineModel, differences, draw
from support.rank_threads import ThreadedEngine

TRAINERS, RANKS = 3, 4
BUCKET = 40 << 10
LARGE = 7  # seed of a case of several buckets


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slices of many pieces, and buckets of many chunks, as those of a real model."""
    monkeypatch.setattr(digest, "PIECE", 1000)
    for module in ("blobs", "chunks"):
        monkeypatch.setattr(f"grpo_worker.weightsync.agent.{module}.PIECE", 1000)
    monkeypatch.setattr("grpo_worker.weightsync.agent.blobs._GAP", 0)
    monkeypatch.setattr("grpo_worker.weightsync.agent.rank_parts.SCRATCH", 700)
    monkeypatch.setattr(staged_version.VersionStream.__init__, "__defaults__", (9000,))


def cut(case: Case, version: int) -> list[list[Part]]:
    """Cut the tensors of a version among trainer ranks, by rows or columns or not at all."""
    rng = random.Random(case.seed)
    parts: list[list[Part]] = [[] for _ in range(TRAINERS)]
    for name, whole in case.sent(version).items():
        dim, count = rng.randint(0, 1), rng.randint(1, TRAINERS)
        count = min(count, whole.shape[dim])
        offset = 0
        for rank, piece in zip(rng.sample(range(TRAINERS), count), whole.chunk(count, dim), strict=False):
            parts[rank].append((name, tuple(whole.shape), dim, offset, piece.contiguous()))
            offset += piece.shape[dim]
    return parts


def publish_case(root: Path, case: Case, version: int) -> None:
    for rank, parts in enumerate(cut(case, version)):
        publish(root, version, rank, TRAINERS, parts)


def covering(seed: int) -> Case:
    """Return a case in which every tensor is kept by some rank, as an engine requires.

    A bucket is refused if its tensors are not aligned to their dtypes.
    """
    case = draw(seed, TRAINERS, RANKS)
    for name, (shape, kind) in case.shapes.items():
        if kind == "bfloat16" and shape[0] * shape[1] % 2:
            case.shapes[name] = shape, "float32"
    kept = {name for of_rank in case.kept for name, _ in of_rank}
    for name, (shape, _) in case.shapes.items():
        if name not in kept:
            case.kept[seed % RANKS].append((name, Box(0, shape[0], 0, shape[1])))
    return case


class Config:
    num_hidden_layers = 100


def engine_of(case: Case, patch: pytest.MonkeyPatch) -> ThreadedEngine:
    models = [EngineModel(case, rank) for rank in range(RANKS)]
    for model in models:
        model.config = Config()  # type: ignore[assignment]
    return ThreadedEngine(models, patch)


def agent_of(engine: ThreadedEngine) -> Agent:
    agent = Agent("engine-0", engine, RANKS, BUCKET, timeout=10, writer=JOB)
    agent.watch()
    return agent


def wrong(case: Case, engine: ThreadedEngine, version: int) -> list[Any]:
    return [
        difference
        for rank in range(RANKS)
        for difference in differences(case, rank, engine.models[rank], version)
    ]


def kept_of(case: Case, engine: ThreadedEngine) -> list[dict[str, list[Box]]]:
    rows = [TensorRow(spec.name, spec.shape, dtype_name(spec.dtype)) for spec in case.specs()]
    return [engine.recipes.of(model, rows).kept() for model in engine.models]


def kept_bytes(tensor: torch.Tensor, boxes: list[Box]) -> torch.Tensor:
    """Return the bytes of regions of ``tensor`` (2 dimensions), each once: uint8 [bytes]."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool)
    for box in boxes:
        mask[box.top : box.bottom, box.left : box.right] = True
    return tensor.contiguous().view(torch.uint8).reshape(*tensor.shape, -1)[mask].flatten()


def checksum_of_union(case: Case, engine: ThreadedEngine, version: int) -> str:
    kept, count, total = kept_of(case, engine), 0, 0
    for name, tensor in case.sent(version).items():
        data = kept_bytes(tensor, [box for of_rank in kept for box in of_rank.get(name, [])])
        count, total = count + data.numel(), total + int(data.view(torch.int8).sum(dtype=torch.int64))
    return checksum(count, total)
