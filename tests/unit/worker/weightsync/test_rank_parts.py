"""Ranks of an engine receive what they keep of a staged version, every byte of it, and nothing else."""

from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.planner.rank_parts import part_of, table_of
from grpo_worker.weightsync.planner.regions import Box, Tensor
from support.engine_server import JOB, serve
from support.random_plans import Case
from support.staged_cases import (
    LARGE,
    RANKS,
    TRAINERS,
    agent_of,
    checksum_of_union,
    covering,
    engine_of,
    kept_bytes,
    kept_of,
    publish_case,
    shrink,
    wrong,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


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
