"""Ranks of an engine receive what they keep of a staged version, every byte of it, and nothing else."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.common.weight_checksum import checksum
from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.agent import staged_version
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.planner.rank_parts import part_of, table_of
from grpo_worker.weightsync.planner.regions import Box, Tensor
from grpo_worker.weightsync.protocol import digest
from grpo_worker.weightsync.protocol.buffers import dtype_name
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.trainer.publisher import publish
from support.engine_server import JOB, serve
from support.random_plans import Case, EngineModel, differences, draw
from support.rank_threads import ThreadedEngine

TRAINERS, RANKS = 3, 4
BUCKET = 40 << 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of many pieces, and buckets of many chunks, as those of a real model."""
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


@pytest.mark.parametrize("seed", range(12))
def test_every_rank_holds_what_its_own_loader_would_have_loaded(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = covering(seed)
    engine = engine_of(case, monkeypatch)
    agent, sources = agent_of(engine), serve(tmp_path, TRAINERS)
    for version in (1, 2):
        publish_case(tmp_path, case, version)
        status = agent.sync(JOB, version, sources)
        assert status["state"] == EngineState.SERVING
        assert not wrong(case, engine, version)
        assert status["checksum"] == checksum_of_union(case, engine, version)
        nbytes = sum(blob.stat().st_size for blob in tmp_path.glob(f"v{version}/*.bin"))
        assert status["receivedBytes"] <= nbytes
    sent = case.sent(1)
    for received, kept in zip(engine.received, kept_of(case, engine), strict=True):
        needed = sum(len(kept_bytes(sent[name], boxes)) for name, boxes in kept.items())
        assert needed <= received <= needed + 16 * len(kept), "nothing but what it keeps, and alignment"


LARGE = 7  # seed of a case of several buckets


def test_bits_that_flip_on_the_way_to_a_rank_leave_the_engine_out_of_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = covering(LARGE)
    engine = engine_of(case, monkeypatch)
    agent, sources = agent_of(engine), serve(tmp_path, TRAINERS)
    publish_case(tmp_path, case, 1)
    publish_case(tmp_path, case, 2)
    agent.sync(JOB, 1, sources)

    def spoil(rank: int, flat: torch.Tensor) -> None:
        if rank == RANKS - 1 and len(flat):
            flat[len(flat) // 2] ^= 1

    engine.spoil, engine.calls = spoil, []
    with pytest.raises(UpdateError, match=rf"rank {RANKS - 1}: bucket \d: its bytes are not those that were"):
        agent.sync(JOB, 2, sources)
    assert agent.status()["state"] == EngineState.STALE and "resume" not in engine.calls
    engine.spoil = lambda rank, flat: None
    assert agent.sync(JOB, 2, sources)["state"] == EngineState.SERVING
    assert not wrong(case, engine, 2)


@pytest.mark.parametrize("trainer", range(TRAINERS))
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_damage_in_a_trainers_memory_is_noticed_wherever_a_rank_keeps_it(
    trainer: int, place: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = covering(LARGE)
    engine = engine_of(case, monkeypatch)
    agent, sources = agent_of(engine), serve(tmp_path, TRAINERS)
    publish_case(tmp_path, case, 1)
    blob = tmp_path / "v1" / f"rank-{trainer}.bin"
    good = blob.read_bytes()
    at = int(place * (len(good) - 1)) // 256 * 256  # a slice begins at each multiple, or goes on
    blob.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(UpdateError, match="another digest"):
        agent.sync(JOB, 1, sources)
    assert agent.status()["state"] == EngineState.STALE and "resume" not in engine.calls
    blob.write_bytes(good)
    assert agent.sync(JOB, 1, sources)["state"] == EngineState.SERVING
    assert not wrong(case, engine, 1)


def test_a_rank_that_cannot_record_what_it_keeps_fails_all_of_them_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = covering(LARGE)
    engine = engine_of(case, monkeypatch)
    agent, sources = agent_of(engine), serve(tmp_path, TRAINERS)
    publish_case(tmp_path, case, 1)
    with monkeypatch.context() as broken:
        broken.setattr(engine.models[1], "load_weights", lambda _: 1 / 0)
        with pytest.raises(
            UpdateError, match=r"direct load failed: rank 1: recording what it keeps: ZeroDivisionError"
        ):
            agent.sync(JOB, 1, sources)
    assert agent.status()["state"] == EngineState.STALE
    assert agent.sync(JOB, 1, sources)["state"] == EngineState.SERVING
    assert not wrong(case, engine, 1)


def test_tensors_that_no_rank_keeps_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without drafts ignores the layers that draft; one of several hosts, the experts of others."""
    shape, names = (256, 64), [f"model.layers.{number}.m.weight" for number in range(8)]
    held = [[(name, 0, 0, 256)] for name in names]
    kept = [
        [(names[0], Box(64 * rank, 64 * rank + 64, 0, 64)), (names[5], Box(0, 256, 0, 64))]
        for rank in range(RANKS)
    ]
    case = Case(dict.fromkeys(names, (shape, "float32")), held, kept, 0)
    engine = engine_of(case, monkeypatch)
    for model in engine.models:
        model.config.num_hidden_layers = 1
    agent, sources = agent_of(engine), serve(tmp_path, TRAINERS)
    publish_case(tmp_path, case, 1)
    status = agent.sync(JOB, 1, sources)
    assert not wrong(case, engine, 1)
    tensor = 4 * 256 * 64
    assert engine.received == [tensor // 4 + tensor] * RANKS
    assert 2 * tensor <= status["receivedBytes"] <= 2 * tensor + 9000, (
        "and the chunk read before the engine pauses"
    )
    assert status["checksum"].startswith(f"{2 * tensor}:")


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_random_regions_hold_each_kept_byte_once(seed: int) -> None:
    """Regions of one rank may overlap, or leave columns out."""
    rng = np.random.default_rng(seed)
    tensors = [Tensor(int(rng.integers(1, 12)), int(rng.integers(1, 9)), "bfloat16") for _ in range(3)]
    kept: dict[str, list[Box]] = {}
    for number, tensor in enumerate(tensors[: rng.integers(1, 4)]):
        for _ in range(rng.integers(1, 4)):
            rows, columns = (
                np.sort(rng.integers(0, tensor.rows + 1, 2)),
                np.sort(rng.integers(0, tensor.columns + 1, 2)),
            )
            if rows[0] < rows[1] and columns[0] < columns[1]:
                kept.setdefault(f"t{number}", []).append(Box(*map(int, (*rows, *columns))))
    tables = [table_of(["before", "t0", "t1", "t2"], kept)] * 2
    part = part_of(tables, 1, tensors)
    end = 0
    for number, tensor in enumerate(tensors):
        wanted = np.zeros((tensor.rows, 2 * tensor.columns), dtype=int)
        for box in kept.get(f"t{number}", ()):
            wanted[box.top : box.bottom, 2 * box.left : 2 * box.right] = 1
        found = np.zeros_like(wanted)
        for band in part.bands.get(number, ()):
            assert band.start >= end and (end in (band.start, 0) or band.start - end < 16)
            for left, right in band.columns:
                found[band.top : band.bottom, left:right] += 1
            end = band.start + (band.bottom - band.top) * band.pitch
        assert (found == wanted).all()
    assert part.nbytes == end


def test_a_table_names_tensors_that_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match=r"must be those of the version, got \['other'\]"):
        table_of(["a"], {"other": [Box(0, 1)]})
    with pytest.raises(ValueError, match=r"b has more than 2\^31 rows or columns: split it"):
        table_of(["a", "b"], {"a": [Box(0, 5)], "b": [Box(0, 2**31)]})
