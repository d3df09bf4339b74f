"""Plans executed by trainer ranks and an engine's ranks: every byte arrives, and wrong ones are noticed."""

import pytest

from grpo_worker.weightsync.planner.boxes import held_regions
from grpo_worker.weightsync.planner.engine_plan import EnginePlan, plan_engine
from grpo_worker.weightsync.planner.regions import Tensor
from grpo_worker.weightsync.planner.schedule import Wave
from grpo_worker.weightsync.sglang_plugin.recipe import record
from support.random_plans import EngineModel, draw
from support.ranks.launcher import run

TRAINERS, ENGINE_RANKS, SEEDS = 3, 4, list(range(40))


def planned(seed: int, bucket: int) -> EnginePlan:
    case = draw(seed, TRAINERS, ENGINE_RANKS)
    tensors, held = held_regions([case.slices(rank) for rank in range(TRAINERS)])
    kept = {rank: record(EngineModel(case, rank), case.specs()).kept() for rank in range(ENGINE_RANKS)}
    return plan_engine(tensors, held, kept, lambda rank: rank // 2, bucket)


@pytest.mark.parametrize(
    ("bucket", "buffered"),
    [pytest.param(400 << 10, False, marks=pytest.mark.slow), (400 << 10, True), (8 << 20, False)],
)
def test_random_plans_bring_every_byte_to_every_rank(bucket: int, buffered: bool) -> None:
    """With a double buffer no parameter changes before the version is installed."""
    world = TRAINERS + ENGINE_RANKS
    more = {"bucket": bucket, "buffered": buffered}
    wrong = run("wave_cases:run_plans", world, trainers=TRAINERS, seeds=SEEDS, **more)
    assert wrong == [[[]] * len(SEEDS)] * (TRAINERS + ENGINE_RANKS)
    messages = [m for seed in SEEDS for wave in planned(seed, bucket).waves for m in wave]
    assert any(message.siblings for message in messages), "nothing was forwarded"
    assert len({message.source for message in messages}) == TRAINERS


def test_a_flipped_bit_is_noticed_by_every_rank_that_gets_the_message() -> None:
    seed = next(
        s for s in SEEDS if any(m.source == 0 and m.siblings for w in planned(s, 1 << 20).waves for m in w)
    )
    sums = run(
        "wave_cases:run_plans",
        TRAINERS + ENGINE_RANKS,
        trainers=TRAINERS,
        seeds=[seed],
        bucket=1 << 20,
        flip=True,
    )
    receivers = {
        r for wave in planned(seed, 1 << 20).waves for m in wave if m.source == 0 for r in m.receivers
    }
    for rank in range(ENGINE_RANKS):
        found = " ".join(sums[TRAINERS + rank][0])
        assert ("trainer ranks [0] are not those that were sent" in found) == (rank in receivers)


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_no_rank_gets_a_byte_that_it_does_not_keep(seed: int) -> None:
    case, plan = draw(seed, TRAINERS, ENGINE_RANKS, fp8=False), None
    tensors, held = held_regions([case.slices(rank) for rank in range(TRAINERS)])
    kept = {rank: record(EngineModel(case, rank), case.specs()).kept() for rank in range(ENGINE_RANKS)}
    plan = plan_engine(tensors, held, kept, lambda rank: rank // 2, 1 << 20)
    for rank, own in enumerate(plan.of_engine(ENGINE_RANKS)):
        received = sum(region_bytes(own.tensors, wave) for wave in own.waves)
        assert received == sum(
            tensors[name].nbytes(box) for name, boxes in kept[rank].items() for box in boxes
        )


def region_bytes(tensors: dict[str, Tensor], wave: Wave) -> int:
    return sum(tensors[region.tensor].nbytes(region.box) for message in wave for region in message.regions)
